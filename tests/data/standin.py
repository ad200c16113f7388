"""Blocks of text and a tokenizer of bytes, for tests of the pool, of shards and of their merge."""

import os
import signal
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.shard_files import BlockTokens, SideTokens, token_schema
from lean_finetune.data.shards.tally import Reject, Tally

SCHEMA = token_schema(vocab_size=256, max_length=64, files=2)


def text_blocks(count: int, rows: int = 3, source_of=lambda number: 0) -> Iterator[RowBlock]:
    """Blocks of `rows` lines each."""
    for number in range(count):
        lines = [f"row {number * rows + k} " + "x" * (k % 7) for k in range(rows)]
        source, first_row = source_of(number), number * rows
        payload = "\n".join(lines).encode()
        yield RowBlock(kind="text", payload=payload, first_row=first_row, number=number, source=source, file=source)


def is_heldout(line: bytes) -> bool:
    return zlib.crc32(line) % 5 == 0


def tokenize_bytes(block: RowBlock, is_heldout=is_heldout) -> BlockTokens:
    """Each line's bytes as ids, all trained. The line `bad` is rejected, `die` kills its process, `slow` waits."""
    sides: dict[bool, list[tuple[int, bytes]]] = {False: [], True: []}
    tally = Tally()
    for row, line in enumerate(block.payload.split(b"\n"), start=block.first_row):
        if line == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if line == b"slow":
            time.sleep(0.05)
        tally.counts[block.source].update({"rows": 1, "bad_rows": line == b"bad"})
        if line == b"bad":
            tally.rejects.append(Reject(block.file, row, row + 1, "is bad"))
        else:
            sides[is_heldout(line)].append((row, line))
    return BlockTokens(_side(block, sides[False]), _side(block, sides[True]), tally)


def _side(block: RowBlock, rows: list[tuple[int, bytes]]) -> SideTokens:
    lines = [line for _, line in rows]
    columns = [[list(line) for line in lines], [[0, len(line)] for line in lines], [None] * len(rows)]
    columns += [[block.file] * len(rows), [row for row, _ in rows]]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    supervised = np.array([len(line) - 1 for line in lines], np.int32)
    digests = np.array([zlib.crc32(line) for line in lines], np.uint64)
    return SideTokens(pa.record_batch(arrays, schema=SCHEMA), supervised, digests)


def make_byte_tokenizer():
    """What a worker calls once."""
    return tokenize_bytes
