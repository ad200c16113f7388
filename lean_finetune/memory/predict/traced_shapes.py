"""Choose the micro-batches to trace: the worst of the plan, in their positions within a step."""

import numpy as np

from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.worst_micro_batches import memory_figures, worst_micro_batches
from lean_finetune.step.batches import IDLE_TOKENS, BatchShape

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


def steps_in_flight(plan: Plan, lengths: np.ndarray, stages: int, **kinds: bool) -> TracedSteps:
    """Steps that reach the peaks of all stages of a pipeline: consecutive micro-batches that are in flight together.

    Of each number of them up to `stages`, those with the largest sums of `memory_figures`, at the start of a step and
    after it. There an idle micro-batch comes first, so that gradients exist. Other arguments as `traced_steps`.
    """
    figures = memory_figures(plan, lengths, **kinds)
    chosen: list[tuple[bool, tuple[BatchShape, ...]]] = []
    numbers = np.arange(len(plan))
    step_of = np.searchsorted(plan.step_bounds, numbers, side="right") - 1
    sums = np.concatenate([np.zeros((1, figures.shape[1]), np.int64), figures.cumsum(axis=0)])
    first = numbers == plan.step_bounds[step_of]
    for count in range(stages, 0, -1):
        ends = np.minimum(numbers + count, plan.step_bounds[step_of + 1])
        in_flight = sums[ends] - sums[numbers]
        for starts in (numbers[~first], numbers[first]):
            for start in dict.fromkeys(starts[in_flight[starts].argmax(axis=0)].tolist()) if len(starts) else ():
                micro_batches = map(plan.micro_batch, range(start, int(ends[start])))
                window = tuple(BatchShape.of(micro_batch, lengths) for micro_batch in micro_batches)
                if not any(_contains(other, window) for later, other in chosen if later >= (not first[start])):
                    chosen.append((not first[start], window))
    idle = BatchShape(rows=1, length=IDLE_TOKENS, supervised=0, joined_lengths=None)
    return tuple((idle, *window) if later else window for later, window in chosen)


def _contains(shapes: tuple[BatchShape, ...], part: tuple[BatchShape, ...]) -> bool:
    """Whether micro-batches of the shapes of `part` follow each other in `shapes`."""
    return any(shapes[start : start + len(part)] == part for start in range(len(shapes)))


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
