"""Replay a recording in the model of the caching allocator, and compare every call to the driver with the recording's.

Releases are played as recorded, because a recording names neither the calls of torch.cuda.empty_cache nor the memory of
the device. Whether a release of all cached memory would release the same is compared too.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from cuda_memory.allocator import (
    MIN_LARGE_REMAINDER_UNITS,
    SMALL_UNITS,
    UNIT_BYTES,
    UNLIMITED_SPACE_UNITS,
    Arena,
    CachingAllocator,
)
from cuda_memory.block_pool import BlockPool, DriverCall
from cuda_memory.recorded_state import (
    MOST_ADDRESS,
    RELEASES,
    RESERVES,
    expands,
    mapped_ranges,
    put_initial_state,
    settings_of,
)
from cuda_memory.recording import Event, Recording


class ReservedRanges:
    """Address ranges that never overlap, each with its arena."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, Arena]] = {}
        self.bytes = self.peak_bytes = 0
        """In all ranges, now and at most."""

    def add(self, start: int, size: int, arena: Arena) -> None:
        """Add a range."""
        if start not in self._ranges:
            insort(self._starts, start)
        self._ranges[start] = size, arena
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, start: int, size: int) -> None:
        """Remove what lies in a range; parts of ranges that stick out of it stay."""
        end = start + size
        for first, last, arena in list(self._overlapping(start, end)):
            self._starts.remove(first)
            del self._ranges[first]
            self.bytes -= last - first
            for rest, rest_end in ((first, start), (end, last)):
                if rest < rest_end:
                    self.add(rest, rest_end - rest, arena)

    def arena_of(self, address: int) -> Arena | None:
        """The arena of the range that contains an address; None if none does."""
        return next((arena for _, _, arena in self._overlapping(address, address + 1)), None)

    def is_reserved(self, start: int, size: int) -> bool:
        """Whether any of a range is reserved."""
        return any(True for _ in self._overlapping(start, start + size))

    def end_of_room(self, address: int, most: int) -> int:
        """Where the next range above an address begins; `most` if none does."""
        place = bisect_right(self._starts, address)
        return self._starts[place] if place < len(self._starts) else most

    def _overlapping(self, start: int, end: int) -> Iterator[tuple[int, int, Arena]]:
        place = max(bisect_right(self._starts, start) - 1, 0)
        while place < len(self._starts) and self._starts[place] < end:
            first = self._starts[place]
            size, arena = self._ranges[first]
            if first + size > start:
                yield first, first + size, arena
            place += 1


OTHER_ADDRESSES = 1 << 47
"""Units above MOST_ADDRESS, where the replay puts segments that the GPU did not reserve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """An event at which the replay called the driver otherwise than the GPU did."""

    event: int
    """Number of the event in the recording."""
    recorded: tuple[DriverCall, ...]
    replayed: tuple[DriverCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactReplay:
    """What the replay of a recording found."""

    allocations: int
    """Allocations that were compared."""
    differences: tuple[Difference, ...]
    """Allocations that reserved other segments than on the GPU."""
    moved: int
    """Allocations at another address than on the GPU."""
    unknown: int
    """Allocations in memory of which the recording does not say when it was reserved; they are not replayed."""
    releases: int
    """Releases of cached memory: torch.cuda.empty_cache, or memory that ran short."""
    partial_releases: int
    """Releases of other segments than a release of all cached memory would release."""
    peak_reserved_bytes: int
    """As replayed."""
    recorded_peak_reserved_bytes: int
    peak_allocated_bytes: int
    reserved_bytes_at_oom: tuple[int, ...]
    """Reserved when each request failed, for which memory was not enough."""


class _Replay:
    """The state of a replay."""

    def __init__(self, recording: Recording):
        self.events = recording.events
        self.allocator = CachingAllocator(
            expandable=expands(recording), capacity_bytes=None, settings=settings_of(recording)
        )
        self.allocator.next_address = OTHER_ADDRESSES
        put_initial_state(self.allocator, recording)
        self.reserved = ReservedRanges()
        for segment in recording.segments:
            self.reserved.add(segment.address, segment.bytes, Arena(segment.stream, segment.private_pool))
        self.mapped = mapped_ranges(recording.events)
        kinds = {event.action for event in recording.events if event.action in RESERVES}
        self.both_kinds = len(kinds) == 2
        begun = self.allocator.live_blocks()
        self.handles: dict[int, int] = {start * UNIT_BYTES: start for start in begun}
        self.begun_by_end = {start + size: start for start, size in begun.items()}
        self.waiting: dict[int, int] = {}
        """Events that reserved memory for an allocation to come, by address."""
        self.waiting_at: list[int] = []
        """Their addresses, ascending."""
        self.differences: list[Difference] = []
        self.allocations = self.moved = self.unknown = self.releases = self.partial_releases = 0
        self.at_oom: list[int] = []

    def play(self) -> None:
        """Play every event."""
        place = 0
        while place < len(self.events):
            event = self.events[place]
            if event.action in RELEASES:
                end = place
                while end < len(self.events) and self.events[end].action in RELEASES:
                    end += 1
                self._release(place, end)
                place = end
                continue
            if event.action == "alloc":
                self._allocate(place, event)
            elif event.action == "free_completed":
                handle = self.handles.pop(event.address, None)
                if handle is not None:
                    self.allocator.free(handle)
            elif event.action in RESERVES:
                self._reserve(place, event)
            elif event.action == "oom":
                self._map_waiting()
                self.at_oom.append(self.allocator.reserved_bytes)
            place += 1
        for number in self.waiting.values():
            self._differ(number, _call(self.events[number]))

    def _reserve(self, place: int, event: Event) -> None:
        """Note what the GPU reserved, until the allocation that it was for."""
        end = event.address + event.bytes
        if self.reserved.is_reserved(event.address, event.bytes) or event.bytes < 1 or end > MOST_ADDRESS:
            self._differ(place, _call(event))
        else:
            self.reserved.add(event.address, event.bytes, Arena(event.stream, event.private_pool))
            self.waiting[event.address] = place
            insort(self.waiting_at, event.address)

    def _differ(self, place: int, *recorded: DriverCall, replayed: tuple[DriverCall, ...] = ()) -> None:
        self.differences.append(Difference(event=place, recorded=recorded, replayed=replayed))

    def _allocate(self, place: int, event: Event) -> None:
        arena = self.reserved.arena_of(event.address)
        if arena is None:
            self.unknown += 1
            return
        recorded = self._recorded_calls(event)
        wanted, owner = max(event.bytes, 1), Arena(event.stream, arena.private_pool)
        pool = self.allocator.pool(owner, is_small=self.allocator.settings.round_up(wanted) <= SMALL_UNITS)
        if not recorded:
            self._find_remainder(event.address // UNIT_BYTES, pool)
        else:
            action, start, size = recorded[0]
            if self.both_kinds:
                self.allocator.expandable = RESERVES[action]
            if self._may_begin(start, pool):
                self.allocator.next_segment = (start, self._room(start) if RESERVES[action] else size)
        self.allocator.driver_calls.clear()
        handle = self.allocator.allocate(wanted, owner)
        self.allocator.next_segment = None
        replayed = tuple(self.allocator.driver_calls)
        if replayed != recorded:
            self._differ(place, *recorded, replayed=replayed)
        self.allocations += 1
        self.moved += handle != event.address // UNIT_BYTES
        self.handles[event.address] = handle

    def _find_remainder(self, start: int, pool: BlockPool) -> None:
        """Find out that a block that was live at the beginning is larger than the recording says.

        A remainder of up to 1 MiB is not split off, and a recording does not name it. An allocation behind it does not
        begin where the free memory seems to begin.
        """
        if pool.is_small or self.allocator.expandable or start in pool.free:
            return
        free = pool.free_block_at(start)
        block = self.begun_by_end.get(free or -1)
        if free is None or block is None or start - free >= MIN_LARGE_REMAINDER_UNITS:
            return
        if self.allocator.live_blocks().get(block) == free - block:
            self.allocator.extend(block, start - free)

    def _recorded_calls(self, event: Event) -> tuple[DriverCall, ...]:
        """The calls that reserved memory for an allocation, in units: in another thread, others may lie between."""
        first = bisect_left(self.waiting_at, event.address)
        if first > 0:
            below = self.waiting_at[first - 1]
            first -= below + self.events[self.waiting[below]].bytes > event.address
        last = bisect_left(self.waiting_at, event.address + event.bytes, first)
        mine = sorted(self.waiting.pop(address) for address in self.waiting_at[first:last])
        del self.waiting_at[first:last]
        return tuple(_call(self.events[number]) for number in mine)

    def _room(self, start: int) -> int:
        """The address range in units that a new expandable segment may have, without touching what is reserved."""
        end = self.reserved.end_of_room(start * UNIT_BYTES, MOST_ADDRESS) // UNIT_BYTES
        return min(end - start, UNLIMITED_SPACE_UNITS)

    def _map_waiting(self) -> None:
        """Map what was mapped for a request that then failed."""
        for number in self.waiting.values():
            event, found = self.events[number], self.mapped.get(number)
            if event.action == "segment_map" and found is not None:
                pool = self.allocator.pool(found.arena, is_small=found.is_small)
                if pool.is_unmapped(found.start, found.size):
                    self.allocator.map_range(pool, found.start, found.size)
        self.waiting.clear()
        self.waiting_at.clear()

    def _release(self, first: int, end: int) -> None:
        """Play one release of cached memory."""
        self._map_waiting()
        expected = {call: pool for pool, call in self.allocator.releasable()}
        recorded = [_call(event) for event in self.events[first:end]]
        self.releases += 1
        self.partial_releases += sorted(recorded) != sorted(expected)
        for call, event in zip(recorded, self.events[first:end], strict=True):
            self.reserved.remove(event.address, event.bytes)
            with_free = (pool for pool in self.allocator.pools() if pool.can_release(call))
            pool = expected.pop(call, None) or next(with_free, None)
            if pool is None:
                self._differ(first, call)
            else:
                self.allocator.release(pool, call)

    def _may_begin(self, start: int, pool: BlockPool) -> bool:
        """Whether a new segment of a pool can begin at an address.

        Address ranges of other pools' expandable segments, whose sizes are guesses, end there if nothing lies behind.
        """
        if pool.segment_at(start) is not None:
            return False
        around = ((other, other.segment_at(start)) for other in self.allocator.pools())
        return all(segment is None or other.end_space(segment, start) for other, segment in around)


def _call(event: Event) -> DriverCall:
    return DriverCall(event.action, event.address // UNIT_BYTES, event.bytes // UNIT_BYTES)


def replay_exactly(recording: Recording) -> ExactReplay:
    """Replay a recording with its own settings, from what was reserved when it began."""
    replay = _Replay(recording)
    replay.play()
    return ExactReplay(
        allocations=replay.allocations,
        differences=tuple(replay.differences),
        moved=replay.moved,
        unknown=replay.unknown,
        releases=replay.releases,
        partial_releases=replay.partial_releases,
        peak_reserved_bytes=replay.allocator.peak_reserved_bytes,
        recorded_peak_reserved_bytes=replay.reserved.peak_bytes,
        peak_allocated_bytes=replay.allocator.peak_allocated_bytes,
        reserved_bytes_at_oom=tuple(replay.at_oom),
    )
