"""The rows of data/tokens: memory-mapped shards and their index. Nothing is copied before a batch is made."""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.plan.arrow_files import open_batches

Split = Literal["train", "heldout"]

SHARD_TYPES = {
    "input_ids": (pa.list_(pa.uint16()), pa.list_(pa.int32())),
    "loss_spans": (pa.list_(pa.uint16()), pa.list_(pa.int32())),
    "family": (pa.string(),),
    "source_file": (pa.uint16(), pa.int32()),
    "source_row": (pa.uint32(),),
}
INDEX_TYPES = {"length": (pa.int32(),), "supervised": (pa.int32(),), "dropped": (pa.bool_(),)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Views of one record batch, checked against the index: the offsets lie inside what they point into."""

    ids: np.ndarray
    """Token ids of all its rows, uint16 or int32."""
    id_ends: np.ndarray
    """Row r holds ids[id_ends[r] : id_ends[r + 1]]."""
    spans: np.ndarray
    """Starts and ends of trained spans of all its rows, in tokens of their row, uint16 or int32."""
    span_ends: np.ndarray
    """Row r has spans[span_ends[r] : span_ends[r + 1]]."""


class TokenRows:
    """Rows of one split by number: what `ids` and `spans` return are views of the files.

    Opening reads the index and the shards' footers. Offsets and spans of a record batch are checked when a row of it is
    first asked for, so that opening does not grow with the tokens.
    """

    def __init__(self, directory: Path, split: Split):
        """Map the shards `directory/split/*.arrow` and `directory/split-index.arrow`.

        Raises:
            UserError: a file is missing, damaged or of another schema, the two do not belong together, or there is no
                training row. There may be no held-out row.
        """
        self.path = directory / split
        index = open_batches(directory / f"{split}-index.arrow", INDEX_TYPES)
        self.lengths = _column(index, "length", np.int32)
        """Tokens of every row, int32."""
        self.supervised = _column(index, "supervised", np.int32)
        """Tokens of every row that are predicted and count in the loss, int32."""
        self.dropped = _column(index, "dropped", np.bool_)
        """Rows that repeat an earlier one and are never used, bool."""
        self._batches = [batch for path in sorted(self.path.glob("*.arrow")) for batch in _open_shard(path)]
        self._starts = np.array([0, *accumulate(batch.num_rows for batch in self._batches)])
        self._blocks: dict[int, Block] = {}
        if self._starts[-1] != len(self.lengths):
            raise self._damaged(f"its shards hold {self._starts[-1]} rows and its index {len(self.lengths)}")
        if self.dropped.all() and split == "train":
            raise self._damaged("holds no row")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def used(self) -> np.ndarray:
        """Numbers of the rows that are used, ascending."""
        return np.flatnonzero(~self.dropped)

    def ids(self, row: int) -> np.ndarray:
        """Token ids of a row, shape (tokens,), uint16 or int32."""
        block, offset = self._place(row)
        return block.ids[block.id_ends[offset] : block.id_ends[offset + 1]]

    def spans(self, row: int) -> np.ndarray:
        """Trained tokens of a row as half-open token positions, (spans, 2), uint16 or int32, ascending and disjoint."""
        block, offset = self._place(row)
        return block.spans[block.span_ends[offset] : block.span_ends[offset + 1]].reshape(-1, 2)

    def gather(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """`ids` and `spans` of several rows at once; each of `rows` must exist."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        found = []
        for number, offset in zip(numbers.tolist(), (rows - self._starts[numbers]).tolist(), strict=True):
            block = self._blocks.get(number) or self._open_block(number)
            # `item` gives plain integers, with which numpy slices twice as fast as with its own.
            start, end = block.id_ends.item(offset), block.id_ends.item(offset + 1)
            first, last = block.span_ends.item(offset), block.span_ends.item(offset + 1)
            found.append((block.ids[start:end], block.spans[first:last].reshape(-1, 2)))
        return found

    def family(self, row: int) -> str | None:
        """Task family of a row, None where its source names none."""
        return self._value("family", row)

    def source_file(self, row: int) -> int:
        """Place of a row's file among the files of data/tokens/meta.json."""
        return self._value("source_file", row)

    def source_row(self, row: int) -> int:
        """Number of a row in its file, from 0."""
        return self._value("source_row", row)

    def _value(self, column: str, row: int) -> Any:
        """One value of a plain column."""
        number = self._batch_of(row)
        return self._batches[number].column(column)[row - int(self._starts[number])].as_py()

    def _place(self, row: int) -> tuple[Block, int]:
        """Block of a row and its place there."""
        number = self._batch_of(row)
        block = self._blocks.get(number) or self._open_block(number)
        return block, row - int(self._starts[number])

    def _open_block(self, number: int) -> Block:
        """Views of a record batch, kept from now on; two threads may both make them: they make the same."""
        return self._blocks.setdefault(number, self._check_block(number))

    def _batch_of(self, row: int) -> int:
        """Record batch of a row.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has {len(self)} rows, no row {row}")
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _check_block(self, number: int) -> Block:
        """Views of a record batch.

        Raises:
            UserError: its offsets or spans do not fit its tokens or the index: unchecked they would read other memory.
        """
        rows = slice(self._starts[number], self._starts[number + 1])
        lists = [self._batches[number].column(name) for name in ("input_ids", "loss_spans")]
        (ids, id_ends), (spans, span_ends) = (_list_views(column) for column in lists)
        counts = np.diff(span_ends)
        lengths, supervised = self.lengths[rows], self.supervised[rows]
        named = f"rows {rows.start} to {rows.stop - 1}"
        if any(column.null_count or column.values.null_count for column in lists):
            raise self._damaged(f"{named}: tokens and spans must not hold nulls")
        if id_ends[0] < 0 or id_ends[-1] > len(ids) or not np.array_equal(np.diff(id_ends), lengths):
            raise self._damaged(f"{named}: their lengths are not those of the index")
        if span_ends[0] < 0 or span_ends[-1] > len(spans) or (counts < 2).any() or (counts % 2).any():
            raise self._damaged(f"{named}: each needs pairs of loss spans")
        wrong = _first_wrong_row(spans[span_ends[0] : span_ends[-1]], counts, lengths, supervised)
        if wrong is not None:
            shown = spans[span_ends[wrong] : span_ends[wrong + 1]].tolist()
            raise self._damaged(
                f"row {rows.start + wrong}: loss spans {shown} must be ascending pairs within its {lengths[wrong]} "
                f"tokens that train {supervised[wrong]} of them"
            )
        return Block(ids=ids, id_ends=id_ends, spans=spans, span_ends=span_ends)

    def _damaged(self, rule: str) -> UserError:
        """The one line for shards that this version of the pipeline cannot have written whole."""
        return UserError(f"{self.path}: {rule}; delete data/tokens and run `dvc repro`")


def read_lengths(index: Path) -> np.ndarray:
    """Tokens of every row, int32, from an index file alone.

    Raises:
        UserError: the file is missing, damaged or of another schema.
    """
    return _column(open_batches(index, INDEX_TYPES), "length", np.int32)


def _column(batches: list[pa.RecordBatch], name: str, dtype: type[np.generic]) -> np.ndarray:
    """A column of an index, without a copy where it can be had so."""
    parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in batches]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _open_shard(path: Path) -> list[pa.RecordBatch]:
    """Memory-map a shard and check its schema.

    Raises:
        UserError: it is cut short, damaged, or of another schema.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a whole Arrow file ({error}); delete it and run `dvc repro`") from error
    for name, types in SHARD_TYPES.items():
        index = reader.schema.get_field_index(name)
        found = reader.schema.field(index).type if index >= 0 else None
        if found not in types:
            wanted = " or ".join(map(str, types))
            raise UserError(f"{path}: column {name} must be {wanted}, got {found}; delete it and run `dvc repro`")
    return batches


def _list_views(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Values and offsets of a list column, without a copy."""
    return column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)


def _first_wrong_row(flat: np.ndarray, counts: np.ndarray, lengths: np.ndarray, supervised: np.ndarray) -> int | None:
    """The first row whose spans are not ascending pairs within its tokens, or train another number of them.

    Args:
        flat: starts and ends of the spans of all rows.
        counts: how many of them each row has; 2 or more.
        lengths: tokens of each row.
        supervised: tokens that each row trains.
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
