"""Compute the held-out loss during training, on a fixed set of rows in batches no larger than training's."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch

from cuda_memory.units import round_up
from lean_finetune.config.schema import Train
from lean_finetune.model.precision import autocast
from lean_finetune.step.batches import Batch, TokenPart, collate, idle_batch, part_of, read_answers
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.pair_loss import FIGURES, PairLoss, StepPairs
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.step.training_step import Diverged
from lean_finetune.train.job import TrainJob


class HeldoutLosses:
    """The held-out losses of a run: every `train.heldout_every_steps` steps, and after the last one."""

    def __init__(self, job: TrainJob, total_steps: int):
        """Batches have at most as many tokens as the first step's micro-batches, which are the largest by plan."""
        self._job, self._total_steps = job, total_steps
        self._max_tokens = max(micro_batch.padded_tokens for micro_batch in job.plan.steps[0])

    def is_due(self, step: int) -> bool:
        """Whether one is computed after this optimizer step."""
        every = self._job.train.heldout_every_steps
        return every is not None and ((step + 1) % every == 0 or step + 1 == self._total_steps)

    def after_step(self, step: int, parallel: ParallelModel) -> dict[str, float]:
        """Compute it, of pairs with the share in the right order; raises Diverged if it is not finite.

        All processes call this.
        """
        job = self._job
        pinned = job.device.type == "cuda"
        count, paired = job.train.heldout_rows, job.train.pairs is not None
        count = max(2, count // 2 * 2) if paired else count
        pairs = StepPairs.of(job.train, job.heldout.used[:count], job.heldout.supervised)
        batches = heldout_batches(
            job.heldout, count, self._max_tokens, job.pad_id, pin_memory=pinned, part=job.part, paired=paired
        )
        # Without chunks in training, the tokens of a micro-batch limit the logits of a longer held-out row.
        chunk = job.train.loss_chunk or self._max_tokens
        pair_loss = None if pairs is None else PairLoss(step=pairs)
        loss = heldout_loss(parallel, batches, job.pad_id, job.train, chunk, job.device, job.part, pair_loss)
        if not math.isfinite(loss):
            raise Diverged(
                f"train.lr: held-out loss must be finite; it is {loss} after optimizer step {step}; lower train.lr"
            )
        figures = {"heldout_loss": loss}
        if pair_loss is not None:
            means = pair_loss.means(parallel.sum_over_ranks).tolist()
            figures |= {f"heldout_{name}": value for name, value in zip(FIGURES, means, strict=True)}
        return figures


def heldout_batches(
    rows: TokenRows,
    count: int,
    max_tokens: int,
    pad_id: int,
    *,
    pin_memory: bool = False,
    part: TokenPart | None = None,
    paired: bool = False,
) -> Iterator[Batch]:
    """Yield the first `count` held-out rows, sorted by length, in batches of at most `max_tokens` padded tokens.

    A row longer than `max_tokens` is a batch by itself. With a `part`, batches have that part of their tokens. With
    `paired`, rows 0 and 1, 2 and 3, … stay together, and count with the longer one's length.
    """
    units = rows.used[:count].reshape(-1, 2 if paired else 1)
    lengths = rows.lengths[units].max(1)
    order = np.lexsort((units[:, 0], lengths))
    units, lengths = units[order], lengths[order].tolist()
    start = 0
    for end in range(1, len(units) + 1):
        longest_next = lengths[min(end, len(units) - 1)]
        if end == len(units) or (end - start + 1) * units.shape[1] * longest_next > max_tokens:
            chosen, longest = units[start:end].ravel(), lengths[end - 1]
            batch = rows.gather(chosen)
            if paired:
                answers = read_answers(rows, chosen, pin_memory=pin_memory)
                yield replace(collate(batch, longest, pad_id, pin_memory=pin_memory), answers=answers)
            elif part is None:
                yield collate(batch, longest, pad_id, pin_memory=pin_memory)
            else:
                yield part_of(collate(batch, round_up(longest, part.parts), pad_id), part, pin_memory=pin_memory)
            start = end


@torch.no_grad()
def heldout_loss(
    parallel: ParallelModel,
    batches: Iterator[Batch],
    pad_id: int,
    train: Train,
    chunk: int | None,
    device: torch.device,
    part: TokenPart | None = None,
    pair_loss: PairLoss | None = None,
) -> float:
    """Return the mean cross-entropy per trained token over held-out batches, without dropout.

    With a `pair_loss`, the loss of all its pairs, which are those of the batches.
    All processes call this with all batches; each computes those of its index in dimension `data` of the layout.
    """
    parallel.model.eval()
    summed = torch.zeros((), dtype=torch.float64, device=device)  # Read once: each read waits for the GPU.
    tokens = 0
    with autocast(train, device.type):
        # Every process takes all batches, so all make equally many passes: each gathers sharded weights.
        while group := list(islice(batches, parallel.layout.data)):
            batch = group[parallel.place.data] if parallel.place.data < len(group) else idle_batch(pad_id, part)
            batch = batch.to(device)
            loss = parallel.run(
                partial(summed_loss, batch=batch, chunk=chunk, exchange=parallel.exchange, pair_loss=pair_loss)
            )
            if parallel.computes_loss:
                summed += loss
                tokens += len(batch.supervised_index_N)
    parallel.model.train()
    total, count = parallel.sum_over_ranks(torch.stack([summed, torch.full_like(summed, tokens)])).tolist()
    return total / count if pair_loss is None else total
