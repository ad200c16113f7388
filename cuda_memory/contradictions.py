"""Whether the events of a recording are possible one after the other: only then can they be replayed."""

from bisect import bisect_left, bisect_right

from cuda_memory.errors import UserError
from cuda_memory.recorded_state import check_state
from cuda_memory.recording import Event, Recording
from cuda_memory.settings import UNIT_BYTES

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
