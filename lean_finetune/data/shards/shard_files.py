"""Files of a shard: the tokens of 64 consecutive blocks, and a marker that makes them valid.

The marker is written last, atomically, with the sizes and hashes of the shard's files. A shard without
a marker is made again.
"""

import json
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from lean_finetune.core.atomic_files import sha256_file, sha256_json, sync, write_json
from lean_finetune.data.read.arrow_batches import from_numpy, to_numpy
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.block_tokens import BlockTokens, SideTokens, Tally

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


def shard_of(block: RowBlock) -> int:
    """The number of the shard that a block belongs to."""
    return block.number // BLOCKS_PER_SHARD


def _marker(root: Path, number: int) -> Path:
    return root / f"done/{shard_name(number)}.json"


def finished_shard(root: Path, number: int, key: str) -> Shard | None:
    """The shard if it was finished with this key and is undamaged, else None."""
    try:
        values = json.loads(_marker(root, number).read_text(encoding="utf-8"))
        is_intact = values.pop("sha256") == sha256_json(values) and values["key"] == key
        if is_intact and all(_describe(root / name) == expected for name, expected in values["files"].items()):
            return _SHARD.validate_python(values)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        pass  # Absent, damaged, or of another version.
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
    writers: dict[str, Any] = {}
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
                        sink = sinks.enter_context(pa.OSFile(str(root / name), "wb"))
                        writers[name] = pa.ipc.new_file(sink, batch.schema)
                    if batch.num_rows:
                        writers[name].write_batch(batch)
        for writer in writers.values():
            writer.close()  # Writes the footer.
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
    return pa.record_batch(columns, schema=SHARD_INDEX)
