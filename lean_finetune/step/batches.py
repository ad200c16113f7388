"""From planned rows to the tensors of one micro-batch.

Shape legend: B rows of the micro-batch (1 where they are joined), T padded length in tokens, N supervised positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention import JoinedRows
from lean_finetune.plan.batch_plan import PADDING_ROW_TOKENS, MicroBatch, Plan, sums_between
from lean_finetune.step.token_rows import TokenRows

IGNORED = -100
"""Target of a position that is not predicted; the value torch's cross-entropy skips."""

Row = tuple[np.ndarray, np.ndarray]
"""Token ids of shape (tokens,) and trained spans of shape (spans, 2), both integers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch as tensors.

    There is no attention mask: rows are padded on the right (or joined, each attending to itself alone) and attention
    is causal, so no real token ever sees padding, padding is never a target, and the fused kernels stay usable.
    """

    input_ids_BT: torch.Tensor
    """int64."""
    targets_BT: torch.Tensor
    """int64: token t + 1 where that token is trained, else IGNORED; the last token of a row is IGNORED."""
    supervised_index_N: torch.Tensor
    """int64: flat positions b * T + t whose target is not IGNORED, ascending."""
    joined_rows: JoinedRows | None
    """The rows of a sequence that holds several; None where each row has a line of its own."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; the host does not wait for the copy of pinned memory."""
        pinned = self.input_ids_BT.is_pinned()
        return Batch(
            input_ids_BT=self.input_ids_BT.to(device, non_blocking=pinned),
            targets_BT=self.targets_BT.to(device, non_blocking=pinned),
            supervised_index_N=self.supervised_index_N.to(device, non_blocking=pinned),
            joined_rows=None if self.joined_rows is None else self.joined_rows.to(device, non_blocking=pinned),
        )


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """All that memory depends on in a micro-batch."""

    rows: int
    """B."""
    length: int
    """T, in tokens."""
    supervised: int
    """N, in tokens."""
    joined_lengths: tuple[int, ...] | None
    """Tokens of each of the rows that are joined, padding included; None where rows are not joined."""

    @staticmethod
    def of(micro_batch: MicroBatch, lengths: np.ndarray) -> "BatchShape":
        """The shape a planned micro-batch will have; `lengths` are the tokens of every training row."""
        joined = joined_lengths(lengths[micro_batch.rows], micro_batch.length) if micro_batch.flat else None
        return BatchShape(
            rows=1 if micro_batch.flat else len(micro_batch.rows),
            length=micro_batch.length,
            supervised=micro_batch.supervised,
            joined_lengths=joined,
        )


def joined_lengths(lengths: Sequence[int] | np.ndarray, total: int) -> tuple[int, ...]:
    """Lengths of the rows of a joined sequence of `total` tokens, its padding cut into rows of its own."""
    rows = [int(length) for length in lengths]
    left = total - sum(rows)
    whole, rest = divmod(left, PADDING_ROW_TOKENS)
    return (*rows, *[PADDING_ROW_TOKENS] * whole, *([rest] if rest else []))


def collate(rows: Sequence[Row], length: int, pad_id: int, *, flat: bool = False, pin_memory: bool = False) -> Batch:
    """Lay rows out and shift targets.

    Args:
        rows: none is longer than `length`; when joined, all together are not.
        length: T, tokens to which rows, or their joined sequence, are padded on the right.
        pad_id: token in the padding. It may also be a trained token (EOS, say): targets come from spans alone.
        flat: join the rows into one sequence.
        pin_memory: make tensors in page-locked memory, from which a GPU copies while the host goes on.
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
        joined_rows=join_rows(sizes, length, pin_memory=pin_memory) if flat else None,
    )


def _empty(shape: tuple[int, ...], pin_memory: bool, dtype: type[np.integer] = np.int64) -> torch.Tensor:
    """A tensor to fill; memory of numpy's where it is not pinned, so that a CPU's count of tensors leaves it out."""
    if pin_memory:
        return torch.empty(shape, dtype=torch.int64 if dtype is np.int64 else torch.int32, pin_memory=True)
    return torch.from_numpy(np.empty(shape, dtype))


def _supervised_index(spans: Sequence[np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Flat positions from which trained tokens are predicted, ascending, int64.

    Args:
        spans: of each row, (spans, 2).
        starts: flat position of each row's first token.
    """
    shifts = np.repeat(starts, [len(pairs) for pairs in spans])
    pairs = np.concatenate(spans).astype(np.int64)
    first = np.maximum(pairs[:, 0], 1)  # Nothing precedes the first token, so nothing predicts it.
    counts = np.maximum(pairs[:, 1] - first, 0)
    # Position k of all that are trained lies as far behind its span's start as k lies behind the span's first.
    offsets = shifts + first - 1 - (np.cumsum(counts) - counts)
    return np.arange(counts.sum()) + np.repeat(offsets, counts)


def join_rows(lengths: Sequence[int] | np.ndarray, total: int, *, pin_memory: bool = False) -> JoinedRows:
    """Where rows of these lengths lie in a joined sequence of `total` tokens.

    All of the padding is at position 0, which every model knows.
    """
    bounds = joined_lengths(lengths, total)
    offsets = _empty((len(bounds) + 1,), pin_memory, np.int32)
    offsets.numpy()[:] = [0, *accumulate(bounds)]
    text_tokens = int(sum(lengths))
    positions_BT = _empty((1, total), pin_memory)
    positions = positions_BT.numpy()[0]
    positions[:text_tokens] = np.arange(text_tokens) - np.repeat(offsets.numpy()[: len(lengths)], lengths)
    positions[text_tokens:] = 0
    return JoinedRows(lengths=bounds, offsets=offsets, positions_BT=positions_BT)


IDLE_TOKENS = 8
"""Length of the row of a process that has nothing to compute in a turn: the shortest that suits every kernel."""


def idle_batch(pad_id: int) -> Batch:
    """One row of padding without a target: its loss is 0, and it passes through the model with those of the others."""
    return Batch(
        input_ids_BT=torch.full((1, IDLE_TOKENS), pad_id, dtype=torch.int64),
        targets_BT=torch.full((1, IDLE_TOKENS), IGNORED, dtype=torch.int64),
        supervised_index_N=torch.empty(0, dtype=torch.int64),
        joined_rows=None,
    )


def read_batch(tokens: TokenRows, micro_batch: MicroBatch, pad_id: int, *, pin_memory: bool = False) -> Batch:
    """The tensors of a planned micro-batch.

    Raises:
        UserError: the plan was made for other tokens.
    """
    numbers = micro_batch.rows
    if not len(numbers):
        return idle_batch(pad_id)
    if numbers.min() < 0 or numbers.max() >= len(tokens) or not _fits(tokens, micro_batch):
        raise UserError(
            f"{tokens.path}: rows of step {micro_batch.step} differ from the batch plan, which was made for other "
            "tokens; run `dvc repro bucket`"
        )
    return collate(tokens.gather(numbers), micro_batch.length, pad_id, flat=micro_batch.flat, pin_memory=pin_memory)


def _fits(tokens: TokenRows, micro_batch: MicroBatch) -> bool:
    """Whether the index knows these rows as the plan does."""
    lengths = tokens.lengths[micro_batch.rows]
    needed = lengths.sum() if micro_batch.flat else lengths.max()
    supervised = tokens.supervised[micro_batch.rows].sum()
    used = not tokens.dropped[micro_batch.rows].any()
    return used and needed <= micro_batch.length and supervised == micro_batch.supervised


def refuse_other_ranks(plan: Plan, ranks: int) -> None:
    """Refuse a plan that deals a step to another number of GPUs than there are: some rows would be left out.

    Raises:
        UserError: with both numbers.
    """
    if plan.ranks != ranks:
        raise UserError(
            f"data/batches/plan.arrow: must be made for as many GPUs as train; got a plan for {plan.ranks} where "
            f"hardware.num_gpus is {ranks}; run `dvc repro bucket`"
        )


def refuse_other_tokens(plan: Plan, lengths: np.ndarray) -> None:
    """Refuse a plan whose rows the index does not have, or has longer, before hours are spent on it.

    Args:
        plan: of the run, or of one GPU.
        lengths: tokens of every training row.

    Raises:
        UserError: the plan was made for other tokens.
    """
    if plan.rows.max() < len(lengths):
        planned = lengths[plan.rows]
        room = plan.length if plan.flat else np.repeat(plan.length, plan.sizes)
        needed = sums_between(planned, plan.bounds) if plan.flat else planned
        if (needed <= room).all():
            return
    raise UserError(
        "data/batches/plan.arrow: its rows differ from data/tokens/train-index.arrow: the plan was made for other "
        "tokens; run `dvc repro bucket`"
    )


def empty_batch(shape: BatchShape, device: torch.device | str) -> Batch:
    """Uninitialised tensors of a micro-batch's shape, for tracing under FakeTensorMode."""

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    joined = None
    if shape.joined_lengths is not None:
        offsets = empty(len(shape.joined_lengths) + 1, dtype=torch.int32)
        joined = JoinedRows(lengths=shape.joined_lengths, offsets=offsets, positions_BT=empty(1, shape.length))
    return Batch(
        input_ids_BT=empty(shape.rows, shape.length),
        targets_BT=empty(shape.rows, shape.length),
        supervised_index_N=empty(shape.supervised),
        joined_rows=joined,
    )
