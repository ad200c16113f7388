"""The micro-batches that are traced: the worst of the real plan, in the positions where they stand."""

import numpy as np

from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.worst_micro_batches import worst_micro_batches
from lean_finetune.step.batches import BatchShape

TracedSteps = tuple[tuple[BatchShape, ...], ...]
"""Optimizer steps, each a sequence of micro-batch shapes."""


def traced_steps(plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool) -> TracedSteps:
    """Steps that reach the peak of the whole plan.

    The first begins with the plan's first micro-batch and goes on with the worst of all later ones, which meet the
    gradients of the one before. Each further step is one more micro-batch that is the first of its step.
    `lengths` are the tokens of every training row; `tiled`: the device's attention works in tiles of tokens;
    `windowed`: the model makes masks, or keeps the scores of its attention.
    """
    first, later = worst_micro_batches(plan, lengths, tiled=tiled, windowed=windowed)
    starts = list(dict.fromkeys(BatchShape.of(micro_batch, lengths) for micro_batch in first))
    following = list(dict.fromkeys(BatchShape.of(micro_batch, lengths) for micro_batch in later))
    return ((starts[0], *following), *((start,) for start in starts[1:]))


def longest_row(plan: Plan, lengths: np.ndarray) -> int:
    """Positions of the longest row: padded where rows are padded, bare where they are joined."""
    return int(lengths[plan.rows].max() if plan.flat else plan.length.max())


def only(steps: TracedSteps, step: int, number: int) -> TracedSteps:
    """The first micro-batch of all, and micro-batch `number` of a step in the position it has there."""
    start = steps[0][0]
    if (step, number) == (0, 0):
        return ((start,),)
    found = steps[step][number]
    return ((start, found),) if number else ((start,), (found,))


def halved(steps: TracedSteps) -> TracedSteps | None:
    """About the same steps with bucket.max_tokens halved: half the rows; None when every micro-batch has one.

    Supervised tokens are bounded from above, so the prediction is never too low.
    """
    if all(_rows_to_halve(shape) < 2 for step in steps for shape in step):
        return None
    return tuple(tuple(_halved(shape) for shape in step) for step in steps)


def _rows_to_halve(shape: BatchShape) -> int:
    """Rows of a micro-batch, joined or not."""
    return shape.rows if shape.joined_lengths is None else len(shape.joined_lengths)


def _halved(shape: BatchShape) -> BatchShape:
    """Half the rows of a micro-batch, rounded up; of joined ones every other, from the longest on."""
    joined = shape.joined_lengths
    if joined is not None:
        joined = tuple(sorted(joined, reverse=True)[::2])
    rows = 1 if joined else -(-shape.rows // 2)
    length = sum(joined) if joined else shape.length
    return BatchShape(rows=rows, length=length, supervised=min(shape.supervised, rows * length), joined_lengths=joined)
