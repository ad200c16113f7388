"""Choose the micro-batches to trace: the worst of the plan, in their positions within a step."""

import numpy as np

from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.worst_micro_batches import worst_micro_batches
from lean_finetune.step.batches import BatchShape

TracedSteps = tuple[tuple[BatchShape, ...], ...]
"""Optimizer steps, each a sequence of micro-batch shapes."""


def traced_steps(plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool, chunked: bool = False) -> TracedSteps:
    """Steps that reach the peak of the whole plan.

    The first step has the plan's first micro-batch and the worst of all that follow another one in their step, where
    gradients exist already. Each further step has one micro-batch that is the first of its step.

    `lengths` are the tokens of every training row. `tiled`: the device's attention works in tiles of tokens.
    `windowed`: the model creates masks, or saves attention scores. `chunked`: layers work in chunks of a row.
    """
    first, later = worst_micro_batches(plan, lengths, tiled=tiled, windowed=windowed, chunked=chunked)
    starts = list(dict.fromkeys(BatchShape.of(micro_batch, lengths) for micro_batch in first))
    following = list(dict.fromkeys(BatchShape.of(micro_batch, lengths) for micro_batch in later))
    return ((starts[0], *following), *((start,) for start in starts[1:]))


def longest_row(plan: Plan, lengths: np.ndarray) -> int:
    """Tokens of the longest row: with its padding, unless rows are joined."""
    return int(lengths[plan.rows].max() if plan.flat else plan.length.max())


def only(steps: TracedSteps, step: int, number: int) -> TracedSteps:
    """The first micro-batch, and micro-batch `number` of a step in its position."""
    start = steps[0][0]
    if (step, number) == (0, 0):
        return ((start,),)
    found = steps[step][number]
    return ((start, found),) if number else ((start,), (found,))


def halved(steps: TracedSteps) -> TracedSteps | None:
    """Steps as with half of bucket.max_tokens: half the rows; None if every micro-batch has one row.

    Supervised tokens are an upper bound, so the prediction is never too low.
    """
    if all(len(shape.joined_lengths or (0,) * shape.rows) < 2 for step in steps for shape in step):
        return None
    return tuple(tuple(map(_halved, step)) for step in steps)


def _halved(shape: BatchShape) -> BatchShape:
    """Half the rows of a micro-batch, rounded up; of joined rows every second, from the longest on."""
    joined = shape.joined_lengths
    if joined is not None:
        joined = tuple(sorted(joined, reverse=True)[::2])
    rows = 1 if joined else -(-shape.rows // 2)
    length = sum(joined) if joined else shape.length
    return BatchShape(rows=rows, length=length, supervised=min(shape.supervised, rows * length), joined_lengths=joined)
