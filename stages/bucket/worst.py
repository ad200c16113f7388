"""The micro-batches that need the most memory: estimate traces them, and train measures the steps that hold them.

Tensors of a step grow with these figures of a micro-batch and shrink with none: padded tokens (activations, all
logits), supervised tokens (logits of a loss chunk), and on GPUs rows times the length in whole tiles of fused attention
(the accumulators of its backward). Length adds no term of its own: attention without a mask keeps nothing that grows
with its square, and the mask of a sliding window (rows × length²) is largest in the plan's first micro-batch, which
leads in padded tokens and in length. So the worst micro-batch is one that no other surpasses in all figures.

Position matters too. In the first micro-batch of a step gradients appear as backward makes them; from the second on,
those of the earlier ones are held throughout. So the first and the later micro-batches are looked through apart.
Optimizer state exists before step 0, and parameters never change shape: steps differ in nothing else.
"""

from collections.abc import Iterable

from stages.bucket.plan import MicroBatch, Plan

ATTENTION_TILE_TOKENS = 128
"""FlashAttention-2's backward rounds every sequence up to a multiple of this (Dao 2023, arXiv 2307.08691)."""


def memory_figures(micro_batch: MicroBatch) -> tuple[int, int, int]:
    """What memory grows with: padded tokens, supervised tokens, rows × length in whole tiles."""
    tiles = -(-micro_batch.length // ATTENTION_TILE_TOKENS)
    return micro_batch.padded_tokens, micro_batch.supervised, len(micro_batch.rows) * tiles * ATTENTION_TILE_TOKENS


def worst_micro_batches(plan: Plan, *, tiled: bool) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Those that no other surpasses in every figure: among the first micro-batches of the steps, and among the later.

    The first micro-batch of step 0, which the plan makes the largest, stands first. Without `tiled`, attention's tiles
    are left out: no kernel of a CPU works in them.
    """
    start = plan.steps[0][0]
    figures = 3 if tiled else 2
    first = _front((step[0] for step in plan.steps), figures)
    later = _front((micro_batch for step in plan.steps for micro_batch in step[1:]), figures)
    return [start, *(one for one in first if one is not start)], later


def worst_steps(plan: Plan) -> list[int]:
    """Numbers of the steps that hold a worst micro-batch on some device, ascending; step 0 is always among them."""
    first, later = worst_micro_batches(plan, tiled=True)
    return sorted({micro_batch.step for micro_batch in [*first, *later]})


def _front(micro_batches: Iterable[MicroBatch], figures: int) -> list[MicroBatch]:
    """The Pareto front of the first figures, largest first; of equal ones the earliest.

    A handful in practice (2 to 10 of 1,300 in the default plan), since the budget keeps micro-batches alike.
    """
    earliest: dict[tuple[int, ...], MicroBatch] = {}
    for micro_batch in micro_batches:
        earliest.setdefault(memory_figures(micro_batch)[:figures], micro_batch)
    front: list[tuple[int, ...]] = []
    # In descending order nothing can be surpassed by what comes later.
    for known in sorted(earliest, reverse=True):
        if not any(all(a >= b for a, b in zip(better, known, strict=True)) for better in front):
            front.append(known)
    return [earliest[known] for known in front]
