"""JSON Lines and plain text, cut at line ends as fast as memory can be read: nothing is parsed here."""

from collections.abc import Iterator
from typing import Literal

from lean_finetune.data.read.row_range import MAX_ROW_BYTES, TOO_LONG, Read, Stretch


def cut_lines(read: Read, kind: Literal["lines", "text"], block_bytes: int) -> Iterator[Stretch]:
    """Whole lines of about `block_bytes`; a line longer than MAX_ROW_BYTES is a fault and is not kept."""
    number = 0
    held: list[bytes] = []
    held_bytes = 0
    too_long = False
    while chunk := read(block_bytes):
        first_end = chunk.find(b"\n")
        if held_bytes + (len(chunk) if first_end < 0 else first_end) > MAX_ROW_BYTES:
            too_long, held, held_bytes = True, [], 0
        if first_end < 0:
            if not too_long:
                held.append(chunk)
                held_bytes += len(chunk)
            continue
        if too_long:
            yield Stretch(kind, b"", number, faults=((number, number + 1, TOO_LONG),))
            number, too_long, chunk = number + 1, False, chunk[first_end + 1 :]
        end = chunk.rfind(b"\n") + 1
        held.append(chunk[:end])
        if payload := b"".join(held):
            yield Stretch(kind, payload, number)
            number += payload.count(b"\n")
        held, held_bytes = [chunk[end:]], len(chunk) - end
    if too_long:
        yield Stretch(kind, b"", number, faults=((number, number + 1, TOO_LONG),))
    elif payload := b"".join(held):
        yield Stretch(kind, payload + b"\n", number)
