"""Requests of a recording that failed for lack of memory: what was free, and what would have been enough."""

from collections.abc import Iterator
from dataclasses import dataclass

from cuda_memory.gpus import MAX_SIZE_GIB
from cuda_memory.origins import origin_of
from cuda_memory.recorded_state import expands, settings_of
from cuda_memory.recording import Recording
from cuda_memory.settings import SMALL_UNITS, UNIT_BYTES
from cuda_memory.timeline import RESERVES, Timeline
from cuda_memory.units import GIB

MOST_FAILURES = 20


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that PyTorch answered with OutOfMemoryError."""

    event: int
    """Number of events before it."""
    requested_bytes: int
    device_free_bytes: int
    """What the driver reported as free."""
    allocated_bytes: int
    reserved_bytes: int
    largest_unused_bytes: int
    """The largest free range inside reserved memory: larger requests need new memory."""
    missing_bytes: int
    """How much more free memory would have served the request: a segment, or pages of one that expands."""
    where: str

    @property
    def unused_bytes(self) -> int:
        """Reserved memory without tensors in it."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def is_fragmentation(self) -> bool:
        """Whether unused memory would have been enough in one piece."""
        return self.unused_bytes >= self.requested_bytes

    @property
    def impossible(self) -> str | None:
        """Why no GPU can have these sizes; None if one can."""
        if self.unused_bytes < 0:
            return "tensors have more memory than is reserved"
        if self.device_free_bytes > MAX_SIZE_GIB * GIB:
            return "more memory is free than any GPU has"
        return "a request of 0 B failed" if self.requested_bytes == 0 else None


def failures_of(timeline: Timeline) -> tuple[Failure, ...]:
    """The last failed requests of a recording, in order."""
    failed = [number for number, event in enumerate(timeline.recording.events) if event.action == "oom"]
    return tuple(_failure(timeline, number) for number in failed[-MOST_FAILURES:])


def _failure(timeline: Timeline, number: int) -> Failure:
    recording = timeline.recording
    event = recording.events[number]
    unused, new = max(unused_ranges(recording, number), default=0), _new_bytes(recording, event.bytes)
    return Failure(
        event=number,
        requested_bytes=event.bytes,
        device_free_bytes=event.address,
        allocated_bytes=int(timeline.allocated_E[number]),
        reserved_bytes=int(timeline.reserved_E[number]),
        largest_unused_bytes=unused,
        missing_bytes=max(0, new - event.address),
        where="" if event.stack is None else origin_of(recording.stacks[event.stack]).label,
    )


def _new_bytes(recording: Recording, request_bytes: int) -> int:
    """The memory that the allocator reserves for a request which no free block serves."""
    settings = settings_of(recording)
    units = settings.round_up(max(request_bytes, 1))
    if not expands(recording):
        return settings.segment_units(units) * UNIT_BYTES
    page = settings.page_units(is_small=units <= SMALL_UNITS)
    return -(-units // page) * page * UNIT_BYTES


def unused_ranges(recording: Recording, instant: int) -> Iterator[int]:
    """Sizes of the free ranges inside reserved memory after `instant` events, in order of addresses."""
    edges = [(segment.address, segment.bytes, 1) for segment in recording.segments]
    starts = {segment.address for segment in recording.segments}
    live = {block.address: block.bytes for segment in recording.segments for block in segment.blocks}
    for event in recording.events[:instant]:
        if event.action == "alloc":
            live[event.address] = -(-event.bytes // UNIT_BYTES) * UNIT_BYTES
        elif event.action == "free_completed":
            live.pop(event.address, None)
        elif sign := RESERVES.get(event.action, 0):
            edges.append((event.address, event.bytes, sign))
            if event.action == "segment_alloc":
                starts.add(event.address)
    # An address is reserved where the signs before it sum to one; a live block takes that away again.
    bounds: dict[int, int] = {}
    for address, size, sign in [*edges, *((address, size, -1) for address, size in live.items())]:
        bounds[address] = bounds.get(address, 0) + sign
        bounds[address + size] = bounds.get(address + size, 0) - sign
    depth, begin = 0, None
    for address in sorted(bounds):
        if begin is not None and (depth + bounds[address] < 1 or address in starts):
            yield address - begin
            begin = None
        depth += bounds[address]
        if depth >= 1 and begin is None:
            begin = address
