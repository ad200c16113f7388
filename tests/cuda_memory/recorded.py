"""Recordings for tests, as PyTorch writes them: made by playing requests in the model of the allocator."""

import random
from collections.abc import Sequence
from typing import cast

from cuda_memory.allocator import UNIT_BYTES, Arena, CachingAllocator, CapacityExceeded
from cuda_memory.recording import Action, Event, Frame, LiveBlock, Recording, Segment


class Recorder:
    """Plays requests and records events. Addresses have the allocator's units as bytes."""

    def __init__(self, *, expandable: bool, capacity_bytes: int | None = None):
        self.allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
        self.events: list[Event] = []
        self.segments: tuple[Segment, ...] = ()
        self.live: dict[int, tuple[int, int]] = {}
        """Requested bytes and stream by handle."""
        self.streams: dict[int, int] = {}

    def begin(self) -> None:
        """Begin the recording here, as PyTorch does: with what is reserved now."""
        self.events.clear()
        self.segments = tuple(sorted(self._segments(), key=lambda segment: segment.address))

    def _segments(self) -> list[Segment]:
        found = []
        for arena, pools in self.allocator._arenas.items():
            for pool in pools:
                for start, size in pool.segments.items():
                    expands = start in pool.spaces
                    holes = [hole for hole in pool.unmapped.items() if start <= hole[0] < start + size]
                    place = start
                    for hole, room in [*sorted(holes), (start + size, 0)]:
                        if hole > place:
                            found.append(self._segment(place, hole, arena, expands, pool.is_small))
                        place = hole + room
        return found

    def _segment(self, start: int, end: int, arena: Arena, is_expandable: bool, is_small: bool) -> Segment:
        blocks = [
            LiveBlock(
                address=handle * UNIT_BYTES,
                bytes=self.allocator._live[handle] * UNIT_BYTES,
                requested_bytes=self.live[handle][0],
            )
            for handle in sorted(self.live)
            if start <= handle < end
        ]
        return Segment(
            address=start * UNIT_BYTES,
            bytes=(end - start) * UNIT_BYTES,
            stream=arena.stream,
            is_expandable=is_expandable,
            is_small=is_small,
            blocks=tuple(blocks),
        )

    def allocate(self, count_bytes: int, stream: int = 0, stack: int | None = None) -> int:
        """Allocate. Where memory runs out, that is recorded, and CapacityExceeded raised."""
        self.allocator.driver_calls.clear()
        try:
            handle = self.allocator.allocate(count_bytes, Arena(stream))
        except CapacityExceeded:
            self._record_calls(stream, stack)
            free = (self.allocator.capacity_bytes or 0) - self.allocator.reserved_bytes
            self._event("oom", free, count_bytes, stream, stack)
            raise
        self._record_calls(stream, stack)
        self._event("alloc", handle * UNIT_BYTES, count_bytes, stream, stack)
        self.live[handle] = count_bytes, stream
        return handle

    def free(self, handle: int) -> None:
        """Free a block."""
        count_bytes, stream = self.live.pop(handle)
        self.allocator.free(handle)
        self._event("free_requested", handle * UNIT_BYTES, count_bytes, stream)
        self._event("free_completed", handle * UNIT_BYTES, count_bytes, stream)

    def empty_cache(self) -> None:
        """Release cached memory."""
        self.allocator.driver_calls.clear()
        self.allocator.release_cached()
        self._record_calls(0, None)

    def _record_calls(self, stream: int, stack: int | None) -> None:
        for call in self.allocator.driver_calls:
            self._event(cast(Action, call.action), call.start * UNIT_BYTES, call.size * UNIT_BYTES, stream, stack)

    def _event(self, action: Action, address: int, count: int, stream: int, stack: int | None = None) -> None:
        self.events.append(Event(action=action, address=address, bytes=count, stream=stream, stack=stack))

    def recording(self, stacks: Sequence[tuple[Frame, ...]] = ()) -> Recording:
        """What was recorded since `begin`."""
        return Recording(
            name="test",
            segments=self.segments,
            events=tuple(self.events),
            stacks=tuple(stacks),
            settings={"expandable_segments": self.allocator.expandable},
        )


def random_recording(
    seed: int, *, expandable: bool, streams: int = 1, before: int = 300, after: int = 700, emptied: bool = True
) -> Recorder:
    """Play a random sequence that is recorded from its middle on."""
    rng = random.Random(seed)
    recorder = Recorder(expandable=expandable)
    for number in range(before + after):
        if number == before:
            recorder.begin()
        if emptied and rng.random() < 0.01:
            recorder.empty_cache()
        elif recorder.live and rng.random() < 0.49:
            recorder.free(rng.choice(sorted(recorder.live)))
        else:
            sizes = (rng.randint(1, 2 << 20), rng.randint(1, 70 << 20), rng.choice((1 << 20, 10 << 20, 20 << 20)))
            recorder.allocate(rng.choice(sizes), stream=rng.randrange(streams))
    return recorder
