"""Read the rows of data/tokens: memory-mapped shards and their index, without copies."""

from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from cuda_memory.units import counted
from lean_finetune.core.arrow_files import open_batches, read_column
from lean_finetune.core.errors import UserError
from lean_finetune.islands.attachments import read_attached
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.batch_plan import refuse_other_rows

Split = Literal["train", "heldout"]

SHARD_TYPES = {
    "input_ids": (pa.list_(pa.uint16()), pa.list_(pa.int32())),
    "loss_spans": (pa.list_(pa.uint16()), pa.list_(pa.int32())),
    "family": (pa.string(),),
}
INDEX_TYPES = {"length": (pa.int32(),), "supervised": (pa.int32(),), "dropped": (pa.bool_(),)}


@dataclass(frozen=True, kw_only=True, eq=False)
class _RecordBatch:
    """Views of one record batch; its offsets are checked against the index."""

    ids: np.ndarray
    """Token ids of all rows, uint16 or int32."""
    id_ends: np.ndarray
    """Row r is ids[id_ends[r] : id_ends[r + 1]]."""
    spans: np.ndarray
    """Starts and ends of the trained spans of all rows, in tokens of the row, uint16 or int32."""
    span_ends: np.ndarray
    """Row r has spans[span_ends[r] : span_ends[r + 1]]."""


class TokenRows:
    """Rows of one split by number; `ids` and `spans` return views of the files.

    Opening reads the index and the footers of the shards. A record batch is checked, and compared with its checksums,
    when one of its rows is first read, so the time to open does not grow with the tokens.
    """

    def __init__(self, directory: Path, split: Split, kind: RowKind | None = None):
        """Map the shards `directory/split/*.arrow` and `directory/split-index.arrow`.

        Raises:
            UserError: a file is missing, damaged or of another schema, shards and index do not belong together, there
                is no training row, or rows are of another `kind` if that is given. A held-out split may be empty.
        """
        self.path, index_path = directory / split, directory / f"{split}-index.arrow"
        index = open_batches(index_path, INDEX_TYPES)
        if kind is not None:
            refuse_other_rows(index_path, index, kind)
        self.lengths = read_column(index, "length", np.int32)
        """Tokens of every row, int32."""
        self.supervised = read_column(index, "supervised", np.int32)
        """Tokens of every row that are predicted and count in the loss, int32."""
        self.dropped = read_column(index, "dropped", np.bool_)
        """Whether a row repeats an earlier one, so that it is never used, bool."""
        self.attached = read_attached(index_path)
        """What rows carry besides tokens."""
        shards = (open_batches(path, SHARD_TYPES, check_values=False) for path in sorted(self.path.glob("*.arrow")))
        self._batches = list(chain.from_iterable(shards))
        self._starts = np.array([0, *accumulate(batch.num_rows for batch in self._batches)])
        self._columns: dict[str, np.ndarray | None] = {}
        self._opened: dict[int, _RecordBatch] = {}
        if self._starts[-1] != len(self.lengths):
            raise self._damaged(f"its shards have {self._starts[-1]} rows and its index {len(self.lengths)}")
        if self.dropped.all() and split == "train":
            raise self._damaged("has no row")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def used(self) -> np.ndarray:
        """Numbers of all rows but duplicates, ascending."""
        return np.flatnonzero(~self.dropped)

    def ids(self, row: int) -> np.ndarray:
        """Token ids of a row, shape (tokens,), uint16 or int32; raises IndexError if there is no such row."""
        return self._row(row)[0]

    def spans(self, row: int) -> np.ndarray:
        """Trained tokens of a row as half-open token positions, (spans, 2), uint16 or int32, ascending and disjoint."""
        return self._row(row)[1]

    def _row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has {counted(len(self), 'row')}, no row {row}")
        return self.gather(np.array([row]))[0]

    def gather(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """`ids` and `spans` of several rows; each of `rows` must exist."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        found = []
        for number, offset in zip(numbers.tolist(), (rows - self._starts[numbers]).tolist(), strict=True):
            if number not in self._opened:  # Two threads may both check a record batch, with the same result.
                self._opened[number] = self._check(number)
            batch = self._opened[number]
            # `item` gives plain integers, with which numpy slices twice as fast as with its own.
            start, end = batch.id_ends.item(offset), batch.id_ends.item(offset + 1)
            first, last = batch.span_ends.item(offset), batch.span_ends.item(offset + 1)
            found.append((batch.ids[start:end], batch.spans[first:last].reshape(-1, 2)))
        return found

    def family(self, row: int) -> str | None:
        """Task family of a row, None where its source names none."""
        family: str | None = self.value("family", row)
        return family

    def value(self, column: str, row: int) -> Any:
        """What a row has in another column of the shards."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._batches[number].column(column)[row - int(self._starts[number])].as_py()

    def column(self, name: str) -> np.ndarray | None:
        """What every row has in another column of the shards, or of those that were given; None without it."""
        if name not in self._columns:
            has = bool(self._batches) and name in self._batches[0].schema.names
            columns = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self._batches] if has else []
            self._columns[name] = np.concatenate(columns) if has else None
        return self._columns[name]

    def give(self, name: str, values: np.ndarray) -> None:
        """Give every row a value that the shards do not have."""
        self._columns[name] = values

    def _check(self, number: int) -> _RecordBatch:
        """Make the views of a record batch.

        Raises:
            UserError: it was changed, or its offsets or spans do not fit its tokens or the index; they would read
                foreign memory.
        """
        rows = slice(self._starts[number], self._starts[number + 1])
        lists = [self._batches[number].column(name) for name in ("input_ids", "loss_spans")]
        ids, spans = (column.values.to_numpy(zero_copy_only=True) for column in lists)
        id_ends, span_ends = (column.offsets.to_numpy(zero_copy_only=True) for column in lists)
        counts = np.diff(span_ends)
        lengths, supervised = self.lengths[rows], self.supervised[rows]
        named = f"rows {rows.start} to {rows.stop - 1}"
        if any(column.null_count or column.values.null_count for column in lists):
            raise self._damaged(f"{named}: tokens and spans must not be null")
        if id_ends[0] < 0 or id_ends[-1] > len(ids) or not np.array_equal(np.diff(id_ends), lengths):
            raise self._damaged(f"{named}: their lengths differ from the index")
        if span_ends[0] < 0 or span_ends[-1] > len(spans) or (counts < 2).any() or (counts % 2).any():
            raise self._damaged(f"{named}: each needs pairs of loss spans")
        wrong = _first_wrong_row(spans[span_ends[0] : span_ends[-1]], counts, lengths, supervised)
        if wrong is not None:
            shown = spans[span_ends[wrong] : span_ends[wrong + 1]].tolist()
            raise self._damaged(
                f"row {rows.start + wrong}: loss spans {shown} must be ascending pairs within its {lengths[wrong]} "
                f"tokens that train {supervised[wrong]} of them"
            )
        return _RecordBatch(ids=ids, id_ends=id_ends, spans=spans, span_ends=span_ends)

    def _damaged(self, rule: str) -> UserError:
        """The error for shards that the pipeline cannot have written."""
        return UserError(f"{self.path}: {rule}; delete data/tokens and run `dvc repro`")


def read_lengths(index: Path) -> np.ndarray:
    """Tokens of every row, int32, from an index file alone; raises UserError if it is missing or damaged."""
    return read_column(open_batches(index, INDEX_TYPES), "length", np.int32)


def read_supervised(index: Path) -> np.ndarray:
    """Trained tokens of every row, as `read_lengths`."""
    return read_column(open_batches(index, INDEX_TYPES), "supervised", np.int32)


def _first_wrong_row(flat: np.ndarray, counts: np.ndarray, lengths: np.ndarray, supervised: np.ndarray) -> int | None:
    """The first row whose spans are not ascending pairs within its tokens, or train another number of tokens.

    `flat` has the starts and ends of the spans of all rows: `counts` of them per row, 2 or more.
    """
    flat = flat.astype(np.int32, copy=False)  # Differences of unsigned positions would wrap.
    firsts = np.concatenate([[0], np.cumsum(counts[:-1])])
    before = np.empty_like(flat)
    before[1:], before[firsts] = flat[:-1], 0
    trained = flat[1::2] - np.maximum(flat[::2], 1)  # Nothing precedes the first token, so nothing predicts it.
    wrong = np.logical_or.reduceat(flat < before, firsts)
    wrong |= flat[firsts + counts - 1] > lengths
    wrong |= np.add.reduceat(np.maximum(trained, 0), firsts // 2) != supervised
    return int(wrong.argmax()) if wrong.any() else None
