"""What the readers of formats share: a stretch of whole rows, its bounds, and how it is cut short."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import pyarrow as pa

BLOCK_BYTES = 1 << 20
# A larger row is a mistake more often than an example; reading past it takes no more memory than this.
MAX_ROW_BYTES = 64 << 20
TOO_LONG = f"the row is longer than {MAX_ROW_BYTES >> 20} MiB; shorten or remove it"

Read = Callable[[int], bytes]
"""As many bytes as are asked for, or fewer at the end alone."""


class Stretch(NamedTuple):
    """A `Block` that does not know its place among all blocks yet; see there."""

    kind: Literal["lines", "values", "text", "arrow"]
    payload: bytes
    first_row: int
    ends: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    faults: tuple[tuple[int, int, str], ...] = ()


def count_rows(stretch: Stretch) -> int:
    """Its rows: lines that are blank are none."""
    if stretch.kind in ("lines", "text"):
        payload_rows = sum(1 for line in stretch.payload.split(b"\n") if line.strip())
    elif stretch.kind == "values":
        payload_rows = len(stretch.ends)
    else:
        payload_rows = pa.ipc.open_stream(stretch.payload).read_next_batch().num_rows
    return payload_rows + len(stretch.faults)


def first_rows(stretch: Stretch, rows: int) -> Stretch:
    """Its first `rows` rows; there are more than that, and at least one is asked for."""
    if stretch.kind in ("lines", "text"):
        at = 0
        for _ in range(rows):
            line = b""
            while not line.strip():
                end = stretch.payload.index(b"\n", at) + 1
                line, at = stretch.payload[at:end], end
        return stretch._replace(payload=stretch.payload[:at])
    if stretch.kind == "values":
        ends = stretch.ends[:rows]
        return stretch._replace(payload=stretch.payload[: ends[-1]], ends=ends, lines=stretch.lines[:rows])
    faults = tuple(fault for fault in stretch.faults if fault[0] < stretch.first_row + rows)
    kept = rows - len(faults)
    batch = pa.ipc.open_stream(stretch.payload).read_next_batch().slice(0, kept)
    return stretch._replace(payload=to_payload(batch), lines=stretch.lines[:kept], faults=faults)


def to_payload(batch: pa.RecordBatch) -> bytes:
    """A record batch as an IPC stream of its own."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
