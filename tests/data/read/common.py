"""Files of a test in binary formats, their lock, and their rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lean_finetune.core.atomic_files import sha256_file
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.row_block import BLOCK_BYTES, RawRow, RowBlock
from lean_finetune.data.read.source_blocks import read_blocks


def source(*paths: Path, rows: int | None = None) -> dict[str, Any]:
    """The lock's entry of files in one directory."""
    files = [{"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths]
    kind, given = ("file", paths[0]) if len(paths) == 1 else ("directory", paths[0].parent)
    return {"source": str(given), "kind": kind, "revision": None, "rows": rows, "files": files}


def lock_of(*sources: dict[str, Any]) -> dict[str, Any]:
    return {"schema": 2, "sources": list(sources)}


def blocks_of(lock: dict[str, Any], max_rows: int | None = None, block_bytes: int = BLOCK_BYTES) -> list[RowBlock]:
    return list(read_blocks(lock, max_rows=max_rows, progress=lambda _: None, block_bytes=block_bytes))


def rows_of(path: Path, max_rows: int | None = None, block_bytes: int = BLOCK_BYTES) -> list[RawRow]:
    """Every row of one file."""
    return [row for block in blocks_of(lock_of(source(path)), max_rows, block_bytes) for row in decode(block)]


def values_of(path: Path, max_rows: int | None = None, block_bytes: int = BLOCK_BYTES) -> list[Any]:
    """The rows' values; a fault fails the test."""
    rows = rows_of(path, max_rows, block_bytes)
    assert [row.fault for row in rows if row.fault] == []
    return [row.value for row in rows]


def parquet(rows: list[dict] | pa.Table) -> bytes:
    table = pa.Table.from_pylist(rows) if isinstance(rows, list) else rows
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def arrow(table: pa.Table, is_file: bool) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()
