"""From token files and the batch plan to the tensors of one micro-batch.

Shape legend: B rows of the micro-batch, T padded length in tokens, N supervised positions.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from stages.bucket.arrow import open_batches
from stages.bucket.plan import MicroBatch
from stages.errors import UserError

IGNORED = -100
"""Target of a position that is not predicted; the value torch's cross-entropy skips."""

COLUMNS = {
    "input_ids": (pa.list_(pa.uint16()), pa.list_(pa.int32())),
    "loss_spans": (pa.list_(pa.int32()),),
    "family": (pa.string(),),
    "source_row": (pa.int64(),),
}


class TokenRows:
    """Rows of train.arrow or heldout.arrow, memory-mapped: what `ids` and `spans` return are views of the file."""

    def __init__(self, path: Path):
        """Map the file.

        Raises:
            UserError: the file is missing, damaged, of another schema, or holds no row.
        """
        self.path = path
        self._batches = open_batches(path, COLUMNS)
        self._starts = [0, *np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64).tolist()]
        if not len(self):
            raise UserError(f"{path}: holds no row; delete it and run `dvc repro`")
        self._ids = [_list_views(batch.column("input_ids")) for batch in self._batches]
        self._spans = [_list_views(batch.column("loss_spans")) for batch in self._batches]

    def __len__(self) -> int:
        return self._starts[-1]

    def ids(self, row: int) -> np.ndarray:
        """Token ids of a row, shape (tokens,), uint16 or int32."""
        block, offset = self._place(row)
        values, ends = self._ids[block]
        return values[ends[offset] : ends[offset + 1]]

    def spans(self, row: int) -> np.ndarray:
        """Trained tokens of a row as half-open token positions, shape (spans, 2), int32, ascending and disjoint.

        Raises:
            UserError: the file's spans do not fit its tokens.
        """
        block, offset = self._place(row)
        values, ends = self._spans[block]
        flat = values[ends[offset] : ends[offset + 1]]
        edges = [0, *flat.tolist(), len(self.ids(row))]
        if len(flat) % 2 or any(left > right for left, right in zip(edges, edges[1:], strict=False)):
            raise UserError(
                f"{self.path}: row {row}: loss spans {flat.tolist()} must be ascending pairs within its "
                f"{len(self.ids(row))} tokens; delete it and run `dvc repro`"
            )
        return flat.reshape(-1, 2)

    def family(self, row: int) -> str | None:
        """Task family of a row, None where its source names none."""
        block, offset = self._place(row)
        return self._batches[block].column("family")[offset].as_py()

    def source_row(self, row: int) -> int:
        """Number of a row in the source stream, from 0."""
        block, offset = self._place(row)
        return self._batches[block].column("source_row")[offset].as_py()

    def lengths(self) -> np.ndarray:
        """Tokens of every row, shape (rows,), int32."""
        return np.concatenate([np.diff(ends) for _, ends in self._ids])

    def _place(self, row: int) -> tuple[int, int]:
        """Record batch of a row and its offset there.

        Raises:
            IndexError: the file has no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has {len(self)} rows, no row {row}")
        block = bisect_right(self._starts, row) - 1
        return block, row - self._starts[block]


def _list_views(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a list column, without a copy."""
    return column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One micro-batch as tensors.

    There is no attention mask: rows are padded on the right and attention is causal, so no real token ever sees
    padding, padding is never a target, and the fused attention kernels stay usable.
    """

    input_ids_BT: torch.Tensor
    """int64."""
    targets_BT: torch.Tensor
    """int64: token t + 1 where that token is trained, else IGNORED; the last column is IGNORED."""
    supervised_index_N: torch.Tensor
    """int64: flat positions b * T + t whose target is not IGNORED, ascending."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        return Batch(
            input_ids_BT=self.input_ids_BT.to(device),
            targets_BT=self.targets_BT.to(device),
            supervised_index_N=self.supervised_index_N.to(device),
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

    @staticmethod
    def of(micro_batch: MicroBatch) -> "BatchShape":
        """The shape a planned micro-batch will have."""
        return BatchShape(rows=len(micro_batch.rows), length=micro_batch.length, supervised=micro_batch.supervised)


def collate(rows: Sequence[tuple[np.ndarray, np.ndarray]], length: int, pad_id: int) -> Batch:
    """Pad rows on the right and shift targets.

    Args:
        rows: token ids of shape (tokens,) and spans of shape (spans, 2) of each row; no row longer than `length`.
        length: T, tokens to which rows are padded.
        pad_id: token in the padding. It may also be a trained token (EOS, say): targets come from spans alone.
    """
    input_ids_BT = np.full((len(rows), length), pad_id, dtype=np.int64)
    targets_BT = np.full((len(rows), length), IGNORED, dtype=np.int64)
    for b, (ids, spans) in enumerate(rows):
        input_ids_BT[b, : len(ids)] = ids
        for start, end in spans.tolist():
            start = max(start, 1)  # Nothing precedes the first token, so nothing predicts it.
            targets_BT[b, start - 1 : end - 1] = ids[start:end]
    return Batch(
        input_ids_BT=torch.from_numpy(input_ids_BT),
        targets_BT=torch.from_numpy(targets_BT),
        supervised_index_N=torch.from_numpy(np.flatnonzero(targets_BT != IGNORED)),
    )


def read_batch(tokens: TokenRows, micro_batch: MicroBatch, pad_id: int) -> Batch:
    """The tensors of a planned micro-batch.

    Raises:
        UserError: the plan was made for other tokens.
    """
    numbers = micro_batch.rows.tolist()
    known = 0 <= min(numbers) and max(numbers) < len(tokens)
    if not known or max(len(tokens.ids(row)) for row in numbers) > micro_batch.length:
        raise _stale_plan(tokens, micro_batch)
    batch = collate([(tokens.ids(row), tokens.spans(row)) for row in numbers], micro_batch.length, pad_id)
    if len(batch.supervised_index_N) != micro_batch.supervised:
        raise _stale_plan(tokens, micro_batch)
    return batch


def _stale_plan(tokens: TokenRows, micro_batch: MicroBatch) -> UserError:
    """The one line for a plan that does not belong to the tokens at hand."""
    return UserError(
        f"{tokens.path}: rows of step {micro_batch.step} differ from the batch plan, which was made for other tokens; "
        "run `dvc repro bucket`"
    )


def empty_batch(shape: BatchShape, device: torch.device | str) -> Batch:
    """Uninitialised tensors of a micro-batch's shape, for tracing under FakeTensorMode."""
    return Batch(
        input_ids_BT=torch.empty(shape.rows, shape.length, dtype=torch.int64, device=device),
        targets_BT=torch.empty(shape.rows, shape.length, dtype=torch.int64, device=device),
        supervised_index_N=torch.empty(shape.supervised, dtype=torch.int64, device=device),
    )
