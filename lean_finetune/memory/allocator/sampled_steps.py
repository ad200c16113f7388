"""Choose which micro-batches of a plan are traced to predict its reserved memory.

Reserved memory hardly grows after the first step, because the plan puts its largest micro-batch there. A bounded
sample of the plan therefore shows how much the allocator reserves: micro-batches of the first step, the one that sets
the peak, and those of further steps at even distances.
"""

from collections.abc import Sequence

import numpy as np

from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.step.batches import BatchShape

MAX_MICRO_BATCHES = 12
MAX_TRACED_LAYERS = 128
"""Layers that are traced, over all micro-batches together: 4 micro-batches of an 8B model."""
MIN_MICRO_BATCHES = 2


def sample_steps(
    plan: Plan, lengths: np.ndarray, steps_of_peak: TracedSteps, *, layers: int
) -> dict[int, tuple[BatchShape, ...]]:
    """Choose micro-batches of what one GPU computes; return their shapes by optimizer step, in the plan's order."""
    most = max(MIN_MICRO_BATCHES, min(MAX_MICRO_BATCHES, MAX_TRACED_LAYERS // layers))
    numbers: Sequence[int] = range(len(plan))
    if len(plan) > most:
        numbers = _sample(plan, _peak_number(plan, lengths, steps_of_peak), most)
    sampled: dict[int, tuple[BatchShape, ...]] = {}
    for number in numbers:
        micro_batch = plan.micro_batch(number)
        sampled[micro_batch.step] = (*sampled.get(micro_batch.step, ()), BatchShape.of(micro_batch, lengths))
    return sampled


def _sample(plan: Plan, peak: int, most: int) -> Sequence[int]:
    """Return about `most` numbers of micro-batches: a quarter of them from the first step, two from each further step.

    A further step is represented by its first micro-batch, which allocates the gradients, and its largest other one,
    which needs space between them.
    """
    bounds, tokens = plan.step_bounds, plan.padded_tokens
    first_of_peak = int(bounds[plan.step[peak] - plan.step[0]])
    chosen = {0, first_of_peak, peak, *_evenly(0, bounds[1], most // 4)}
    for step in _evenly(1, len(bounds) - 1, max(0, most - len(chosen)) // 2):
        first, end = int(bounds[step]), int(bounds[step + 1])
        chosen |= {first, max(range(first, end), key=lambda number: (number > first, tokens[number]))}
    return sorted(chosen)


def _evenly(start: int, end: int, count: int) -> list[int]:
    """Return at most `count` different numbers of range(start, end) at even distances, from its first to its last."""
    return np.unique(np.linspace(start, end - 1, count).astype(int)).tolist() if start < end else []


def _peak_number(plan: Plan, lengths: np.ndarray, steps_of_peak: TracedSteps) -> int:
    """Return the number of the first micro-batch with the shape and the position in its step that set the peak."""
    wanted, is_first = steps_of_peak[-1][-1], len(steps_of_peak[-1]) == 1
    starts = np.isin(np.arange(len(plan)), plan.step_bounds)
    alike = (plan.length == wanted.length) & (plan.supervised == wanted.supervised) & (starts == is_first)
    return next(
        number
        for number in np.flatnonzero(alike).tolist()
        if BatchShape.of(plan.micro_batch(number), lengths) == wanted
    )
