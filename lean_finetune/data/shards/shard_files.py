"""Files of a shard: the tokens of 64 consecutive blocks, and a marker that makes them valid.

The marker is written last, atomically, with the sizes and hashes of the shard's files. A shard without
a marker is made again.
"""

import json
import os
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from lean_finetune.core.atomic_files import sha256_file, sha256_json, write_json
from lean_finetune.data.read.arrow_arrays import from_numpy, to_numpy
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.block_tokens import MAX_UNREAD_COLUMNS, BlockTokens

BLOCKS_PER_SHARD = 64
SIDES = ("train", "heldout")
MAX_REJECTS = 100
"""Rejected rows that are listed: a broken source would fill the list with all its rows."""
SHARD_INDEX = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("source", pa.uint16(), nullable=False),
        pa.field("digest", pa.uint64()),
    ]
)


class Reject(NamedTuple):
    """A row that was not used."""

    file: int
    row: int
    line: int
    reason: str


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
    counts: dict[str, dict[str, int]]
    """By index of the source as text (a JSON key): counts by name."""
    rejects: list[Reject]
    """The first rows that were not used, at most MAX_REJECTS."""
    first: dict[str, tuple[int, int]]
    """By count: (file, line) of its first row."""
    unread: dict[str, list[str]]
    """By index of the source as text: columns that its format does not read."""


def shard_name(number: int) -> str:
    """File name of a shard. Names sort in the order of shards up to 100,000 shards (6 TB of rows)."""
    return f"{number:05d}"


def shard_of(block: RowBlock) -> int:
    """The number of the shard that a block belongs to."""
    return block.number // BLOCKS_PER_SHARD


def marker_name(number: int) -> str:
    """Path of a shard's marker below its root."""
    return f"done/{shard_name(number)}.json"


def read_marker(root: Path, number: int) -> Shard | None:
    """A shard's marker, without checking the shard's files; None where there is no valid marker."""
    try:
        values = json.loads((root / marker_name(number)).read_text(encoding="utf-8"))
        if values.pop("sha256") != sha256_json(values):
            return None
        rejects = [Reject(*one) for one in values.pop("rejects")]
        first = {name: (file, line) for name, (file, line) in values.pop("first").items()}
        return Shard(**values, rejects=rejects, first=first)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None  # Absent, damaged, or of another version: the shard is made again.


def is_complete(root: Path, files: dict[str, dict[str, Any]]) -> bool:
    """Whether all these files are below `root` with their recorded size and hash."""
    for name, expected in files.items():
        path = root / name
        if not path.is_file() or path.stat().st_size != expected["bytes"] or sha256_file(path) != expected["sha256"]:
            return False
    return True


def finished_shard(root: Path, number: int, key: str) -> Shard | None:
    """The shard if it was finished with this key and is undamaged, else None."""
    shard = read_marker(root, number)
    return shard if shard is not None and shard.key == key and is_complete(root, shard.files) else None


def discard_all(root: Path) -> None:
    """Delete every marker below `root`, so that its shards are made again."""
    for marker in (root / "done").glob("*.json"):
        marker.unlink()


@dataclass(kw_only=True)
class _Tally:
    """Sums over a shard's blocks."""

    blocks: int = 0
    input_crc32: int = 0
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    rejects: list[Reject] = field(default_factory=list)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    unread: dict[int, set[str]] = field(default_factory=dict)

    def add(self, block: RowBlock, tokens: BlockTokens) -> None:
        self.blocks += 1
        self.input_crc32 = zlib.crc32(block.payload, self.input_crc32)
        self.counts.setdefault(block.source, Counter()).update(tokens.counts)
        self.unread.setdefault(block.source, set()).update(tokens.unread)
        room = MAX_REJECTS - len(self.rejects)
        self.rejects += [Reject(block.file, row, line, reason) for row, line, reason in tokens.rejects[:room]]
        for name, (_, line) in tokens.first.items():
            self.first.setdefault(name, (block.file, line))


class ShardWriter:
    """Context manager that writes one shard's files. `finish` writes the marker; after an error there is none."""

    def __init__(self, root: Path, number: int, key: str):
        """Write below `root`. An old marker is deleted first, so that it never vouches for new files."""
        (root / marker_name(number)).unlink(missing_ok=True)
        self._root, self._number, self._key = root, number, key
        self._files: dict[str, _ArrowFile] = {}
        self._tally = _Tally()

    def __enter__(self) -> "ShardWriter":
        """Return self."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the files."""
        for file in self._files.values():
            file.abandon()

    def add(self, block: RowBlock, tokens: BlockTokens) -> None:
        """Append a block's tokens."""
        self._tally.add(block, tokens)
        sides = (
            (tokens.train, tokens.train_supervised, tokens.train_digests),
            (tokens.heldout, tokens.heldout_supervised, tokens.heldout_digests),
        )
        for side, (rows, supervised, digests) in zip(SIDES, sides, strict=True):
            self._file(side, rows.schema).write(rows)
            index = [
                from_numpy(np.diff(to_numpy(rows.column("input_ids").offsets)), pa.int32()),
                from_numpy(supervised, pa.int32()),
                from_numpy(np.full(rows.num_rows, block.source), pa.uint16()),
                from_numpy(digests, pa.uint64()) if len(digests) else pa.nulls(rows.num_rows, pa.uint64()),
            ]
            self._file(f"{side}-index", SHARD_INDEX).write(pa.record_batch(index, schema=SHARD_INDEX))

    def _file(self, directory: str, schema: pa.Schema) -> "_ArrowFile":
        name = f"{directory}/{shard_name(self._number)}.arrow"
        if name not in self._files:
            self._files[name] = _ArrowFile(self._root / name, schema)
        return self._files[name]

    def finish(self) -> Shard:
        """Sync the files to disk, then write the marker."""
        files = {}
        for name, file in sorted(self._files.items()):
            file.close()
            files[name] = {"bytes": file.path.stat().st_size, "sha256": sha256_file(file.path)}
        tally = self._tally
        shard = Shard(
            key=self._key,
            number=self._number,
            blocks=tally.blocks,
            input_crc32=tally.input_crc32,
            files=files,
            counts={str(source): dict(sorted(counts.items())) for source, counts in sorted(tally.counts.items())},
            rejects=tally.rejects,
            first=tally.first,
            unread={str(source): sorted(names)[:MAX_UNREAD_COLUMNS] for source, names in sorted(tally.unread.items())},
        )
        values = asdict(shard)
        write_json(self._root / marker_name(self._number), {**values, "sha256": sha256_json(values)})
        return shard


class _ArrowFile:
    """An Arrow IPC file, written batch by batch."""

    def __init__(self, path: Path, schema: pa.Schema):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch unless it is empty."""
        if batch.num_rows:
            self._writer.write_batch(batch)

    def close(self) -> None:
        """Write the footer and sync the file to disk."""
        self._writer.close()
        self._sink.close()
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def abandon(self) -> None:
        """Close the file without a footer."""
        self._sink.close()
