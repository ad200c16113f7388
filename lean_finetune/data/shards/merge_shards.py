"""Shards joined to the directory that later stages read: index files, duplicates, totals. No Python object per row."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from lean_finetune.data.read.arrow_arrays import from_numpy, to_numpy
from lean_finetune.data.shards.shard_files import REJECTS_LISTED, SIDES, Reject, Shard, shard_name

# 3 bytes a row instead of 10; 10 million rows are unpacked in 0.2 s. Arrow's threads would forbid a later fork.
INDEX_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
INDEX = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("source", pa.uint16(), nullable=False),
        pa.field("dropped", pa.bool_(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A finished shard and the directory that holds its files."""

    root: Path
    shard: Shard


@dataclass(kw_only=True)
class SourceTotals:
    """The rows of one source on one side, duplicates left out."""

    rows_by_length: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    supervised: int = 0
    duplicates: int = 0

    @property
    def rows(self) -> int:
        """Rows that are trained or evaluated."""
        return int(self.rows_by_length.sum())

    @property
    def tokens(self) -> int:
        """Tokens of these rows."""
        return int(self.rows_by_length @ np.arange(len(self.rows_by_length)))

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 where there is none."""
        found = np.flatnonzero(self.rows_by_length)
        return int(found[-1]) if len(found) else 0

    def quantile(self, share: float) -> int:
        """The length that this share of the rows does not exceed; 0 where there is none."""
        if self.rows == 0:
            return 0
        return int(np.searchsorted(np.cumsum(self.rows_by_length), share * self.rows))

    def add(self, lengths: np.ndarray, supervised: np.ndarray, dropped: np.ndarray) -> None:
        """Count rows."""
        self.duplicates += int(dropped.sum())
        self.supervised += int(supervised[~dropped].sum())
        self.rows_by_length = _added(self.rows_by_length, np.bincount(lengths[~dropped]))


def _added(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of two histograms."""
    total = np.zeros(max(len(one), len(other)), np.int64)
    total[: len(one)] += one
    total[: len(other)] += other
    return total


@dataclass(kw_only=True)
class Totals:
    """What all shards add up to."""

    sides: dict[str, list[SourceTotals]]
    """Side → by source."""
    counts: list[Counter[str]]
    """By source: the figures of `settings.COUNTS`."""
    rejects: list[Reject] = field(default_factory=list)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    unread: dict[int, set[str]] = field(default_factory=dict)
    """By source: columns that no row is read from."""

    def side(self, name: str) -> SourceTotals:
        """One side over all sources."""
        whole = SourceTotals()
        for one in self.sides[name]:
            whole.rows_by_length = _added(whole.rows_by_length, one.rows_by_length)
            whole.supervised += one.supervised
            whole.duplicates += one.duplicates
        return whole

    def count(self, name: str) -> int:
        """One figure over all sources."""
        return sum(counts[name] for counts in self.counts)


def merge(placed: Sequence[Placed], out: Path, sources: int, drop_duplicates: bool) -> Totals:
    """Put the shards' token files into `out`, write the index files there, and add everything up."""
    totals = Totals(
        sides={side: [SourceTotals() for _ in range(sources)] for side in SIDES},
        counts=[Counter() for _ in range(sources)],
    )
    for one in placed:
        _add_counts(totals, one.shard)
    dropped = _duplicates(placed) if drop_duplicates else None
    for side in SIDES:
        (out / side).mkdir()
        for one in placed:
            name = f"{side}/{shard_name(one.shard.number)}.arrow"
            _link(one.root / name, out / name)
        mine = None if dropped is None else dropped[side]
        _write_index(placed, side, out / f"{side}-index.arrow", totals.sides[side], mine)
    return totals


def _add_counts(totals: Totals, shard: Shard) -> None:
    for source, counts in shard.counts.items():
        totals.counts[int(source)].update(counts)
    for source, names in shard.unread.items():
        totals.unread.setdefault(int(source), set()).update(names)
    totals.rejects += shard.rejects[: REJECTS_LISTED - len(totals.rejects)]
    for name, place in shard.first.items():
        totals.first.setdefault(name, place)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, so that the work it is taken from stays whole; copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        # Other file systems, and some that know no links; a copy that cannot be made says so itself.
        shutil.copyfile(source, target)


def _index_parts(placed: Sequence[Placed], side: str) -> Iterator[pa.Table]:
    """The index of each shard in order."""
    for one in placed:
        path = one.root / f"{side}-index" / f"{shard_name(one.shard.number)}.arrow"
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            yield reader.read_all()


def _duplicates(placed: Sequence[Placed]) -> dict[str, np.ndarray]:
    """By side, whether each row's tokens are those of an earlier row; held-out rows come before all training rows.

    So a training row that equals a held-out one goes, too. 8 bytes of digest per row are held at a time: that two
    of 10 million different rows share one has a chance of 1 in 370,000.
    """
    order = tuple(reversed(SIDES))
    parts = {side: [to_numpy(part["digest"]) for part in _index_parts(placed, side)] for side in order}
    rows = {side: sum(map(len, parts[side])) for side in order}
    digests = np.concatenate([part for side in order for part in parts[side]]).astype(np.uint64, copy=False)
    # A stable sort keeps equal digests in order of row: all but the first of a run are duplicates.
    by_digest = np.argsort(digests, kind="stable")
    again = np.flatnonzero(np.diff(digests[by_digest]) == 0) + 1
    dropped = np.zeros(len(digests), bool)
    dropped[by_digest[again]] = True
    return {order[0]: dropped[: rows[order[0]]], order[1]: dropped[rows[order[0]] :]}


def _write_index(
    placed: Sequence[Placed], side: str, path: Path, totals: list[SourceTotals], dropped: np.ndarray | None
) -> None:
    """One record per row of a side's shards, in order, one record batch per shard."""
    start = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, INDEX, options=INDEX_OPTIONS) as writer:
        for part in _index_parts(placed, side):
            end = start + part.num_rows
            out = np.zeros(part.num_rows, bool) if dropped is None else dropped[start:end]
            start = end
            columns = {name: to_numpy(part[name]) for name in ("length", "supervised", "source")}
            for source in np.unique(columns["source"]):
                mine = columns["source"] == source
                totals[source].add(columns["length"][mine], columns["supervised"][mine], out[mine])
            if part.num_rows:
                arrays = map(from_numpy, [*columns.values(), out], INDEX.types)
                writer.write_batch(pa.record_batch(list(arrays), schema=INDEX))
