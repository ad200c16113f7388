"""Find the micro-batches that may need the most memory: estimate traces them, and train measures their steps.

Memory grows with these figures of a micro-batch: padded tokens (activations, all logits), supervised tokens (logits of
a loss chunk), on GPUs the tokens in full tiles of fused attention (accumulators of its backward), under a sliding
window the length (its mask is length × length), and with layers that work in chunks of a row (Mamba 2) rows and length,
since each row is padded to full chunks. So the candidates are micro-batches that no other exceeds in all
figures.

Position matters too: gradients appear during the first backward of a step and exist throughout the later ones. So the
first micro-batches of steps (one on every GPU) are compared apart from the later ones. Nothing else differs between
steps: optimizer state exists before step 0, and parameters never change shape.
"""

import numpy as np

from lean_finetune.plan.batch_plan import PADDING_ROW_TOKENS, MicroBatch, Plan, sums_between

ATTENTION_TILE_TOKENS = 128
"""FlashAttention-2's backward rounds every sequence up to a multiple of this (Dao 2023, arXiv 2307.08691)."""


def memory_figures(
    plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool, chunked: bool = False
) -> np.ndarray:
    """The figures of each micro-batch that memory grows with: padded, supervised, and tiled tokens, length, and rows.

    `lengths` are the tokens of every training row. With `tiled`, attention works in tiles, as on GPUs: each packed row,
    rows of padding included, needs up to a tile more. With `windowed`, the model makes masks, though never for joined
    rows. With `chunked`, layers work in chunks of a row.
    """
    figures = [plan.padded_tokens, plan.supervised]
    if tiled and plan.flat:
        padding = plan.length - sums_between(lengths[plan.rows], plan.bounds)
        figures.append(plan.length + (plan.sizes + -(-padding // PADDING_ROW_TOKENS)) * ATTENTION_TILE_TOKENS)
    elif tiled:
        figures.append(plan.sizes * -(-plan.length // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS)
    if (windowed or chunked) and not plan.flat:
        figures.append(plan.length)
    if chunked:
        figures.append(plan.sizes)
    return np.stack(figures, axis=1)


def worst_micro_batches(
    plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool, chunked: bool = False
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The Pareto fronts among the first micro-batches of the steps, and among the later ones.

    The first micro-batch of step 0, which the plan makes the largest, comes first. Arguments as `memory_figures`.
    """
    figures = memory_figures(plan, lengths, tiled=tiled, windowed=windowed, chunked=chunked)
    is_first = np.arange(len(plan)) - plan.step_bounds[plan.step - plan.step[0]] < plan.ranks
    first = _front(figures, np.flatnonzero(is_first))
    later = _front(figures, np.flatnonzero(~is_first))
    first = [0, *(number for number in first if number)]
    return [plan.micro_batch(number) for number in first], [plan.micro_batch(number) for number in later]


def worst_steps(plan: Plan, lengths: np.ndarray, *, chunked: bool = False) -> list[int]:
    """Steps with a worst micro-batch on any device, ascending; step 0 is always among them."""
    first, later = worst_micro_batches(plan, lengths, tiled=True, windowed=True, chunked=chunked)
    return sorted({micro_batch.step for micro_batch in [*first, *later]})


def _front(figures: np.ndarray, numbers: np.ndarray) -> list[int]:
    """The Pareto front of these micro-batches, largest first; of equal ones the earliest.

    It is small in practice (2 to 10 of 1,300 in the default plan), since the budget keeps micro-batches similar. Each
    round takes the largest that is left and drops all that it exceeds.
    """
    front = []
    left = figures[numbers]
    while len(numbers):
        largest = np.arange(len(numbers))
        for figure in left.T:
            largest = largest[figure[largest] == figure[largest].max()]
        best = left[largest[0]]
        front.append(int(numbers[largest[0]]))
        other = (left > best).any(axis=1)
        numbers, left = numbers[other], left[other]
    return front
