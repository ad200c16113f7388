"""Micro-batches as tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.core.errors import UserError
from lean_finetune.islands.kind_parts import empty_parts, parts_of_kind
from lean_finetune.model.attention.kernels import PackedRows
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.batch_plan import PADDING_ROW_TOKENS, MicroBatch
from lean_finetune.rows.attachment import AttachedShape
from lean_finetune.rows.batch_part import BatchPart
from lean_finetune.step.token_rows import TokenRows

# Shape legend: B rows of the micro-batch (1 if they are packed), T padded length in tokens, N supervised positions.

IGNORED = -100
"""Target of a position without a loss; torch's cross-entropy skips this value."""

BATCHES_AHEAD = 2
"""Batches in flight per thread of the loader: one in the making and one ready. Each takes about 100 bytes of RAM per
token."""
RowTokens = tuple[np.ndarray, np.ndarray]
"""Token ids of shape (tokens,) and trained spans of shape (spans, 2), both integers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch as tensors.

    There is no attention mask, so that fused kernels stay usable. Rows are padded on the right, or joined with each row
    attending to itself. Attention is causal, so no real token sees padding.
    """

    input_ids_BT: torch.Tensor
    """int64."""
    targets_BT: torch.Tensor
    """int64: token t + 1 where that token is trained, else IGNORED; the last token of a row is IGNORED."""
    supervised_index_N: torch.Tensor
    """int64: flat positions b * T + t whose target is not IGNORED, ascending."""
    packed_rows: PackedRows | None
    """The rows of a packed sequence; None if rows are padded one by one. Complete ones under context parallelism."""
    positions_BT: torch.Tensor | None = None
    """int64 of shape (1, T): positions of a process's tokens under context parallelism; None if rows are complete."""
    idle: bool = False
    """Padding for a process without work."""
    parts: tuple[BatchPart, ...] = ()
    """What the rows carry besides tokens."""

    @property
    def device_type(self) -> str:
        """Type of the device that has it."""
        return self.input_ids_BT.device.type

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on another device; copies from pinned memory are asynchronous."""
        pinned = self.input_ids_BT.is_pinned()
        return Batch(
            input_ids_BT=self.input_ids_BT.to(device, non_blocking=pinned),
            targets_BT=self.targets_BT.to(device, non_blocking=pinned),
            supervised_index_N=self.supervised_index_N.to(device, non_blocking=pinned),
            packed_rows=None if self.packed_rows is None else self.packed_rows.to(device, non_blocking=pinned),
            positions_BT=None if self.positions_BT is None else self.positions_BT.to(device, non_blocking=pinned),
            idle=self.idle,
            parts=tuple(part.to(device) for part in self.parts),
        )


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """A process's part of every row's tokens: number `index` of `parts` equal, consecutive parts."""

    index: int
    parts: int


def token_part(layout: ParallelLayout, rank: int) -> TokenPart | None:
    """The part that a process has; None = all tokens."""
    return TokenPart(index=layout.coordinates(rank).context, parts=layout.context) if layout.context > 1 else None


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The figures of a micro-batch on which memory depends."""

    rows: int
    """B."""
    length: int
    """T, in tokens."""
    supervised: int
    """N, in tokens."""
    packed_lengths: tuple[int, ...] | None
    """Tokens of each packed row, padding included; None if rows are padded one by one."""
    kind: RowKind = RowKind.ANSWER
    """What its rows are."""
    attached: tuple[AttachedShape, ...] = ()
    """What its rows carry besides tokens."""

    def empty_parts(self, device: torch.device | str, parts: int = 1) -> tuple[BatchPart, ...]:
        """What a batch of it, or of one of so many parts of its tokens, has besides tokens, without values."""
        rows = self.rows if self.packed_lengths is None else len(self.packed_lengths)
        carried = (one.empty(self.trained(parts), device) for one in self.attached)
        return (*filter(None, carried), *empty_parts(self.kind, rows, self.trained(), device))

    def trained(self, parts: int = 1) -> int:
        """The most trained tokens that one of so many parts of its tokens has."""
        return min(self.supervised, self.rows * -(-self.length // parts))

    @staticmethod
    def of(micro_batch: MicroBatch, lengths: np.ndarray) -> "BatchShape":
        """The shape of a planned micro-batch; `lengths` are the tokens of every training row."""
        joined = packed_lengths(lengths[micro_batch.rows], micro_batch.length) if micro_batch.flat else None
        return BatchShape(
            rows=1 if micro_batch.flat else len(micro_batch.rows),
            length=micro_batch.length,
            supervised=micro_batch.supervised,
            packed_lengths=joined,
            kind=micro_batch.kind,
            attached=micro_batch.attached,
        )


def packed_lengths(lengths: Sequence[int] | np.ndarray, total: int) -> tuple[int, ...]:
    """Lengths of the rows in a packed sequence of `total` tokens, the padding split into further rows."""
    rows = [int(length) for length in lengths]
    left = total - sum(rows)
    full, rest = divmod(left, PADDING_ROW_TOKENS)
    return (*rows, *[PADDING_ROW_TOKENS] * full, *([rest] if rest else []))


def collate(
    rows: Sequence[RowTokens], length: int, pad_id: int, *, flat: bool = False, pin_memory: bool = False
) -> Batch:
    """Pad or pack rows, and shift targets by one.

    Args:
        rows: each fits into `length`; if joined, all together do.
        length: T, tokens to which rows, or their joined sequence, are padded on the right.
        pad_id: token in the padding. It may also be a trained token (EOS, say): targets come from spans alone.
        flat: join the rows into one sequence.
        pin_memory: allocate tensors in page-locked memory, for asynchronous copies to a GPU.
    """
    sizes = np.array([len(ids) for ids, _ in rows])
    starts = np.cumsum(sizes) - sizes if flat else np.arange(len(rows)) * length
    shape = (1 if flat else len(rows), length)
    input_ids_BT, targets_BT = (_empty(shape, pin_memory) for _ in range(2))
    ids_M = input_ids_BT.numpy().reshape(-1)
    ids_M.fill(pad_id)
    for start, size, (ids, _) in zip(starts.tolist(), sizes.tolist(), rows, strict=True):
        ids_M[start : start + size] = ids
    index_N = _supervised_index([spans for _, spans in rows], starts)
    targets_M = targets_BT.numpy().reshape(-1)
    targets_M.fill(IGNORED)
    targets_M[index_N] = ids_M[index_N + 1]
    supervised_index_N = _empty(index_N.shape, pin_memory)
    supervised_index_N.numpy()[:] = index_N
    return Batch(
        input_ids_BT=input_ids_BT,
        targets_BT=targets_BT,
        supervised_index_N=supervised_index_N,
        packed_rows=pack_rows(sizes, length, pin_memory=pin_memory) if flat else None,
    )


def _empty(shape: tuple[int, ...], pin_memory: bool, dtype: type[np.integer] = np.int64) -> torch.Tensor:
    """An empty tensor. Unpinned memory is numpy's, so that the memory profiler of a CPU does not count it."""
    if pin_memory:
        return torch.empty(shape, dtype=torch.int64 if dtype is np.int64 else torch.int32, pin_memory=True)
    return torch.from_numpy(np.empty(shape, dtype))


def _supervised_index(spans: Sequence[np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Flat positions that predict trained tokens, ascending, int64.

    `spans` has the trained spans of each row, (spans, 2); `starts` the flat position of each row's first token.
    """
    shifts = np.repeat(starts, [len(pairs) for pairs in spans])
    pairs = np.concatenate(spans).astype(np.int64)
    first = np.maximum(pairs[:, 0], 1)  # Nothing precedes the first token, so nothing predicts it.
    counts = np.maximum(pairs[:, 1] - first, 0)
    # Trained position k is as far behind its span's start as k is behind the number of the span's first position.
    offsets = shifts + first - 1 - (np.cumsum(counts) - counts)
    return np.arange(counts.sum()) + np.repeat(offsets, counts)


def pack_rows(lengths: Sequence[int] | np.ndarray, total: int, *, pin_memory: bool = False) -> PackedRows:
    """Offsets and positions of rows in a packed sequence of `total` tokens; all padding has position 0."""
    bounds = packed_lengths(lengths, total)
    offsets = _empty((len(bounds) + 1,), pin_memory, np.int32)
    offsets.numpy()[:] = [0, *accumulate(bounds)]
    text_tokens = int(sum(lengths))
    positions_BT = _empty((1, total), pin_memory)
    positions = positions_BT.numpy()[0]
    positions[:text_tokens] = np.arange(text_tokens) - np.repeat(offsets.numpy()[: len(lengths)], lengths)
    positions[text_tokens:] = 0
    return PackedRows(lengths=bounds, offsets=offsets, positions_BT=positions_BT)


IDLE_TOKENS = 8
"""Length of the padding row of a process without work: the shortest that suits every kernel."""


def idle_batch(pad_id: int, part: TokenPart | None = None) -> Batch:
    """One row of padding without targets, for a process without work: its loss is 0, and its collectives match."""
    first = 0 if part is None else part.index * IDLE_TOKENS
    return Batch(
        input_ids_BT=torch.full((1, IDLE_TOKENS), pad_id, dtype=torch.int64),
        targets_BT=torch.full((1, IDLE_TOKENS), IGNORED, dtype=torch.int64),
        supervised_index_N=torch.empty(0, dtype=torch.int64),
        packed_rows=None,
        positions_BT=None if part is None else torch.arange(first, first + IDLE_TOKENS)[None],
        idle=True,
    )


def part_of(batch: Batch, part: TokenPart, *, pin_memory: bool = False) -> Batch:
    """A process's part of a batch in host memory, whose length is a multiple of `part.parts`."""
    T = batch.input_ids_BT.shape[1]
    t = T // part.parts
    assert t * part.parts == T
    first = part.index * t

    def own(tensor_BT: torch.Tensor) -> torch.Tensor:
        return placed(np.ascontiguousarray(tensor_BT.numpy()[:, first : first + t]))

    def placed(values: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if pin_memory else tensor

    row_N, position_N = np.divmod(batch.supervised_index_N.numpy(), T)
    mine_N = position_N // t == part.index
    joined = batch.packed_rows
    positions_BT = own(torch.arange(T)[None] if joined is None else joined.positions_BT)
    return Batch(
        input_ids_BT=own(batch.input_ids_BT),
        targets_BT=own(batch.targets_BT),
        supervised_index_N=placed((row_N * t + position_N - first)[mine_N]),
        packed_rows=None if joined is None else replace(joined, positions_BT=positions_BT),
        positions_BT=positions_BT,
        parts=_made((one.of_tokens(mine_N) for one in batch.parts), pin_memory),
    )


def read_batch(
    tokens: TokenRows,
    micro_batch: MicroBatch,
    pad_id: int,
    *,
    pin_memory: bool = False,
    part: TokenPart | None = None,
) -> Batch:
    """The tensors of a planned micro-batch, or a part of its tokens.

    Raises:
        UserError: the plan was made for other tokens.
    """
    rows = micro_batch.rows
    if not len(rows):
        beside = blank_parts(tokens, micro_batch.attached, pin_memory=pin_memory)
        return replace(idle_batch(pad_id, part), parts=beside)
    fits = rows.min() >= 0 and rows.max() < len(tokens) and not tokens.dropped[rows].any()
    if fits:
        needed = tokens.lengths[rows].sum() if micro_batch.flat else tokens.lengths[rows].max()
        fits = needed <= micro_batch.length and tokens.supervised[rows].sum() == micro_batch.supervised
    if not fits:
        raise UserError(
            f"{tokens.path}: rows of step {micro_batch.step} differ from the batch plan, which was made for other "
            "tokens; run `dvc repro bucket`"
        )
    # Of a part, the copy that reaches the device is pinned, not the complete batch that it is cut from.
    pin_complete = pin_memory and part is None
    batch = collate(tokens.gather(rows), micro_batch.length, pad_id, flat=micro_batch.flat, pin_memory=pin_complete)
    batch = with_parts(batch, tokens, rows, micro_batch.kind, micro_batch.attached, pin_memory=pin_memory)
    return batch if part is None else part_of(batch, part, pin_memory=pin_memory)


def with_parts(
    batch: Batch,
    tokens: TokenRows,
    rows: np.ndarray,
    kind: RowKind = RowKind.ANSWER,
    shapes: Sequence[AttachedShape] = (),
    *,
    pin_memory: bool = False,
) -> Batch:
    """A batch of these rows with what they carry besides tokens, and what objectives of rows of this kind need.

    With `shapes`, also what it runs beside the micro-batches of other processes.

    Raises:
        UserError: a file is missing or damaged.
    """
    beside = blank_parts(tokens, shapes, pin_memory=pin_memory)
    found = (one.part(tokens, rows, batch.input_ids_BT) for one in tokens.attached)
    parts = (*beside, *_made(chain(found, parts_of_kind(kind, tokens, rows)), pin_memory))
    return replace(batch, parts=parts) if parts else batch


def blank_parts(
    tokens: TokenRows, shapes: Sequence[AttachedShape], *, pin_memory: bool = False
) -> tuple[BatchPart, ...]:
    """What a micro-batch of these shapes runs beside those of other processes, for no row of its own."""
    beside = {one.attachment for one in shapes if one.beside}
    return _made((one.blank() for one in tokens.attached if type(one) in beside), pin_memory)


def _made(parts: Iterable[BatchPart | None], pin_memory: bool) -> tuple[BatchPart, ...]:
    """Those that there are, in page-locked memory if that is asked for."""
    found = (part for part in parts if part is not None)
    return tuple(part.pinned() if pin_memory else part for part in found)


def empty_batch(
    shape: BatchShape,
    device: torch.device | str,
    parts: int = 1,
    given: torch.Tensor | None = None,
    attached: tuple[BatchPart, ...] = (),
) -> Batch:
    """Uninitialised tensors with the shapes of a micro-batch, for tracing under FakeTensorMode.

    With several `parts`, the batch of a process that has one part of the tokens, with as many trained ones as possible.
    `given` are token ids, and `attached` what the rows carry besides tokens.
    """
    length = -(-shape.length // parts)

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    joined, positions_BT = None, None
    if shape.packed_lengths is not None:
        lengths = packed_lengths(shape.packed_lengths, length * parts)
        offsets, positions_BT = empty(len(lengths) + 1, dtype=torch.int32), empty(1, length)
        joined = PackedRows(lengths=lengths, offsets=offsets, positions_BT=positions_BT)
    elif parts > 1:
        positions_BT = empty(1, length)
    return Batch(
        input_ids_BT=empty(shape.rows, length) if given is None else given,
        targets_BT=empty(shape.rows, length),
        supervised_index_N=empty(shape.trained(parts)),
        packed_rows=joined,
        positions_BT=positions_BT if parts > 1 else None,
        parts=(*attached, *shape.empty_parts(device, parts)),
    )
