"""Merging of shards: token files, index files, duplicates and totals, without a Python object per row."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from lean_finetune.data.read.arrow_batches import from_numpy, to_numpy
from lean_finetune.data.shards.block_tokens import Tally
from lean_finetune.data.shards.shard_files import SIDES, Shard, shard_name

# 3 bytes a row instead of 10, and 10 million rows decompress in 0.2 s. No threads: they would make forks unsafe.
INDEX_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
INDEX = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("source", pa.uint16(), nullable=False),
        pa.field("dropped", pa.bool_(), nullable=False),
    ]
)


@dataclass(kw_only=True)
class SourceTotals:
    """Totals of one source on one side of the split, without duplicates."""

    rows_by_length: np.ndarray
    """int64, shape (max_length + 1,)."""
    supervised: int = 0
    duplicates: int = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.rows_by_length.sum())

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.rows_by_length @ np.arange(len(self.rows_by_length)))

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 where there is none."""
        return int(np.flatnonzero(self.rows_by_length).max(initial=0))

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the rows does not exceed; 0 where there is no row."""
        return int(np.searchsorted(np.cumsum(self.rows_by_length), share * self.rows))

    def add(self, lengths: np.ndarray, supervised: np.ndarray, dropped: np.ndarray) -> None:
        """Add rows; those with `dropped` are duplicates."""
        self.duplicates += int(dropped.sum())
        self.supervised += int(supervised[~dropped].sum())
        self.rows_by_length += np.bincount(lengths[~dropped], minlength=len(self.rows_by_length))


@dataclass(kw_only=True)
class Totals:
    """Totals over all shards."""

    sides: dict[str, list[SourceTotals]]
    """By side, then by source."""
    tally: Tally = field(default_factory=Tally)

    def side(self, name: str) -> SourceTotals:
        """One side over all sources."""
        sources = self.sides[name]
        return SourceTotals(
            rows_by_length=np.sum([one.rows_by_length for one in sources], axis=0),
            supervised=sum(one.supervised for one in sources),
            duplicates=sum(one.duplicates for one in sources),
        )

    @property
    def counts(self) -> Counter[str]:
        """The counts over all sources."""
        return sum(self.tally.counts.values(), Counter())


def merge(
    root: Path, shards: Sequence[Shard], out: Path, sources: int, max_length: int, drop_duplicates: bool
) -> Totals:
    """Link the token files of the shards below `root` into `out`, write the index files, and compute the totals."""
    no_rows = np.zeros(max_length + 1, np.int64)
    totals = Totals(
        sides={side: [SourceTotals(rows_by_length=no_rows.copy()) for _ in range(sources)] for side in SIDES}
    )
    for shard in shards:
        totals.tally.add(shard.tally)
    dropped = _duplicates(root, shards) if drop_duplicates else None
    for side in SIDES:
        (out / side).mkdir()
        for shard in shards:
            name = f"{side}/{shard_name(shard.number)}.arrow"
            _link(root / name, out / name)
        side_dropped = None if dropped is None else dropped[side]
        index = _index_parts(root, shards, side)
        _write_index(index, out / f"{side}-index.arrow", totals.sides[side], side_dropped)
    return totals


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, so that the shard stays complete where it is; copy it where links are impossible."""
    try:
        os.link(source, target)
    except OSError:  # Another file system, or one without links.
        shutil.copyfile(source, target)


def _index_parts(root: Path, shards: Sequence[Shard], side: str) -> Iterator[pa.Table]:
    """The index of each shard, in order."""
    for shard in shards:
        path = root / f"{side}-index" / f"{shard_name(shard.number)}.arrow"
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            yield reader.read_all()


def _duplicates(root: Path, shards: Sequence[Shard]) -> dict[str, np.ndarray]:
    """By side, bool of shape (rows,): whether an earlier row has the same tokens.

    Held-out rows count as earlier than training rows, so a training row that equals a held-out row is dropped. Memory
    has 8 bytes for each row. Two of 10 million different rows have equal digests with probability 1 in 370,000.
    """
    order = tuple(reversed(SIDES))
    parts = {side: [to_numpy(part["digest"]) for part in _index_parts(root, shards, side)] for side in order}
    rows = {side: sum(map(len, parts[side])) for side in order}
    digests = np.concatenate([part for side in order for part in parts[side]]).astype(np.uint64, copy=False)
    # A stable sort leaves equal digests in row order: all but the first of a run are duplicates.
    by_digest = np.argsort(digests, kind="stable")
    again = np.flatnonzero(np.diff(digests[by_digest]) == 0) + 1
    dropped = np.zeros(len(digests), bool)
    dropped[by_digest[again]] = True
    return {order[0]: dropped[: rows[order[0]]], order[1]: dropped[rows[order[0]] :]}


def _write_index(index: Iterable[pa.Table], path: Path, totals: list[SourceTotals], dropped: np.ndarray | None) -> None:
    """Write one record for each row of a side, with one record batch for each shard of `index`."""
    start = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, INDEX, options=INDEX_OPTIONS) as writer:
        for part in index:
            end = start + part.num_rows
            part_dropped = np.zeros(part.num_rows, bool) if dropped is None else dropped[start:end]
            start = end
            columns = {name: to_numpy(part[name]) for name in ("length", "supervised", "source")}
            for source in np.unique(columns["source"]):
                rows = columns["source"] == source
                totals[source].add(columns["length"][rows], columns["supervised"][rows], part_dropped[rows])
            if part.num_rows:
                arrays = map(from_numpy, [*columns.values(), part_dropped], INDEX.types)
                writer.write_batch(pa.record_batch(list(arrays), schema=INDEX))
