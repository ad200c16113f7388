"""JSON Lines and plain text, split at line ends without parsing."""

from collections.abc import Iterator
from typing import Literal

from lean_finetune.data.read.row_block import MAX_ROW_BYTES, TOO_LONG, Read, RowBlock


def read_lines(read: Read, kind: Literal["lines", "text"], block_bytes: int) -> Iterator[RowBlock]:
    """Blocks of complete lines of about `block_bytes`. A line longer than MAX_ROW_BYTES is skipped and is a fault."""
    number = 0
    for content in complete_lines(read, block_bytes):
        faults = ((number, number + 1, TOO_LONG),) if content is None else ()
        yield RowBlock(kind=kind, payload=content or b"", first_row=number, faults=faults)
        number += 1 if content is None else content.count(b"\n")


def complete_lines(read: Read, block_bytes: int) -> Iterator[bytes | None]:
    """Complete lines of about `block_bytes` together, each with its line end; None for a line over MAX_ROW_BYTES."""
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
            yield None
            is_too_long, chunk = False, chunk[first_end + 1 :]
        end = chunk.rfind(b"\n") + 1
        parts.append(chunk[:end])
        if content := b"".join(parts):
            yield content
        parts, parts_bytes = [chunk[end:]], len(chunk) - end
    if is_too_long:
        yield None
    elif content := b"".join(parts):
        yield content + b"\n"
