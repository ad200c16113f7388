"""Compute the held-out loss during training, on a fixed set of rows in batches no larger than training's."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch

from cuda_memory.units import round_up
from lean_finetune.config.schema import Train
from lean_finetune.model.precision import autocast
from lean_finetune.step.batches import Batch, TokenPart, collate, idle_batch, part_of
from lean_finetune.step.loss import summed_loss
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

    def after_step(self, step: int, parallel: ParallelModel) -> float:
        """Compute it; raises Diverged if it is not finite. All processes call this."""
        job = self._job
        pinned = job.device.type == "cuda"
        batches = heldout_batches(
            job.heldout, job.train.heldout_rows, self._max_tokens, job.pad_id, pin_memory=pinned, part=job.part
        )
        # Without chunks in training, the tokens of a micro-batch limit the logits of a longer held-out row.
        chunk = job.train.loss_chunk or self._max_tokens
        loss = heldout_loss(parallel, batches, job.pad_id, job.train, chunk, job.device, job.part)
        if not math.isfinite(loss):
            raise Diverged(
                f"train.lr: held-out loss must be finite; it is {loss} after optimizer step {step}; lower train.lr"
            )
        return loss


def heldout_batches(
    rows: TokenRows,
    count: int,
    max_tokens: int,
    pad_id: int,
    *,
    pin_memory: bool = False,
    part: TokenPart | None = None,
) -> Iterator[Batch]:
    """Yield the first `count` held-out rows, sorted by length, in batches of at most `max_tokens` padded tokens.

    A row longer than `max_tokens` is a batch by itself. With a `part`, batches have that part of their tokens.
    """
    numbers = sorted(rows.used[:count].tolist(), key=lambda row: (rows.lengths[row], row))
    start = 0
    for end in range(1, len(numbers) + 1):
        longest_next = rows.lengths[numbers[min(end, len(numbers) - 1)]]
        if end == len(numbers) or (end - start + 1) * longest_next > max_tokens:
            batch = [(rows.ids(row), rows.spans(row)) for row in numbers[start:end]]
            longest = len(batch[-1][0])
            if part is None:
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
) -> float:
    """Return the mean cross-entropy per trained token over held-out batches, without dropout.

    All processes call this with all batches; each computes those of its index in dimension `data` of the layout.
    """
    parallel.model.eval()
    summed = torch.zeros((), dtype=torch.float64, device=device)  # Read once: each read waits for the GPU.
    tokens = 0
    with autocast(train, device.type):
        # Every process takes all batches, so all make equally many passes: each gathers sharded weights.
        while group := list(islice(batches, parallel.layout.data)):
            batch = group[parallel.place.data] if parallel.place.data < len(group) else idle_batch(pad_id, part)
            loss = parallel.run(partial(summed_loss, batch=batch.to(device), chunk=chunk, exchange=parallel.exchange))
            if parallel.computes_loss:
                summed += loss
                tokens += len(batch.supervised_index_N)
    parallel.model.train()
    total, count = parallel.sum_over_ranks(torch.stack([summed, torch.full_like(summed, tokens)])).tolist()
    return total / count
