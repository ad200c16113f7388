"""The micro-batches that are traced: the worst of the real plan, in the positions where they stand."""

from stages.bucket.plan import Plan
from stages.bucket.worst import worst_micro_batches
from stages.step.batches import BatchShape

TracedSteps = tuple[tuple[BatchShape, ...], ...]
"""Optimizer steps, each a sequence of micro-batch shapes."""


def traced_steps(plan: Plan, *, tiled: bool) -> TracedSteps:
    """Steps that reach the peak of the whole plan.

    The first begins with the plan's first micro-batch and goes on with the worst of all later ones, which meet the
    gradients of the one before. Each further step is one more micro-batch that is the first of its step.
    `tiled`: the device's attention works in tiles of tokens.
    """
    first, later = worst_micro_batches(plan, tiled=tiled)
    starts = list(dict.fromkeys(BatchShape.of(micro_batch) for micro_batch in first))
    following = list(dict.fromkeys(BatchShape.of(micro_batch) for micro_batch in later))
    return ((starts[0], *following), *((start,) for start in starts[1:]))


def only(steps: TracedSteps, step: int, number: int) -> TracedSteps:
    """The first micro-batch of all, and micro-batch `number` of a step in the position it has there."""
    start = steps[0][0]
    if (step, number) == (0, 0):
        return ((start,),)
    found = steps[step][number]
    return ((start, found),) if number else ((start,), (found,))


def halved(steps: TracedSteps) -> TracedSteps | None:
    """About the same steps with bucket.max_tokens halved: half the rows; None when a micro-batch has only one row.

    Supervised tokens are bounded from above, so the prediction is never too low.
    """
    if any(shape.rows < 2 for shape in steps[0][:1]):
        return None
    return tuple(tuple(_halved(shape) for shape in step) for step in steps)


def _halved(shape: BatchShape) -> BatchShape:
    """Half the rows of a micro-batch, rounded up."""
    rows = -(-shape.rows // 2)
    return BatchShape(rows=rows, length=shape.length, supervised=min(shape.supervised, rows * shape.length))
