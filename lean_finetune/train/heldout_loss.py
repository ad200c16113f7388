"""Compute the held-out loss during training, on a fixed set of rows in batches no larger than training's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

import numpy as np
import torch
from torch import nn

from cuda_memory.units import round_up
from lean_finetune.config.schema import Train
from lean_finetune.model.precision import autocast
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.rows.attachment import limited
from lean_finetune.rows.batch_part import BatchPart
from lean_finetune.step.batches import (
    Batch,
    TokenPart,
    collate,
    idle_batch,
    part_of,
    with_parts,
)
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_checks import Diverged
from lean_finetune.step.step_loss import StepGoal, TokenLoss, known_figures
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.job import TrainJob

HELDOUT_FIGURES = 10
"""Held-out figures of a run with train.heldout_every_steps: auto: they show when more steps no longer help."""
MOST_HELDOUT_STEPS = 500
"""Steps between them: a long run has more, so that one that fails is seen early."""


def heldout_steps(train: Train, total_steps: int) -> int | None:
    """What train.heldout_every_steps means for a run of so many optimizer steps."""
    if train.heldout_every_steps != "auto":
        return train.heldout_every_steps
    return min(max(1, total_steps // HELDOUT_FIGURES), MOST_HELDOUT_STEPS)


class HeldoutLosses:
    """The held-out losses of a run: every `train.heldout_every_steps` steps, and after the last one."""

    def __init__(self, job: TrainJob, total_steps: int):
        """Batches have at most as many tokens as the first step's micro-batches, which are the largest by plan.

        Of each measure of what rows carry, they have at most as much as the micro-batch that has most. So the limits of
        section bucket hold for them too.
        """
        self._job, self._total_steps = job, total_steps
        self._every = heldout_steps(job.train, total_steps)
        self._max_tokens = max(micro_batch.padded_tokens for micro_batch in job.plan.steps[0])
        self._limits = job.plan.most

    def is_due(self, step: int) -> bool:
        """Whether one is computed after this optimizer step."""
        every = self._every
        return every is not None and ((step + 1) % every == 0 or step + 1 == self._total_steps)

    def after_step(self, step: int, parallel: ParallelModel) -> dict[str, float]:
        """Compute it, with the figures of preferences; raises Diverged if it is not finite. All processes call this."""
        job = self._job
        count = self.count
        batches = partial(
            heldout_batches,
            job.heldout,
            count,
            self._max_tokens,
            job.pad_id,
            limits=self._limits,
            pin_memory=job.device.type == "cuda",
            part=job.part,
            kind=job.train.row_kind,
        )
        # Without chunks in training, the tokens of a micro-batch limit the logits of a longer held-out row.
        chunk = job.train.loss_chunk or self._max_tokens
        trained = heldout_units(job.heldout, count, job.train.row_kind)
        objective = StepGoal.of(job.train, job.heldout, trained.ravel()).begin(chunk)
        attached = (one.trained_by(job.train) for one in job.heldout.attached)
        loss = heldout_loss(
            parallel,
            batches(),
            batches(trained=False),
            objective,
            job.pad_id,
            job.train,
            job.device,
            job.part,
            beside=[one.blank() for one in attached if one.together],
        )
        if not math.isfinite(loss):
            raise Diverged(
                f"train.lr: held-out loss must be finite; it is {loss} after optimizer step {step}; lower train.lr"
            )
        figures = {"loss": loss, **known_figures(objective.figures(parallel))}
        return {f"heldout_{name}": value for name, value in figures.items()}

    @property
    def count(self) -> int:
        """Rows of tokens that are used."""
        return self._job.train.heldout_rows * self._job.train.row_kind.token_rows


def heldout_units(rows: TokenRows, count: int, kind: RowKind, *, trained: bool = True) -> np.ndarray:
    """The first `count` held-out rows of tokens, int64 (U, r): r of them stay together.

    Of these the trained ones, or those that pass before them.
    """
    units = rows.used[:count].reshape(-1, kind.token_rows)
    return units[:, : kind.unit] if trained else units[:, kind.unit :]


def heldout_batches(
    rows: TokenRows,
    count: int,
    max_tokens: int,
    pad_id: int,
    *,
    limits: Mapping[str, int] = MappingProxyType({}),
    pin_memory: bool = False,
    part: TokenPart | None = None,
    kind: RowKind = RowKind.ANSWER,
    trained: bool = True,
) -> Iterator[Batch]:
    """Yield `heldout_units`, sorted by length, in batches of at most `max_tokens` padded tokens.

    `limits` of measures of what rows carry hold too, as of `Plan.most`. A row that has more is a batch by itself. With
    a `part`, batches have that part of their tokens. Rows that stay together count with the longest one's length.
    """
    units = heldout_units(rows, count, kind, trained=trained)
    lengths = rows.lengths[units].max(1)
    order = np.lexsort((units[:, 0], lengths))
    units, lengths = units[order], lengths[order].tolist()
    measured = [(measure.values[units].sum(1).tolist(), most) for measure, most in limited(rows.attached, limits)]
    for start, end in batch_bounds(lengths, max_tokens // units.shape[1], measured):
        chosen, longest = units[start:end].ravel(), lengths[end - 1]
        batch = rows.gather(chosen)
        if part is None:
            made = collate(batch, longest, pad_id, pin_memory=pin_memory)
            yield with_parts(made, rows, chosen, kind, pin_memory=pin_memory)
        else:
            yield part_of(collate(batch, round_up(longest, part.parts), pad_id), part, pin_memory=pin_memory)


def batch_bounds(
    lengths: Sequence[int], max_tokens: int, measured: Sequence[tuple[Sequence[int], int]] = ()
) -> Iterator[tuple[int, int]]:
    """Divide rows of ascending `lengths` into batches within all limits, each (first row, row after its last one).

    `measured` are other figures of rows, each with the most that a batch may have. A row above a limit is a batch by
    itself.
    """
    start, filled = 0, [0] * len(measured)
    for row, length in enumerate(lengths):
        own = [values[row] for values, _ in measured]
        over = any(sums + one > most for sums, one, (_, most) in zip(filled, own, measured, strict=True))
        if row > start and ((row - start + 1) * length > max_tokens or over):
            yield start, row
            start, filled = row, [0] * len(measured)
        filled = [sums + one for sums, one in zip(filled, own, strict=True)]
    if lengths:
        yield start, len(lengths)


def own_batches(
    parallel: ParallelModel,
    batches: Iterator[Batch],
    idle: Batch,
    device: torch.device,
    beside: Sequence[BatchPart] = (),
) -> Iterator[Batch]:
    """This process's batches on the device: those of its index in dimension `data` of the layout.

    Every process takes all batches, so all make equally many passes: each gathers sharded weights. So they do for parts
    of the model that take what rows carry: a batch without it gets that of `beside` if another process's has it.
    """
    while group := list(islice(batches, parallel.layout.data)):
        own = group[parallel.place.data] if parallel.place.data < len(group) else idle
        for one in beside:
            if not _has(own, one) and any(_has(batch, one) for batch in group):
                own = replace(own, parts=(*own.parts, one))
        yield own.to(device)


def _has(batch: Batch, like: BatchPart) -> bool:
    """Whether a batch has a part of the same attachment."""
    return any(type(part) is type(like) for part in batch.parts)


@torch.no_grad()
def heldout_loss(
    parallel: ParallelModel,
    batches: Iterator[Batch],
    before: Iterator[Batch],
    objective: TokenLoss,
    pad_id: int,
    train: Train,
    device: torch.device,
    part: TokenPart | None = None,
    beside: Sequence[BatchPart] = (),
) -> float:
    """Return the objective's loss of held-out batches, per trained token or compared answer, without dropout.

    `before` are the batches of rows that are not trained, for `TokenLoss.before`. `beside` as of `own_batches`.
    All processes call this with all batches; each computes those of its index in dimension `data` of the layout.
    """

    def evaluate(batch: Batch, compute: Callable[[nn.Module, Batch], None]) -> None:
        with autocast(train, device.type):
            parallel.run(lambda model: compute(model, batch))

    objective.before(own_batches(parallel, before, idle_batch(pad_id), device), evaluate, parallel)
    parallel.model.eval()
    summed = torch.zeros((), dtype=torch.float64, device=device)  # Read once: each read waits for the GPU.
    tokens = 0
    with autocast(train, device.type):
        compute = partial(summed_loss, objective=objective, exchange=parallel.exchange)
        for batch in own_batches(parallel, batches, idle_batch(pad_id, part), device, beside):
            loss = parallel.run(partial(compute, batch=batch))
            if parallel.computes_loss:
                summed += loss
                tokens += len(batch.supervised_index_N)
    parallel.model.train()
    total, count = parallel.sum_over_ranks(torch.stack([summed, torch.full_like(summed, tokens)])).tolist()
    return objective.mean(total, count)
