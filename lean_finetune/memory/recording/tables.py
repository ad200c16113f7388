"""Read a recording that was written as a table: CSV, gzip if the name ends in `.gz`.

The columns are event, address, bytes, where. Rows `segment` (reserved when the recording began) and `block` (live then)
come first, then the events in order. `where` has the frames `file:line:function`, innermost first, divided by ` < `.
"""

import csv
import gzip
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.memory.recording.recording import (
    ACTIONS,
    MAX_ADDRESS,
    MAX_EVENTS,
    MAX_SIZE,
    Event,
    Frame,
    LiveBlock,
    Recording,
    Segment,
    printable,
)

COLUMNS = ["event", "address", "bytes", "where"]


class _Stacks:
    """Every different stack once, by its text."""

    def __init__(self) -> None:
        self.indices: dict[str, int] = {}
        self.frames: list[tuple[Frame, ...]] = []

    def index(self, where: str) -> int | None:
        """The index of a stack; None for an empty text."""
        if not where:
            return None
        if where not in self.indices:
            self.frames.append(tuple(_frame(text) for text in where.split(" < ")))
            self.indices[where] = len(self.indices)
        return self.indices[where]


def _frame(text: str) -> Frame:
    file, line, function = text.rsplit(":", 2)
    return Frame(printable(file), int(line), printable(function))


def read_table(path: Path) -> Recording:
    """Read a recording from a table.

    Raises:
        UserError: it is not such a table; the message names the line.
    """
    try:
        opened = gzip.open(path, "rt", encoding="utf-8", newline="") if path.suffix == ".gz" else path.open(newline="")
        with opened as file:
            return _read(file, path)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as a table ({error}); write it again") from error


def _read(lines: Iterable[str], path: Path) -> Recording:
    rows = csv.DictReader(lines)
    if rows.fieldnames != COLUMNS:
        raise UserError(f"{path}:1: the columns must be {','.join(COLUMNS)}; got {str(rows.fieldnames)[:80]}")
    stacks, events = _Stacks(), []
    segments: list[tuple[int, int]] = []
    blocks: list[LiveBlock] = []
    for number, row in enumerate(rows):
        if number >= MAX_EVENTS:
            raise UserError(f"{path}:{rows.line_num}: at most {MAX_EVENTS:,} rows are read; record fewer events")
        try:
            action, address, count, stack = _values(row, stacks)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}:{rows.line_num}: not a row of a recording ({error}); write it again") from error
        if action == "segment":
            segments.append((address, count))
        elif action == "block":
            blocks.append(LiveBlock(address=address, bytes=count, requested_bytes=count, stack=stack))
        elif action in ACTIONS:
            events.append(Event(action=action, address=address, bytes=count, stack=stack))
        else:
            raise UserError(f"{path}:{rows.line_num}: unknown event {action[:40]!r}; known: {', '.join(ACTIONS)}")
    return Recording(
        name=path.name, segments=_segments(segments, blocks, path), events=tuple(events), stacks=tuple(stacks.frames)
    )


def _values(row: Mapping[str, str], stacks: _Stacks) -> tuple[str, int, int, int | None]:
    address, count = int(row["address"]), int(row["bytes"])
    if not (0 <= address < MAX_ADDRESS and 0 <= count < MAX_SIZE):
        raise ValueError("a number is out of range")
    return row["event"], address, count, stacks.index(row["where"])


def _segments(found: list[tuple[int, int]], blocks: list[LiveBlock], path: Path) -> tuple[Segment, ...]:
    """Put each block into its segment."""
    found.sort()
    starts = [start for start, _ in found]
    inside: list[list[LiveBlock]] = [[] for _ in found]
    for block in sorted(blocks, key=lambda block: block.address):
        place = bisect_right(starts, block.address) - 1
        if place < 0 or block.address + block.bytes > sum(found[place]):
            raise UserError(f"{path}: the block at {block.address} is in no segment; write the table again")
        inside[place].append(block)
    return tuple(
        Segment(address=start, bytes=size, blocks=tuple(inside[place])) for place, (start, size) in enumerate(found)
    )
