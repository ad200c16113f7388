"""What a recording says about the allocator: its settings, and what was reserved when the recording began.

Only a recording whose events are possible one after the other can be replayed: `contradiction` checks that.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from cuda_memory.allocator import (
    MIN_LARGE_REMAINDER_UNITS,
    SMALL_SEGMENT_UNITS,
    SMALL_UNITS,
    UNIT_BYTES,
    UNLIMITED_SPACE_UNITS,
    AllocatorSettings,
    Arena,
    CachingAllocator,
    put_expandable_segment,
    put_segment,
)
from cuda_memory.errors import UserError
from cuda_memory.recording import Event, Recording, Segment
from cuda_memory.units import MIB

RESERVES = {"segment_alloc": False, "segment_map": True}
"""Events that reserve memory, and whether the segment expands."""
RELEASES = ("segment_free", "segment_unmap")
MOST_ADDRESS = 1 << 56
"""Above every address of a GPU."""
IN_MEGABYTES = {
    "large_segment_size_mb": "large_segment_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
}
"""Settings that a snapshot names only in the text of PYTORCH_CUDA_ALLOC_CONF."""


def expands(recording: Recording) -> bool:
    """Whether new segments expand when the recording begins: the first one tells, or else the setting at its end."""
    for event in recording.events:
        if event.action in RESERVES:
            return RESERVES[event.action]
    setting = recording.settings.get("expandable_segments")
    return setting if isinstance(setting, bool) else any(segment.is_expandable for segment in recording.segments)


def settings_of(recording: Recording) -> AllocatorSettings:
    """The allocator's other settings, without the garbage collection, whose limit a recording does not name."""
    found: dict[str, object] = {}
    split = recording.settings.get("max_split_size")
    if isinstance(split, int) and 0 < split < 1 << 60:
        found["max_split_bytes"] = split
    divisions = recording.settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping) and any(divisions.values()):
        found["roundup_power2_divisions"] = tuple(int(value) for value in divisions.values())
    text = str(recording.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    for name, field in IN_MEGABYTES.items():
        if match := re.search(rf"{name}\s*:\s*(\d+)", text):
            found[field] = int(match[1]) * MIB
    return replace(AllocatorSettings(), **found)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedRange:
    """A range of an expandable segment: memory at the beginning, or memory that an event maps. In units."""

    arena: Arena
    is_small: bool
    start: int
    size: int
    segment: Segment | None
    """None if an event maps it."""


def is_small(segment: Segment) -> bool:
    """Whether a segment belongs to the pool of small requests. A table does not say; its sizes do."""
    if segment.is_small is not None:
        return segment.is_small
    if segment.is_expandable:
        return bool(segment.blocks) and all(block.requested_bytes <= MIB for block in segment.blocks)
    return segment.bytes == SMALL_SEGMENT_UNITS * UNIT_BYTES


def check_state(recording: Recording) -> None:
    """Check what was reserved when the recording began.

    Raises:
        UserError: segments overlap, blocks do or lie outside of their segment, or an address is none of a GPU.
    """
    end = 0
    for segment in recording.segments:
        place, last = segment.address, segment.address + segment.bytes
        if not (end <= place < last <= MOST_ADDRESS and place % UNIT_BYTES == last % UNIT_BYTES == 0):
            raise UserError(f"{recording.name}: the segment at {place} overlaps another or has no possible size")
        for block in segment.blocks:
            if not place <= block.address < block.address + block.bytes <= last:
                raise UserError(f"{recording.name}: the block at {block.address} does not fit into its segment")
            place = block.address + block.bytes
        end = last


def put_initial_state(allocator: CachingAllocator, recording: Recording) -> None:
    """Put in what was reserved when the recording began.

    Raises:
        UserError: see `check_state`.
    """
    check_state(recording)
    for segment in recording.segments:
        if not segment.is_expandable:
            small = is_small(segment)
            pool = allocator.pool(Arena(segment.stream, segment.private_pool), is_small=small)
            start, size = segment.address // UNIT_BYTES, segment.bytes // UNIT_BYTES
            rest = 1 if small or allocator.expandable else MIN_LARGE_REMAINDER_UNITS
            put_segment(allocator, pool, start, size, _live_blocks(allocator, segment, rest))
    for start, size, ranges in expandable_segments(recording, allocator.settings):
        pool = allocator.pool(ranges[0].arena, is_small=ranges[0].is_small)
        mapped = [
            (found.start, found.size, _live_blocks(allocator, found.segment, 1))
            for found in ranges
            if found.segment is not None
        ]
        put_expandable_segment(allocator, pool, start, size, mapped)


def _live_blocks(allocator: CachingAllocator, segment: Segment, min_remainder: int) -> Iterator[tuple[int, int]]:
    """Start and size in units of the live blocks, with the remainders that are too small to be free blocks."""
    ends = [*(block.address for block in segment.blocks), segment.address + segment.bytes][1:]
    for block, end in zip(segment.blocks, ends, strict=True):
        size = max(-(-block.bytes // UNIT_BYTES), allocator.settings.round_up(max(block.requested_bytes, 1)))
        room = (end - block.address) // UNIT_BYTES
        never_split = allocator.max_split is not None and size >= allocator.max_split and min_remainder > 1
        yield block.address // UNIT_BYTES, room if never_split or room - size < min_remainder else size


def expandable_segments(
    recording: Recording, settings: AllocatorSettings
) -> Iterator[tuple[int, int, list[MappedRange]]]:
    """Start, size and mapped ranges of every expandable segment at the beginning, in units.

    A snapshot names only the ranges that are mapped. Ranges of one arena lie in one segment if they are whole pages
    apart and nothing else lies between them. The segment begins at the lowest address that an event maps before all
    of it is unmapped.
    """
    initial = [
        MappedRange(
            arena=Arena(segment.stream, segment.private_pool),
            is_small=is_small(segment),
            start=segment.address // UNIT_BYTES,
            size=segment.bytes // UNIT_BYTES,
            segment=segment,
        )
        for segment in recording.segments
        if segment.is_expandable
    ]
    places = sorted(segment.address // UNIT_BYTES for segment in recording.segments)
    ends = sorted((segment.address + segment.bytes) // UNIT_BYTES for segment in recording.segments)
    mapped = mapped_ranges(recording.events)
    mappings = [
        (place, event)
        for place, event in enumerate(recording.events)
        if event.action in ("segment_map", "segment_unmap")
    ]
    begins: list[tuple[int, int, list[MappedRange]]] = []
    initial.sort(key=lambda found: (found.arena, found.is_small, found.start))
    for (_, small), found in groupby(initial, lambda found: (found.arena, found.is_small)):
        page = settings.page_units(is_small=small)
        for group in _segments_of(list(found), places, page):
            floor = ends[bisect_right(ends, group[0].start) - 1] if ends[0] <= group[0].start else 0
            lower = [place for place in _mapped_below(mappings, mapped, group, page) if place >= floor]
            begins.append((min([group[0].start, *lower]), page, group))
    bounds = sorted([*places, *(begin for begin, _, _ in begins), MOST_ADDRESS // UNIT_BYTES])
    for start, page, group in begins:
        room = min(UNLIMITED_SPACE_UNITS, bounds[bisect_right(bounds, group[-1].start)] - start)
        yield start, room // page * page, group


def _segments_of(ranges: list[MappedRange], places: Sequence[int], page: int) -> list[list[MappedRange]]:
    """Divide ranges of one arena into segments: whole pages apart, with nothing else between them."""
    groups = [[ranges[0]]]
    for low, high in pairwise(ranges):
        adjoin = places[bisect_right(places, low.start)] == high.start
        if (high.start - low.start) % page == 0 and adjoin:
            groups[-1].append(high)
        else:
            groups.append([high])
    return groups


def _mapped_below(
    mappings: Sequence[tuple[int, Event]], mapped: Mapping[int, MappedRange], group: list[MappedRange], page: int
) -> Iterator[int]:
    """Addresses below a segment's first range that events map as long as some of the segment is mapped."""
    left, lowest = sum(found.size for found in group), group[0].start
    for place, event in mappings:
        start = event.address // UNIT_BYTES
        if event.action == "segment_unmap" and start >= lowest:
            left -= event.bytes // UNIT_BYTES
            if left <= 0:
                return
        elif event.action == "segment_map":
            found = mapped.get(place)
            same = found is not None and (found.arena, found.is_small) == (group[0].arena, group[0].is_small)
            if found is not None and same and (start - group[0].start) % page == 0:
                left += found.size
                if start < lowest:
                    lowest = start
                    yield start


def mapped_ranges(events: Sequence[Event]) -> dict[int, MappedRange]:
    """The range that each event `segment_map` maps, by the event's number. The next request says which pool it is."""
    found, waiting = {}, []
    for place, event in enumerate(events):
        if event.action == "segment_map":
            waiting.append(place)
        elif event.action in ("alloc", "oom"):
            small = event.bytes <= SMALL_UNITS * UNIT_BYTES
            for number in waiting:
                mapping = events[number]
                found[number] = MappedRange(
                    arena=Arena(mapping.stream, mapping.private_pool),
                    is_small=small,
                    start=mapping.address // UNIT_BYTES,
                    size=mapping.bytes // UNIT_BYTES,
                    segment=None,
                )
            waiting.clear()
    return found


MOST_RANGES = 200_000
"""Reserved or live at once. Inserting into longer lists would take too long."""


class _Ranges:
    """Address ranges that do not touch."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}

    def add(self, start: int, size: int) -> bool:
        """Add a range, joined with those it touches; return whether it overlaps none, and there are not too many."""
        if len(self.starts) >= MOST_RANGES or self.overlaps(start, size):
            return False
        end, place = start + size, bisect_left(self.starts, start)
        if place > 0 and self.ends[self.starts[place - 1]] == start:
            place -= 1
            start = self.starts.pop(place)
        if place < len(self.starts) and self.starts[place] == end:
            end = self.ends.pop(self.starts.pop(place))
        self.starts.insert(place, start)
        self.ends[start] = end
        return True

    def remove(self, start: int, size: int) -> bool:
        """Remove what lies in a range; return whether all of the range was there."""
        if not self.covers(start, size):
            return False
        lower, end = self.starts.pop(bisect_right(self.starts, start) - 1), start + size
        upper = self.ends.pop(lower)
        if lower < start:
            self.add(lower, start - lower)
        if end < upper:
            self.add(end, upper - end)
        return True

    def covers(self, start: int, size: int) -> bool:
        """Whether a range contains all of another."""
        place = bisect_right(self.starts, start) - 1
        return place >= 0 and self.ends[self.starts[place]] >= start + size

    def overlaps(self, start: int, size: int) -> bool:
        """Whether a range contains a part of another."""
        place = bisect_right(self.starts, start)
        inside = place < len(self.starts) and self.starts[place] < start + size
        return inside or (place > 0 and self.ends[self.starts[place - 1]] > start)


class _State:
    """Reserved and live memory."""

    def __init__(self) -> None:
        self.reserved, self.live = _Ranges(), _Ranges()
        self.requested: dict[int, int] = {}

    def allocate(self, start: int, requested: int) -> bool:
        size = max(-(-requested // UNIT_BYTES), 1) * UNIT_BYTES
        self.requested[start] = requested
        return self.reserved.covers(start, size) and self.live.add(start, size)

    def free(self, start: int) -> bool:
        requested = self.requested.pop(start, None)
        size = 0 if requested is None else max(-(-requested // UNIT_BYTES), 1) * UNIT_BYTES
        return size > 0 and self.live.remove(start, size)

    def apply(self, event: Event) -> str | None:
        """Play an event; return why it is impossible."""
        match event.action:
            case "alloc":
                return None if self.allocate(event.address, event.bytes) else "allocates memory that is not free"
            case "free_completed":
                return None if self.free(event.address) else "frees what is not allocated"
            case "segment_alloc" | "segment_map":
                aligned = event.bytes > 0 and event.bytes % UNIT_BYTES == event.address % UNIT_BYTES == 0
                added = aligned and self.reserved.add(event.address, event.bytes)
                return None if added else "reserves what is reserved"
            case "segment_free" | "segment_unmap":
                in_use = event.bytes < 1 or self.live.overlaps(event.address, event.bytes)
                removed = not in_use and self.reserved.remove(event.address, event.bytes)
                return None if removed else "releases what is in use or not reserved"
        return None


def contradiction(recording: Recording) -> str | None:
    """The first event that is impossible after those before it, and why; None if there is none."""
    state = _State()
    for segment in recording.segments:
        if segment.bytes < 1 or not state.reserved.add(segment.address, segment.bytes):
            return "segments overlap at the beginning"
    for segment in recording.segments:
        for block in segment.blocks:
            if not state.allocate(block.address, block.requested_bytes):
                return "blocks overlap at the beginning"
    try:
        check_state(recording)
    except UserError as error:
        return str(error)
    for number, event in enumerate(recording.events):
        if (why := state.apply(event)) is not None:
            return f"event {number:,} {why}"
    return None
