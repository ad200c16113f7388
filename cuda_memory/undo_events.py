"""The memory of a device when a recording began, from its memory at the end and the events between.

PyTorch keeps the newest events only and writes the state at the end, so the beginning is found by undoing the events
from the last to the first.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from cuda_memory.recording import Event, LiveBlock, Segment
from cuda_memory.settings import UNIT_BYTES

MOST_RANGES = 100_000
"""Of expandable segments. Inserting into longer lists would take too long."""


class MemoryState:
    """Reserved memory and its blocks at one instant."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = {segment.address: replace(segment, blocks=()) for segment in segments}
        self.blocks = {block.address: block for segment in segments for block in segment.blocks}
        self.expandable = sorted(start for start, segment in self.segments.items() if segment.is_expandable)
        self.conflicts: Counter[str] = Counter()
        """By action: events that do not fit the state after them."""

    def undo(self, events: Sequence[Event]) -> None:
        """Go back to the instant before the first of `events`."""
        for event in reversed(events):
            match event.action:
                case "alloc":
                    fits = self.blocks.pop(event.address, None) is not None
                case "free_completed":
                    fits = event.address not in self.blocks
                    self.blocks[event.address] = _freed_block(event)
                case "segment_alloc":
                    fits = event.address in self.segments and not self.segments[event.address].is_expandable
                    if fits:
                        del self.segments[event.address]
                case "segment_free":
                    fits = self._add(event, is_expandable=False)
                case "segment_map":
                    fits = self._unmap(event)
                case "segment_unmap":
                    fits = self._add(event, is_expandable=True)
                    if fits:
                        self._merge(event.address)
                case _:
                    continue
            self.conflicts[event.action] += not fits

    def _add(self, event: Event, *, is_expandable: bool) -> bool:
        """Add what a segment_free or segment_unmap removed; return whether it was away."""
        if event.address in self.segments or len(self.expandable) >= MOST_RANGES:
            return False
        segment = Segment(
            address=event.address,
            bytes=event.bytes,
            stream=event.stream,
            is_expandable=is_expandable,
            private_pool=event.private_pool,
        )
        self.segments[event.address] = segment
        if is_expandable:
            insort(self.expandable, event.address)
        return True

    def _unmap(self, event: Event) -> bool:
        """Remove what a segment_map added; return whether it was there."""
        start, end = event.address, event.address + event.bytes
        place = bisect_right(self.expandable, start) - 1
        around = self.segments[self.expandable[place]] if place >= 0 else None
        if around is None or end > around.address + around.bytes or len(self.expandable) >= MOST_RANGES:
            return False
        del self.segments[self.expandable.pop(place)]
        parts = ((around.address, start), (end, around.address + around.bytes))
        for first, last in parts:
            if first < last and first not in self.segments:
                self.segments[first] = replace(around, address=first, bytes=last - first)
                insort(self.expandable, first)
        return True

    def _merge(self, address: int) -> None:
        """Join a mapped range with those that it touches."""
        place = bisect_left(self.expandable, address)
        for lower_place in (place, place - 1):
            if not 0 <= lower_place < len(self.expandable) - 1:
                continue
            lower, upper = (self.segments[start] for start in self.expandable[lower_place : lower_place + 2])
            if lower.address + lower.bytes == upper.address:
                del self.segments[self.expandable.pop(lower_place + 1)]
                self.segments[lower.address] = replace(lower, bytes=lower.bytes + upper.bytes)

    def with_blocks(self) -> tuple[tuple[Segment, ...], int]:
        """The segments with their blocks, ascending, and how many blocks are in none of them."""
        starts = sorted(self.segments)
        inside: dict[int, list[LiveBlock]] = {start: [] for start in starts}
        outside = 0
        for block in sorted(self.blocks.values(), key=lambda block: block.address):
            place = bisect_right(starts, block.address) - 1
            segment = self.segments[starts[place]] if place >= 0 else None
            if segment is None or block.address + block.bytes > segment.address + segment.bytes:
                outside += 1
            else:
                inside[segment.address].append(block)
        return tuple(replace(self.segments[start], blocks=tuple(inside[start])) for start in starts), outside


def _freed_block(event: Event) -> LiveBlock:
    """The block that an event freed. The event's stack says where it was freed, not where it was allocated."""
    size = -(-event.bytes // UNIT_BYTES) * UNIT_BYTES
    return LiveBlock(address=event.address, bytes=size, requested_bytes=event.bytes)
