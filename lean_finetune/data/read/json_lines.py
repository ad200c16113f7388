"""JSON Lines and plain text, split at line ends without parsing."""

from collections.abc import Iterator
from typing import Literal

from lean_finetune.data.read.row_block import MAX_ROW_BYTES, TOO_LONG, Read, RowBlock


def read_lines(read: Read, kind: Literal["lines", "text"], block_bytes: int) -> Iterator[RowBlock]:
    """Blocks of complete lines of about `block_bytes`. A line longer than MAX_ROW_BYTES is skipped and is a fault."""
    number = 0
    parts: list[bytes] = []
    parts_bytes = 0
    is_too_long = False
    while chunk := read(block_bytes):
        first_end = chunk.find(b"\n")
        if parts_bytes + (len(chunk) if first_end < 0 else first_end) > MAX_ROW_BYTES:
            is_too_long, parts, parts_bytes = True, [], 0
        if first_end < 0:
            if not is_too_long:
                parts.append(chunk)
                parts_bytes += len(chunk)
            continue
        if is_too_long:
            yield RowBlock(kind=kind, payload=b"", first_row=number, faults=((number, number + 1, TOO_LONG),))
            number, is_too_long, chunk = number + 1, False, chunk[first_end + 1 :]
        end = chunk.rfind(b"\n") + 1
        parts.append(chunk[:end])
        if payload := b"".join(parts):
            yield RowBlock(kind=kind, payload=payload, first_row=number)
            number += payload.count(b"\n")
        parts, parts_bytes = [chunk[end:]], len(chunk) - end
    if is_too_long:
        yield RowBlock(kind=kind, payload=b"", first_row=number, faults=((number, number + 1, TOO_LONG),))
    elif payload := b"".join(parts):
        yield RowBlock(kind=kind, payload=payload + b"\n", first_row=number)
