"""What the memory of a recording would have been under other settings, by replay of its requests."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

from cuda_memory.allocator import UNIT_BYTES, AllocatorSettings, Arena, CachingAllocator, CapacityExceeded
from cuda_memory.errors import UserError
from cuda_memory.gpus import GPUS, Device
from cuda_memory.recorded_state import RELEASES, RESERVES, expands, put_initial_state, settings_of
from cuda_memory.recording import Event, Recording
from cuda_memory.replay import ReservedRanges, replay_exactly
from cuda_memory.steps import NoSteps, largest_first, step_ends
from cuda_memory.units import MIB

REQUESTS = ("alloc", "oom")
MAX_SPLIT_MB = 128
"""The value of max_split_size_mb that is tried."""
MOST_WORK = 100_000_000
"""Segments, summed over the events that reserve or release memory: a replay passes all of them at each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one replay reserved."""

    name: str
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int = 0
    """How often all cached memory was released to serve a request."""
    failed_event: int | None = None
    """Number of the request that failed, among the recording's events; None for those that were live before."""
    why: str | None = None
    """Why it failed; None if it did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Every replay of one recording."""

    outcomes: tuple[Outcome, ...]
    """First as recorded; then without a memory limit, with the recorded kind of segments, with the other, …"""
    not_replayed: tuple[str, ...]
    """What could not be replayed, each with the reason."""
    smallest_gpus: dict[str, Device | None]
    """The smallest known card that serves every request, by kind of segments; None if none does."""
    begins_anew: bool
    """Whether the blocks that were live at the beginning are allocated anew, in order of their addresses, because
    nothing says in which order they were allocated. Peaks are exact but for this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """What a replay plays: the requests of a recording, without the driver's answers."""

    recording: Recording
    events: Sequence[Event]
    arenas: dict[int, Arena]
    """Arena by the number of an allocation, only of those in private pools."""
    emptied: Collection[int]
    """Numbers of the events before which the program released cached memory."""


def requests_of(recording: Recording) -> Requests:
    """The requests of a recording."""
    return Requests(
        recording=recording,
        events=recording.events,
        arenas=_private_arenas(recording),
        emptied=frozenset(_emptied(recording)),
    )


def _emptied(recording: Recording) -> list[int]:
    """Where the program called torch.cuda.empty_cache: releases that do not have the stack of the next request.

    Memory that runs short is released with the stack of the request that found none.
    """
    events, found, following = recording.events, [], None
    for place in range(len(events) - 1, -1, -1):
        event = events[place]
        if event.action in REQUESTS:
            following = event
        elif event.action in RELEASES and not (place and events[place - 1].action in RELEASES):
            if following is None or event.stack is None or following.stack != event.stack:
                found.append(place)
    return found


def _private_arenas(recording: Recording) -> dict[int, Arena]:
    reserving = [event for event in recording.events if event.action in RESERVES]
    pools = {segment.private_pool for segment in recording.segments} | {event.private_pool for event in reserving}
    if pools <= {(0, 0)}:
        return {}
    ranges, found = ReservedRanges(), {}
    for segment in recording.segments:
        ranges.add(segment.address, segment.bytes, Arena(segment.stream, segment.private_pool))
    for place, event in enumerate(recording.events):
        if event.action in RESERVES:
            ranges.add(event.address, event.bytes, Arena(event.stream, event.private_pool))
        elif event.action in RELEASES:
            ranges.remove(event.address, event.bytes)
        elif event.action == "alloc":
            arena = ranges.arena_of(event.address)
            if arena is not None and arena.private_pool != (0, 0):
                found[place] = arena
    return found


def replay_requests(
    requests: Requests,
    name: str,
    *,
    expandable: bool,
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    anew: bool = True,
    empty_at: Collection[int] = (),
) -> Outcome:
    """Replay requests under other settings.

    Args:
        requests: what to play.
        name: of the outcome.
        expandable: whether segments expand.
        settings: the allocator's other settings.
        capacity_bytes: memory for PyTorch's allocator; None for no limit.
        anew: allocate the blocks that were live at the beginning, instead of putting them in where they were.
        empty_at: numbers of further events before which cached memory is released.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes, settings=settings)
    place = None
    try:
        handles = _begin(allocator, requests.recording, anew=anew)
        empty = {*requests.emptied, *empty_at}
        for place, event in enumerate(requests.events):  # noqa: B007
            if place in empty:
                allocator.release_cached()
            if event.action == "alloc":
                arena = requests.arenas.get(place) or Arena(event.stream)
                handles[event.address] = allocator.allocate(max(event.bytes, 1), arena)
            elif event.action == "free_requested":
                if (handle := handles.pop(event.address, None)) is not None:
                    allocator.pending[event.address] = handle
            elif event.action == "free_completed":
                if (handle := allocator.pending.pop(event.address, handles.pop(event.address, None))) is not None:
                    allocator.free(handle)
            elif event.action == "oom":
                allocator.free(allocator.allocate(max(event.bytes, 1), Arena(event.stream)))
    except CapacityExceeded as error:
        return _outcome(name, allocator, failed_event=place, why=str(error))
    return _outcome(name, allocator)


def _outcome(
    name: str, allocator: CachingAllocator, failed_event: int | None = None, why: str | None = None
) -> Outcome:
    return Outcome(
        name=name,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        retries=allocator.retries,
        failed_event=failed_event,
        why=why,
    )


def _begin(allocator: CachingAllocator, recording: Recording, *, anew: bool) -> dict[int, int]:
    """Bring an allocator to the beginning of a recording; return the handle of each live block by its address."""
    if not anew:
        put_initial_state(allocator, recording)
        return {handle * UNIT_BYTES: handle for handle in allocator.live_blocks()}
    return {
        block.address: allocator.allocate(max(block.requested_bytes, 1), Arena(segment.stream, segment.private_pool))
        for segment in recording.segments
        for block in segment.blocks
    }


def _check_work(recording: Recording) -> None:
    segments, work = len(recording.segments), 0
    for number, event in enumerate(recording.events):
        if event.action in (*RESERVES, *RELEASES):
            segments = max(segments + (1 if event.action in RESERVES else -1), 0)
            work += segments
        if work > MOST_WORK:
            raise UserError(
                f"{recording.name}: too many segments are reserved and released for a replay (up to event {number:,}); "
                "record fewer events: max_entries of torch.cuda.memory._record_memory_history"
            )


def what_if(recording: Recording) -> WhatIf:
    """Replay a recording under the settings that people try when memory runs out.

    Raises:
        UserError: a replay would take too long.
    """
    _check_work(recording)
    requests, expandable, settings = requests_of(recording), expands(recording), settings_of(recording)
    exact = replay_exactly(recording)
    outcomes = [
        Outcome(
            name="as recorded",
            peak_reserved_bytes=exact.peak_reserved_bytes,
            peak_allocated_bytes=exact.peak_allocated_bytes,
        )
    ]
    split = AllocatorSettings(max_split_bytes=MAX_SPLIT_MB * MIB)
    free = {
        kind: replay_requests(requests, f"expandable_segments:{kind}", expandable=kind, settings=settings)
        for kind in (expandable, not expandable)
    }
    outcomes += free.values()
    outcomes.append(replay_requests(requests, f"max_split_size_mb:{MAX_SPLIT_MB}", expandable=False, settings=split))
    not_replayed = []
    for name, play in (("cache emptied after each step", _emptied_each_step), ("largest steps first", _largest_first)):
        try:
            outcomes.append(play(requests, name, expandable, settings))
        except NoSteps as error:
            not_replayed.append(f"{name}: {error}")
    return WhatIf(
        outcomes=tuple(outcomes),
        not_replayed=tuple(not_replayed),
        smallest_gpus={
            name: smallest_gpu(requests, free[kind], expandable=kind, settings=settings)
            for name, kind in (("fixed", False), ("expandable", True))
        },
        begins_anew=bool(recording.segments),
    )


def _emptied_each_step(requests: Requests, name: str, expandable: bool, settings: AllocatorSettings) -> Outcome:
    ends = step_ends(requests.recording)
    return replay_requests(requests, name, expandable=expandable, settings=settings, empty_at=ends)


def _largest_first(requests: Requests, name: str, expandable: bool, settings: AllocatorSettings) -> Outcome:
    if requests.arenas or requests.emptied:
        raise NoSteps("the recording has CUDA graphs or releases of cached memory, which belong to their place")
    events = largest_first(requests.recording)
    ordered = Requests(recording=requests.recording, events=events, arenas={}, emptied=())
    return replay_requests(ordered, name, expandable=expandable, settings=settings)


def first_failure(recording: Recording, capacity_bytes: int, *, expandable: bool) -> Outcome:
    """Replay on a device with this much memory for PyTorch; `failed_event` is the request that would have failed."""
    return replay_requests(
        requests_of(recording),
        f"with {capacity_bytes} bytes",
        expandable=expandable,
        settings=settings_of(recording),
        capacity_bytes=capacity_bytes,
    )


def smallest_gpu(requests: Requests, free: Outcome, *, expandable: bool, settings: AllocatorSettings) -> Device | None:
    """The known card with the least memory that serves every request beside its CUDA context; None if none does.

    `free` is the outcome without a limit.
    """
    for gpu in sorted(GPUS, key=attrgetter("memory_bytes")):
        capacity_bytes = gpu.usable_bytes(0)
        if free.peak_allocated_bytes > capacity_bytes:
            continue
        if free.peak_reserved_bytes <= capacity_bytes:
            return gpu
        limited = replay_requests(
            requests, gpu.name, expandable=expandable, settings=settings, capacity_bytes=capacity_bytes
        )
        if limited.why is None:
            return gpu
    return None
