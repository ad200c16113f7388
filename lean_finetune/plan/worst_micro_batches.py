"""The micro-batches that need the most memory: estimate traces them, and train measures the steps that hold them.

Tensors of a step grow with these figures of a micro-batch and shrink with none: padded tokens (activations, all
logits), supervised tokens (logits of a loss chunk), on GPUs the tokens in whole tiles of fused attention (the
accumulators of its backward), and under a sliding window the length (its mask is length × length; attention without a
mask keeps nothing of that kind). So the worst micro-batch is one that no other surpasses in all figures.

Position matters too. In the first micro-batch of a step gradients appear as backward makes them; from the second on,
those of the earlier ones are held throughout. So the first micro-batches of a step (one on every GPU) and the later
ones are looked through apart. Optimizer state exists before step 0, and parameters never change shape: steps differ in
nothing else.
"""

import numpy as np

from lean_finetune.plan.batch_plan import PADDING_ROW_TOKENS, MicroBatch, Plan, sums_between

ATTENTION_TILE_TOKENS = 128
"""FlashAttention-2's backward rounds every sequence up to a multiple of this (Dao 2023, arXiv 2307.08691)."""


def memory_figures(plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool) -> np.ndarray:
    """What memory grows with, by micro-batch: padded tokens, supervised tokens; tokens in whole tiles; length.

    Args:
        plan: the run.
        lengths: tokens of every training row.
        tiled: the device's attention works in tiles, as no kernel of a CPU does. Of joined rows it gives each (padding
            too is rows of its own) up to a tile more, whatever their lengths.
        windowed: the model makes masks. It never does for joined rows.
    """
    figures = [plan.padded_tokens, plan.supervised]
    if tiled and plan.flat:
        padding = plan.length - sums_between(lengths[plan.rows], plan.bounds)
        figures.append(plan.length + (plan.sizes + -(-padding // PADDING_ROW_TOKENS)) * ATTENTION_TILE_TOKENS)
    elif tiled:
        figures.append(plan.sizes * -(-plan.length // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS)
    if windowed and not plan.flat:
        figures.append(plan.length)
    return np.stack(figures, axis=1)


def worst_micro_batches(
    plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Those that no other surpasses in every figure: among the first micro-batches of the steps, and among the later.

    The first micro-batch of step 0, which the plan makes the largest, stands first. Arguments as `memory_figures`.
    """
    figures = memory_figures(plan, lengths, tiled=tiled, windowed=windowed)
    is_first = np.arange(len(plan)) - plan.step_bounds[plan.step - plan.step[0]] < plan.ranks
    first = _front(figures, np.flatnonzero(is_first))
    later = _front(figures, np.flatnonzero(~is_first))
    first = [0, *(number for number in first if number)]
    return [plan.micro_batch(number) for number in first], [plan.micro_batch(number) for number in later]


def worst_steps(plan: Plan, lengths: np.ndarray) -> list[int]:
    """Steps that hold a worst micro-batch on some device of some model, ascending; step 0 is always among them."""
    first, later = worst_micro_batches(plan, lengths, tiled=True, windowed=True)
    return sorted({micro_batch.step for micro_batch in [*first, *later]})


def _front(figures: np.ndarray, numbers: np.ndarray) -> list[int]:
    """Of these micro-batches the Pareto front, largest first; of equal ones the earliest.

    A handful in practice (2 to 10 of 1,300 in the default plan), since the budget keeps micro-batches alike: so each
    turn takes the largest of what is left, and drops all that it surpasses.
    """
    front = []
    left = figures[numbers]
    while len(numbers):
        largest = np.arange(len(numbers))
        for figure in left.T:
            largest = largest[figure[largest] == figure[largest].max()]
        best = left[largest[0]]
        front.append(int(numbers[largest[0]]))
        kept = (left > best).any(axis=1)
        numbers, left = numbers[kept], left[kept]
    return front
