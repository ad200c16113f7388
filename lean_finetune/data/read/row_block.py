"""A bounded block of rows: what the readers make of a file, and what workers turn into tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa

BLOCK_BYTES = 1 << 20
# A larger row is more often a mistake than an example. Skipping it needs no more memory than this.
MAX_ROW_BYTES = 64 << 20
TOO_LONG = f"the row is longer than {MAX_ROW_BYTES >> 20} MiB; shorten or remove it"
MAX_DEPTH = 200
"""Lists and objects inside each other in a row: what reads it needs several calls of Python for each."""

Read = Callable[[int], bytes]
"""Reads the given number of bytes, fewer only at the end of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Complete rows of one file, not parsed yet. How a file is split depends on its bytes alone."""

    kind: Literal["lines", "values", "text", "arrow"]
    """lines: JSON Lines | values: JSON values of an array | text: plain lines | arrow: a record batch (IPC stream)."""
    payload: bytes
    first_row: int
    """Number of its first row in the file, from 0. In lines and text, empty lines count."""
    ends: tuple[int, ...] = ()
    """values: end of each value in the payload."""
    lines: tuple[int, ...] = ()
    """values, and arrow of a CSV: line of each row's first character, from 1."""
    faults: tuple[tuple[int, int, str], ...] = ()
    """(number, line, fault) of rows that are not in the payload, ascending: too long, or with too many cells."""
    number: int = 0
    """Index among all blocks of the data lock. The file's reader does not set it, nor `source` and `file`."""
    source: int = 0
    """Index of its source in the data lock."""
    file: int = 0
    """Index of its file among all files of the data lock."""
    limit: int | None = None
    """Only so many of its first rows are used. None means all."""

    def count_rows(self) -> int:
        """Rows of the block, without blank lines and without its limit."""
        if self.kind in ("lines", "text"):
            payload_rows = sum(1 for line in self.payload.split(b"\n") if line.strip())
        elif self.kind == "values":
            payload_rows = len(self.ends)
        else:
            payload_rows = from_payload(self.payload).num_rows
        return payload_rows + len(self.faults)


class RawRow(NamedTuple):
    """One row of a block."""

    number: int
    """In its file, from 0."""
    line: int
    """Line in the file, from 1; where the format has no lines, `number` + 1."""
    value: dict[str, Any] | None
    """None when it has a fault."""
    fault: str | None
    """The rule that the row breaks, and the remedy."""


def to_payload(batch: pa.RecordBatch) -> bytes:
    """A record batch as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def from_payload(payload: bytes) -> pa.RecordBatch:
    """The record batch of `to_payload`."""
    return pa.ipc.open_stream(payload).read_next_batch()
