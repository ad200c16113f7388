"""The micro-batches that need the most memory: estimate traces them, and train measures the steps that hold them.

Tensors of a step grow with these figures of a micro-batch and shrink with none: padded tokens (activations, all
logits), supervised tokens (logits of a loss chunk), and on GPUs the tokens in whole tiles of fused attention (the
accumulators of its backward). Length adds no term of its own: attention without a mask keeps nothing that grows with
its square, and the mask of a sliding window (rows × length²) is largest in the plan's first micro-batch, which leads in
padded tokens and in length. So the worst micro-batch is one that no other surpasses in all figures.

Position matters too. In the first micro-batch of a step gradients appear as backward makes them; from the second on,
those of the earlier ones are held throughout. So the first micro-batches of a step (one on every GPU) and the later
ones are looked through apart. Optimizer state exists before step 0, and parameters never change shape: steps differ in
nothing else.
"""

import numpy as np

from stages.bucket.plan import MicroBatch, Plan

ATTENTION_TILE_TOKENS = 128
"""FlashAttention-2's backward rounds every sequence up to a multiple of this (Dao 2023, arXiv 2307.08691)."""


def memory_figures(plan: Plan) -> np.ndarray:
    """What memory grows with, shape (micro-batches, 3): padded tokens, supervised tokens, tokens in whole tiles.

    Of joined rows the kernel gives each up to a tile more, whatever their lengths.
    """
    if plan.flat:
        tiled = plan.length + plan.sizes * ATTENTION_TILE_TOKENS
    else:
        tiled = plan.sizes * -(-plan.length // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS
    return np.stack([plan.padded_tokens, plan.supervised, tiled], axis=1)


def worst_micro_batches(plan: Plan, *, tiled: bool) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Those that no other surpasses in every figure: among the first micro-batches of the steps, and among the later.

    The first micro-batch of step 0, which the plan makes the largest, stands first. Without `tiled`, attention's tiles
    are left out: no kernel of a CPU works in them.
    """
    figures = memory_figures(plan)[:, : 3 if tiled else 2]
    is_first = np.arange(len(plan)) - plan.step_bounds[plan.step - plan.step[0]] < plan.ranks
    first = _front(figures, np.flatnonzero(is_first))
    later = _front(figures, np.flatnonzero(~is_first))
    first = [0, *(number for number in first if number)]
    return [plan.micro_batch(number) for number in first], [plan.micro_batch(number) for number in later]


def worst_steps(plan: Plan) -> list[int]:
    """Numbers of the steps that hold a worst micro-batch on some device, ascending; step 0 is always among them."""
    first, later = worst_micro_batches(plan, tiled=True)
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
