"""This project's training step in the terms of a replay: kinds of units, and the figures their tensors grow with."""

from collections.abc import Hashable, Sequence

from stages.bucket.worst import ATTENTION_TILE_TOKENS
from stages.estimate.kernels import EMBEDDING_SORT_TOKENS
from stages.estimate.templates import FIRST, LATER, UPDATE, Role, Unit

SOFTMAX_TILE_TOKENS = 32
"""The memory-efficient kernel keeps its softmax sums for whole tiles of so many tokens."""
TILES = (SOFTMAX_TILE_TOKENS, ATTENTION_TILE_TOKENS)


def step_units(shapes: Sequence[tuple[int, int, int]], loss_chunk: int | None) -> list[Unit]:
    """The units of a step over micro-batches of padded rows.

    Args:
        shapes: rows, length and supervised tokens of each micro-batch.
        loss_chunk: trained positions whose logits exist at once, None for all.
    """
    units = [_micro_batch(LATER if number else FIRST, *shape, loss_chunk) for number, shape in enumerate(shapes)]
    return [*units, Unit(role=UPDATE, kind=None, figures={"micro_batches": len(shapes)})]


def _micro_batch(role: Role, rows: int, length: int, supervised: int, loss_chunk: int | None) -> Unit:
    """A micro-batch: its loss loops over chunks, and the embedding's backward has two kernels."""
    chunks = None if loss_chunk is None else -(-supervised // loss_chunk)
    kind: Hashable = (chunks, rows * length > EMBEDDING_SORT_TOKENS)
    figures = {
        "tokens": rows * length,
        "length": length,
        "rows": rows,
        **{f"tokens_tiled_by_{tile}": rows * -(-length // tile) * tile for tile in TILES},
        "supervised": supervised,
    }
    return Unit(role=role, kind=kind, figures=figures)
