"""A recording of PyTorch's CUDA caching allocator on one device: what was reserved at its beginning, and every event.

`torch.cuda.memory._record_memory_history` makes one, and `torch.cuda.memory._dump_snapshot` writes it: `snapshot_file`
reads that. Here recordings are read that were written as a table: CSV, gzip if the name ends in `.gz`.

The columns are event, address, bytes, where. Rows `segment` (reserved when the recording began) and `block` (live then)
come first, then the events in order. `where` has the frames `file:line:function`, innermost first, divided by ` < `.
"""

import csv
import gzip
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from cuda_memory.errors import UserError
from cuda_memory.units import MIB, readable_size

Action = Literal[
    "alloc",  # A request was served. `bytes` is what it asked for.
    "free_requested",  # A tensor was freed. Its block may still be in use on another stream.
    "free_completed",  # Its block is free.
    "segment_alloc",  # A segment of fixed size was reserved. It stands before the allocation that caused it.
    "segment_free",  # A segment of fixed size was released to the driver.
    "segment_map",  # Memory was mapped into a segment that expands.
    "segment_unmap",  # Memory of a segment that expands was released.
    "oom",  # A request failed. `bytes` is what it asked for, `address` what the driver reported as free.
    "snapshot",  # A snapshot was taken.
]
MAX_EVENTS = 2_000_000
MAX_ADDRESS, MAX_SIZE = 2**64, 2**48
"""Files are read up to these: a size of 256 TiB is more than any device has."""
MAX_STACK_FRAMES = 10_000
"""Python's limit of recursion is 1,000 frames."""
MAX_NAME_LENGTH = 1000
ACTIONS: tuple[Action, ...] = get_args(Action)


def printable(text: str) -> str:
    """A text from a file as it can be printed: no control characters, not endless."""
    text = text[:MAX_NAME_LENGTH]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """A block in use when the recording began, or freed and still in use on another stream."""

    address: int
    bytes: int
    """Size of the block. Up to 1 MiB more may belong to it: what was too small to be split off."""
    requested_bytes: int
    """What the program asked for; equal to `bytes` where the source does not say."""
    stack: int | None = None
    """Index into `Recording.stacks`; None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Memory that was reserved when the recording began.

    Of a segment that expands, each range that is mapped without a gap is a Segment.
    """

    address: int
    bytes: int
    stream: int = 0
    is_expandable: bool = False
    is_small: bool | None = None
    """Whether it belongs to the pool of requests up to 1 MiB; None if unknown."""
    private_pool: tuple[int, int] = (0, 0)
    """Id of its private pool, of CUDA graphs or a torch.cuda.MemPool; (0, 0) is the default pool."""
    blocks: tuple[LiveBlock, ...] = ()
    """Ascending by address. The rest of the segment is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action of the allocator."""

    action: Action
    address: int
    bytes: int
    stream: int = 0
    stack: int | None = None
    """Index into `Recording.stacks`; None if unknown."""
    time_us: int | None = None
    private_pool: tuple[int, int] = (0, 0)
    """As in `Segment`. Only needed of `segment_alloc` and `segment_map`: allocations lie in their segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """The beginning or the end of a range that the program named: torch.profiler.record_function, an optimizer step."""

    name: str
    stage: Literal["START", "END"]
    time_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The memory of one device from the beginning of a recording to its end."""

    name: str
    """The file it was read from."""
    device: int = 0
    segments: tuple[Segment, ...] = ()
    """Ascending by address."""
    events: tuple[Event, ...] = ()
    stacks: tuple[tuple[Frame, ...], ...] = ()
    """Innermost frame first."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The allocator's settings by their names in a snapshot, such as `expandable_segments`; empty if unknown."""
    annotations: tuple[Annotation, ...] = ()
    """In order of time."""
    notes: tuple[str, ...] = ()
    """What the source lacks, or where its events contradict each other."""


COLUMNS = ["event", "address", "bytes", "where"]
MAX_TABLE_BYTES, MAX_LINE_BYTES = 256 * MIB, MIB // 8
"""Before compression: a small compressed file may contain terabytes."""
MAX_FRAMES = 5_000_000
"""Of all different stacks together."""


class _Stacks:
    """Every different stack once, by its text."""

    def __init__(self) -> None:
        self.indices: dict[str, int] = {}
        self.frames: list[tuple[Frame, ...]] = []
        self.frames_read = 0

    def index(self, where: str) -> int | None:
        """The index of a stack; None for an empty text."""
        if not where:
            return None
        if where not in self.indices:
            stack = tuple(_frame(text) for text in where.split(" < "))
            self.frames_read += len(stack)
            if len(stack) > MAX_STACK_FRAMES or self.frames_read > MAX_FRAMES:
                raise ValueError(
                    f"a stack has at most {MAX_STACK_FRAMES:,} frames, and all different ones {MAX_FRAMES:,}"
                )
            self.frames.append(stack)
            self.indices[where] = len(self.indices)
        return self.indices[where]


def _frame(text: str) -> Frame:
    parts = text.rsplit(":", 2)
    if len(parts) != 3 or not _is_whole(parts[1]):
        raise ValueError("where must be file:line:function, frames divided by ' < '")
    return Frame(printable(parts[0]), int(parts[1]), printable(parts[2]))


def _is_whole(text: str) -> bool:
    """Whether a text is a whole number of at most 64 bits."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_ADDRESS))


def read_table(path: Path) -> Recording:
    """Read a recording from a table.

    Raises:
        UserError: it is not such a table; the message names the line.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: cannot be read as a table (it is no regular file); name a table of events")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read(_lines(file), path)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise UserError(f"{path}: cannot be read as a table ({error}); write it again") from error


def _lines(file: BufferedIOBase) -> Iterator[str]:
    """Its lines, up to the limits."""
    left = MAX_TABLE_BYTES
    while line := file.readline(MAX_LINE_BYTES + 1):
        left -= len(line)
        if left < 0 or len(line) > MAX_LINE_BYTES:
            limits = f"{readable_size(MAX_LINE_BYTES)} a line, and {readable_size(MAX_TABLE_BYTES)} in all lines"
            raise csv.Error(f"it must have at most {limits}, uncompressed")
        yield line.decode("utf-8")


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
        except ValueError as error:
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
    for column, end in (("address", MAX_ADDRESS), ("bytes", MAX_SIZE)):
        if not _is_whole(row[column] or "") or int(row[column]) >= end:
            raise ValueError(f"{column} must be a whole number below {end}")
    return row["event"], int(row["address"]), int(row["bytes"]), stacks.index(row["where"])


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
