"""Shards: the tokens of a block, the files of 64 consecutive blocks, and how all shards are merged."""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.core.atomic_files import link_or_copy, sha256_file, sha256_json, sync, write_json
from lean_finetune.core.regular_files import read_regular
from lean_finetune.data.encode.row_tokenizer import Chunks
from lean_finetune.data.read.arrow_batches import from_numpy, from_texts, to_numpy
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.tally import Tally
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.rows.columns import RowColumns, index_schema

LARGEST_UINT16 = (1 << 16) - 1
DIGEST_BYTES = 8


class SideTokens(NamedTuple):
    """The tokens of one side of the split."""

    rows: pa.RecordBatch
    """Rows in order, of `token_schema`; may be empty."""
    supervised: np.ndarray
    """int32, shape (rows,): trained tokens of each row."""
    digests: np.ndarray
    """uint64, shape (rows,): hash of each row's ids, spans and what it carries; empty unless `drop_duplicates`."""
    carried: tuple[tuple[pa.Field, pa.Array], ...] = ()
    """Columns of the index of what rows carry besides tokens."""


class BlockTokens(NamedTuple):
    """The tokens of one block, and the counts of its rows."""

    train: SideTokens
    heldout: SideTokens
    tally: Tally


def token_schema(vocab_size: int, max_length: int, files: int, attached: Iterable[RowColumns] = ()) -> pa.Schema:
    """Columns of the token files. Ids, positions and files take two bytes each where the largest value fits.

    `attached` is what rows carry besides tokens.
    """
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(_narrowest(vocab_size - 1)), nullable=False),
            pa.field("loss_spans", pa.list_(_narrowest(max_length)), nullable=False),
            pa.field("family", pa.string()),
            pa.field("source_file", _narrowest(files - 1), nullable=False),
            pa.field("source_row", pa.uint32(), nullable=False),  # read_blocks refuses files with more rows.
            *(field for one in attached for field in one.fields),
        ]
    )


def _narrowest(largest: int) -> pa.DataType:
    return pa.uint16() if largest <= LARGEST_UINT16 else pa.int32()


def record_batch(
    schema: pa.Schema,
    chunks: Chunks,
    ids: np.ndarray,
    families: Sequence[str | None],
    source_file: int,
    source_rows: np.ndarray,
    carried: Iterable[pa.Array] = (),
) -> pa.RecordBatch:
    """The chunks of a block as one record batch of `token_schema`.

    `chunks.starts` are indices in `ids`, int32. `families` and `source_rows`, uint32, have one item per encoded row.
    `carried` are columns of what the chunks carry besides tokens.
    """
    starts, ends = chunks.starts.tolist(), (chunks.starts + chunks.lengths).tolist()
    parts = [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    values = np.concatenate(parts) if parts else ids[:0]
    span_counts = np.bincount(chunks.span_chunks, minlength=len(chunks.rows))
    columns = [
        _lists(values, chunks.lengths, schema.field("input_ids").type),
        _lists(chunks.spans.ravel(), 2 * span_counts, schema.field("loss_spans").type),
        from_texts([families[row] for row in chunks.rows.tolist()]),
        from_numpy(np.full(len(chunks.rows), source_file), schema.field("source_file").type),
        from_numpy(source_rows[chunks.rows], schema.field("source_row").type),
        *carried,
    ]
    return pa.record_batch(columns, schema=schema)


def digests(
    batch: pa.RecordBatch, kind: RowKind = RowKind.ANSWER, carried: Iterable[Sequence[bytes]] = ()
) -> np.ndarray:
    """64-bit hash of each row's ids, spans and what it carries, uint64. Equal rows have equal hashes.

    `carried` has, for each attachment, the bytes of every row. Of rows of the data that are several rows of tokens, the
    trained ones are hashed together, and the number of each.
    """
    made = [blake2b(digest_size=DIGEST_BYTES) for _ in range(len(batch))]
    for column in (batch.column("input_ids"), batch.column("loss_spans")):
        values = to_numpy(column.flatten()).data.cast("B")
        offsets = (to_numpy(column.offsets) * column.type.value_type.byte_width).tolist()
        for digest, start, end in zip(made, offsets, offsets[1:], strict=False):
            digest.update(values[start:end])
    for of_rows in carried:
        for digest, value in zip(made, of_rows, strict=True):
            digest.update(value)
    found = [digest.digest() for digest in made]
    if kind.token_rows > 1:
        starts = range(0, len(found), kind.token_rows)
        units = [b"".join(found[start : start + kind.unit]) for start in starts]
        found = [
            blake2b(unit + bytes([number]), digest_size=DIGEST_BYTES).digest()
            for unit in units
            for number in range(kind.token_rows)
        ]
    return np.frombuffer(b"".join(found), np.dtype("<u8"))


def _lists(values: np.ndarray, lengths: np.ndarray, list_type: pa.ListType) -> pa.ListArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = from_numpy(values, list_type.value_type)
    return pa.ListArray.from_arrays(from_numpy(offsets, pa.int32()), flat, type=list_type)


# Files of a shard: the tokens of 64 consecutive blocks, and a marker that makes them valid.
#
# The marker is written last, atomically, with the sizes and hashes of the shard's files. A shard without
# a marker is made again.

BLOCKS_PER_SHARD = 64
SIDES = ("train", "heldout")
SHARD_INDEX = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("source", pa.uint16(), nullable=False),
        pa.field("digest", pa.uint64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The content of a shard's marker."""

    key: str
    """Of everything that decides the bytes, see `token_inputs`."""
    number: int
    blocks: int
    input_crc32: int
    """Of the blocks' payloads. A rerun reads them again and compares."""
    files: dict[str, dict[str, Any]]
    """Size and hash by path below the root: {"bytes": …, "sha256": …}."""
    tally: Tally


_SHARD = TypeAdapter(Shard)


def shard_name(number: int) -> str:
    """File name of a shard. Names sort in the order of shards up to 100,000 shards (6 TB of rows)."""
    return f"{number:05d}"


def shard_paths(number: int) -> set[str]:
    """The paths of a shard's files below the root."""
    return {f"{side}{kind}/{shard_name(number)}.arrow" for side in SIDES for kind in ("", "-index")}


def shard_of(block: RowBlock) -> int:
    """The number of the shard that a block belongs to."""
    return block.number // BLOCKS_PER_SHARD


def _marker(root: Path, number: int) -> Path:
    return root / f"done/{shard_name(number)}.json"


def finished_shard(root: Path, number: int, key: str) -> Shard | None:
    """The shard if it was finished with this key and is undamaged, else None."""
    try:
        values = json.loads(read_regular(_marker(root, number)))
        is_intact = values.pop("sha256") == sha256_json(values) and values["key"] == key
        # Other names are of no shard: nothing outside of `root` is read.
        is_intact = is_intact and set(values["files"]) == shard_paths(number)
        if is_intact and all(_describe(root / name) == expected for name, expected in values["files"].items()):
            return _SHARD.validate_python(values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # Absent, damaged, no regular file, or of another version.
    return None


def _describe(path: Path) -> dict[str, Any]:
    """The size and hash of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def discard_all(root: Path) -> None:
    """Delete every marker below `root`, so that its shards are made again."""
    for marker in (root / "done").glob("*.json"):
        marker.unlink()


def write_shard(root: Path, number: int, key: str, results: Iterable[tuple[RowBlock, BlockTokens]]) -> Shard:
    """Write a shard's files below `root`, sync them to disk, then write its marker. After an error there is none."""
    marker = _marker(root, number)
    marker.unlink(missing_ok=True)  # It must never vouch for new files.
    blocks = crc = 0
    tally = Tally()
    writers: dict[str, ArrowWriter] = {}
    with ExitStack() as sinks:
        for block, tokens in results:
            blocks += 1
            crc = zlib.crc32(block.payload, crc)
            tally.add(tokens.tally)
            for side, made in zip(SIDES, (tokens.train, tokens.heldout), strict=True):
                for directory, batch in ((side, made.rows), (f"{side}-index", _index(made, block.source))):
                    name = f"{directory}/{shard_name(number)}.arrow"
                    if name not in writers:
                        (root / directory).mkdir(parents=True, exist_ok=True)
                        # A file of an earlier run may be linked to a published one, and a pipe waits for a reader.
                        (root / name).unlink(missing_ok=True)
                        writers[name] = sinks.enter_context(ArrowWriter(root / name, batch.schema))
                    if batch.num_rows:
                        writers[name].write(batch)
    for name in writers:
        sync(root / name)
    files = {name: _describe(root / name) for name in sorted(writers)}
    shard = Shard(key=key, number=number, blocks=blocks, input_crc32=crc, files=files, tally=tally)
    values = _SHARD.dump_python(shard, mode="json")
    write_json(marker, {**values, "sha256": sha256_json(values)})
    return shard


def _index(tokens: SideTokens, source: int) -> pa.RecordBatch:
    """One record for each row."""
    rows, digests = tokens.rows, tokens.digests
    columns = [
        from_numpy(np.diff(to_numpy(rows.column("input_ids").offsets)), pa.int32()),
        from_numpy(tokens.supervised, pa.int32()),
        from_numpy(np.full(rows.num_rows, source), pa.uint16()),
        from_numpy(digests, pa.uint64()) if len(digests) else pa.nulls(rows.num_rows, pa.uint64()),
    ]
    schema = pa.schema([*SHARD_INDEX, *(field for field, _ in tokens.carried)])
    return pa.record_batch([*columns, *(values for _, values in tokens.carried)], schema=schema)


# Merging of shards: token files, index files, duplicates and totals, without a Python object per row.

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
        """Number of rows of tokens: two for a pair."""
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
    carried: list[dict[str, int]] = field(default_factory=list)
    """For each attachment, by side: rows that have a value (`RowColumns.published`)."""

    def side(self, name: str) -> SourceTotals:
        """One side over all sources."""
        sources = self.sides[name]
        return SourceTotals(
            rows_by_length=np.sum([one.rows_by_length for one in sources], axis=0),
            supervised=sum(one.supervised for one in sources),
            duplicates=sum(one.duplicates for one in sources),
        )

    @property
    def rows(self) -> dict[str, int]:
        """By side, rows of tokens without duplicates."""
        return {name: self.side(name).rows for name in self.sides}

    @property
    def counts(self) -> Counter[str]:
        """The counts over all sources."""
        return sum(self.tally.counts.values(), Counter())


def merge(
    root: Path,
    shards: Sequence[Shard],
    out: Path,
    sources: int,
    max_length: int,
    drop_duplicates: bool,
    kind: RowKind = RowKind.ANSWER,
    attached: Sequence[RowColumns] = (),
) -> Totals:
    """Link the token files of the shards below `root` into `out`, write the index files, and compute the totals.

    Rows of tokens that are not trained are not in the totals. `attached` is what rows carry besides tokens.
    """
    no_rows = np.zeros(max_length + 1, np.int64)
    totals = Totals(
        sides={side: [SourceTotals(rows_by_length=no_rows.copy()) for _ in range(sources)] for side in SIDES},
        carried=[{} for _ in attached],
    )
    schema = index_schema(INDEX.with_metadata(kind.metadata or None), attached)
    for shard in shards:
        totals.tally.add(shard.tally)
    dropped = _duplicates(root, shards) if drop_duplicates else None
    for side in SIDES:
        (out / side).mkdir()
        for shard in shards:
            name = f"{side}/{shard_name(shard.number)}.arrow"
            link_or_copy(root / name, out / name)
        side_dropped = None if dropped is None else dropped[side]
        index = _index_parts(root, shards, side)
        _write_index(index, out / f"{side}-index.arrow", schema, totals.sides[side], side_dropped, kind)
        for one, found in zip(attached, totals.carried, strict=True):
            found[side] = one.published(root, out, out / side, side_dropped)
    return totals


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


def _write_index(
    index: Iterable[pa.Table],
    path: Path,
    schema: pa.Schema,
    totals: list[SourceTotals],
    dropped: np.ndarray | None,
    kind: RowKind,
) -> None:
    """Write one record for each row of a side, with one record batch for each shard of `index`.

    Trained rows count in the totals.
    """
    start, step = 0, kind.token_rows // kind.unit
    with ArrowWriter(path, schema, INDEX_OPTIONS) as writer:
        for part in index:
            end = start + part.num_rows
            part_dropped = np.zeros(part.num_rows, bool) if dropped is None else dropped[start:end]
            start = end
            columns = {name: to_numpy(part[name]) for name in ("length", "supervised", "source")}
            for source in np.unique(columns["source"]):
                rows = np.flatnonzero(columns["source"] == source)
                rows = rows[rows % step == 0]
                totals[source].add(columns["length"][rows], columns["supervised"][rows], part_dropped[rows])
            if part.num_rows:
                arrays = [*map(from_numpy, [*columns.values(), part_dropped], INDEX.types)]
                arrays += [part[name].combine_chunks() for name in schema.names[len(INDEX) :]]
                writer.write(pa.record_batch(arrays, schema=schema))
