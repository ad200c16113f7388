"""This project's training step in the terms of a replay: kinds of units, and the figures their tensors grow with."""

from collections.abc import Sequence
from dataclasses import dataclass

from lean_finetune.memory.allocator.cut import FIRST, LATER, UPDATE, Role, Unit
from lean_finetune.memory.trace.cuda_kernels import EMBEDDING_SORT_TOKENS, FUSED_GEMM_MAX_ROWS
from lean_finetune.plan.worst_micro_batches import ATTENTION_TILE_TOKENS
from lean_finetune.step.batches import BatchShape

SOFTMAX_TILE_TOKENS = 32
"""The memory-efficient kernel keeps its softmax sums for whole tiles of so many tokens."""
TILES = (SOFTMAX_TILE_TOKENS, ATTENTION_TILE_TOKENS)


@dataclass(frozen=True, kw_only=True)
class StepKind:
    """What of a setting decides the kinds of its units."""

    loss_chunk: int | None
    """Trained positions whose logits exist at once, None for all."""
    embedding_trained: bool
    """Whether backward goes down to the embedding, for which it has two kernels."""


def step_units(shapes: Sequence[BatchShape], kind: StepKind) -> list[Unit]:
    """The units of a step over micro-batches."""
    units = [_micro_batch(LATER if number else FIRST, shape, kind) for number, shape in enumerate(shapes)]
    return [*units, Unit(role=UPDATE, kind=None, figures={"micro_batches": len(shapes)})]


def unit_kind(shape: BatchShape, kind: StepKind) -> str:
    """By which kernels a micro-batch is run: those for many tokens, for some or for a few; joined rows apart."""
    tokens = shape.rows * shape.length
    size = "few" if tokens <= FUSED_GEMM_MAX_ROWS else "some"
    if kind.embedding_trained and tokens > EMBEDDING_SORT_TOKENS:
        size = "many"
    return f"{size} tokens" if shape.joined_lengths is None else f"{size} tokens in joined rows"


def _micro_batch(role: Role, shape: BatchShape, kind: StepKind) -> Unit:
    """A micro-batch; its loss loops over chunks, of which all but the last are full."""
    tokens = shape.rows * shape.length
    chunks = 1 if kind.loss_chunk is None else max(1, -(-shape.supervised // kind.loss_chunk))
    figures = {"tokens": tokens, "supervised": shape.supervised}
    if kind.loss_chunk is not None:
        figures["last_chunk"] = shape.supervised - (chunks - 1) * kind.loss_chunk
    if shape.joined_lengths is None:
        figures |= {"length": shape.length, "rows": shape.rows}
        figures |= {f"tokens_tiled_by_{tile}": shape.rows * -(-shape.length // tile) * tile for tile in TILES}
    else:
        figures["joined_rows"] = len(shape.joined_lengths)
    return Unit(role=role, kind=unit_kind(shape, kind), figures=figures, chunks=chunks)
