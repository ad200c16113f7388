"""The micro-batches that need the most memory: estimate traces them, and train measures the steps that hold them.

Tensors of a step grow with four figures of a micro-batch and shrink with none: padded tokens (activations, all
logits), length (attention scores, rotary tables), supervised tokens (logits of a loss chunk), and rows times the length
in whole tiles of fused attention (the accumulators of its backward). The worst micro-batch leads in one of them or
lies close to one that does, because the first is the term that outweighs the others.

Position matters too. In the first micro-batch of a step gradients appear as backward makes them; from the second on,
those of the earlier ones are held throughout. So the first and the later micro-batches are looked through apart.
Optimizer state exists before step 0, and parameters never change shape: steps differ in nothing else.
"""

from collections.abc import Iterable

from stages.bucket.plan import MicroBatch, Plan

ATTENTION_TILE_TOKENS = 128
"""FlashAttention-2's backward rounds every sequence up to a multiple of this (Dao 2023, arXiv 2307.08691)."""


def memory_figures(micro_batch: MicroBatch) -> tuple[int, int, int, int]:
    """What memory grows with: padded tokens, supervised tokens, length, rows × length in whole tiles."""
    tiles = -(-micro_batch.length // ATTENTION_TILE_TOKENS)
    tiled_tokens = len(micro_batch.rows) * tiles * ATTENTION_TILE_TOKENS
    return micro_batch.padded_tokens, micro_batch.supervised, micro_batch.length, tiled_tokens


def worst_micro_batches(plan: Plan) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The leaders in each figure: among the first micro-batches of the steps, and among the later ones.

    The first micro-batch of step 0, which the plan makes the largest, stands first. There are at most five and four.
    """
    start = plan.steps[0][0]
    first = _leaders(step[0] for step in plan.steps)
    later = _leaders(micro_batch for step in plan.steps for micro_batch in step[1:])
    return [start, *(leader for leader in first if leader is not start)], later


def worst_steps(plan: Plan) -> list[int]:
    """Numbers of the steps that hold a worst micro-batch, ascending; step 0 is always among them."""
    first, later = worst_micro_batches(plan)
    return sorted({micro_batch.step for micro_batch in [*first, *later]})


def _leaders(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """The micro-batch that leads in each figure, once; ties go to the larger other figures, then to the earliest."""
    by_figures: dict[tuple[int, ...], MicroBatch] = {}
    for micro_batch in micro_batches:
        by_figures.setdefault(memory_figures(micro_batch), micro_batch)
    if not by_figures:
        return []
    leading = [max(by_figures, key=lambda figures: (figures[number], figures)) for number in range(4)]
    return [by_figures[figures] for figures in dict.fromkeys(leading)]
