"""Blocks and a tokenizer of bytes: what pool, shards and merge see, without a source or a model."""

import os
import signal
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.block_tokens import COUNTS, BlockTokens

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.uint16()), nullable=False),
        pa.field("loss_spans", pa.list_(pa.uint16()), nullable=False),
        pa.field("family", pa.string()),
        pa.field("source_file", pa.uint16(), nullable=False),
        pa.field("source_row", pa.uint32(), nullable=False),
    ]
)


def text_blocks(count: int, rows: int = 3, source_of=lambda number: 0) -> Iterator[RowBlock]:
    """Blocks of `rows` lines each."""
    for number in range(count):
        lines = [f"row {number * rows + k} " + "x" * (k % 7) for k in range(rows)]
        source = source_of(number)
        yield RowBlock(
            number=number,
            source=source,
            file=source,
            kind="text",
            payload="\n".join(lines).encode(),
            first_row=number * rows,
        )


def tokenize_bytes(block: RowBlock) -> BlockTokens:
    """Each line's bytes as ids, all of them trained; a fifth of the lines, by hash, are held out; `bad` is no row.

    The line `die` kills its process, `slow` takes a while.
    """
    kept: dict[bool, list[tuple[int, bytes]]] = {False: [], True: []}
    counts = dict.fromkeys(COUNTS, 0)
    rejects: list[tuple[int, int, str]] = []
    first: dict[str, tuple[int, int]] = {}
    for k, line in enumerate(block.payload.split(b"\n")):
        row = block.first_row + k
        counts["rows"] += 1
        if line == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if line == b"slow":
            time.sleep(0.05)
        if line == b"bad":
            counts["bad_rows"] += 1
            rejects.append((row, row + 1, "is bad"))
            first.setdefault("bad_rows", (row, row + 1))
            continue
        kept[zlib.crc32(line) % 5 == 0].append((row, line))
    train, heldout = (_batch(block, kept[side]) for side in (False, True))
    return BlockTokens(
        train=train[0],
        heldout=heldout[0],
        train_supervised=train[1],
        heldout_supervised=heldout[1],
        train_digests=train[2],
        heldout_digests=heldout[2],
        counts=counts,
        rejects=rejects,
        first=first,
    )


def _batch(block: RowBlock, rows: list[tuple[int, bytes]]) -> tuple[pa.RecordBatch, np.ndarray, np.ndarray]:
    columns = [
        pa.array([list(line) for _, line in rows], pa.list_(pa.uint16())),
        pa.array([[0, len(line)] for _, line in rows], pa.list_(pa.uint16())),
        pa.nulls(len(rows), pa.string()),
        pa.array([block.file] * len(rows), pa.uint16()),
        pa.array([row for row, _ in rows], pa.uint32()),
    ]
    supervised = np.array([len(line) - 1 for _, line in rows], np.int32)
    digests = np.array([zlib.crc32(line) for _, line in rows], np.uint64)
    return pa.record_batch(columns, schema=SCHEMA), supervised, digests


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of an Arrow file."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all().to_pylist()


def make_byte_tokenizer():
    """What a worker calls once."""
    return tokenize_bytes
