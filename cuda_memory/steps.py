"""The optimizer steps of a recording: where they end, their events in another order, and how memory changes.

A step ends where an optimizer's `step` ends: an annotation that PyTorch's optimizers make, or a stack that contains the
function `step` of a file with "optim" in its path.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuda_memory.growth import LIVE, PEAK, RESERVED, Growth, classify
from cuda_memory.recording import Event, Recording
from cuda_memory.timeline import Timeline
from cuda_memory.units import counted

ANNOTATION = "Optimizer.step#"
"""Prefix of the names under which torch.optim annotates its steps."""
SCALE = 1 << 48
"""Offset between the addresses of two steps, so that no two steps share an address."""


class NoSteps(Exception):
    """The steps of a recording are not known, or cannot be sorted; the message says why."""


def step_ends(recording: Recording) -> list[int]:
    """The numbers of the events after which an optimizer step ended, ascending.

    Raises:
        NoSteps: there are fewer than two.
    """
    ends = _ends_by_annotations(recording) or _ends_by_stacks(recording)
    if len(ends) < 2:
        why = (
            f"ends {counted(len(ends), 'optimizer step')}" if recording.stacks else "has neither stacks nor annotations"
        )
        raise NoSteps(f"steps cannot be compared: the recording {why}, and two are needed")
    return ends


def _ends_by_annotations(recording: Recording) -> list[int]:
    times = [event.time_us for event in recording.events]
    if not times or None in times:
        return []
    known = [time for time in times if time is not None]
    found = {
        bisect_right(known, annotation.time_us)
        for annotation in recording.annotations
        if annotation.name.startswith(ANNOTATION) and annotation.stage == "END"
    }
    return sorted(found - {0})


def _ends_by_stacks(recording: Recording) -> list[int]:
    in_step = [any(frame.function == "step" and "optim" in frame.file for frame in stack) for stack in recording.stacks]
    ends, last = [], None
    for place, event in enumerate(recording.events):
        if event.action != "alloc" or event.stack is None:
            continue
        if in_step[event.stack]:
            last = place + 1
        elif last is not None:
            ends.append(last)
            last = None
    return ends if last is None else [*ends, last]


Key = tuple[int, int]
"""Size and stream of a block."""
LiveAddresses = dict[Key, list[int]]
"""Addresses of live blocks in the order of their allocation."""


class _Left:
    """Blocks that earlier parts left."""

    def __init__(self) -> None:
        self._count = 0
        self._numbers: dict[Key, list[int]] = defaultdict(list)
        self._by_address: dict[int, tuple[Key, int]] = {}

    def add(self, key: Key, address: int) -> None:
        """Add the block that was allocated last."""
        self._count += 1
        self._numbers[key].append(self._count)
        self._by_address[address] = key, self._count

    def take(self, address: int) -> tuple[Key, int] | None:
        """Remove the block at an address; return its key, and its rank among the blocks with this key."""
        if address not in self._by_address:
            return None
        key, number = self._by_address.pop(address)
        rank = bisect_left(self._numbers[key], number)
        del self._numbers[key][rank]
        return key, rank


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """The events of one optimizer step, or of what precedes and follows the steps."""

    events: Sequence[Event]
    peak_bytes: int
    """The most that it allocates at once, on top of what it finds."""
    taken_over: Mapping[int, tuple[Key, int]]
    """What it frees of earlier parts, by the event's number: size and stream, and the rank among such blocks."""


def largest_first(recording: Recording) -> tuple[Event, ...]:
    """The events with the steps sorted by their peak, the largest first.

    The first step stays the first, because it allocates gradients and optimizer states; events after the last end stay
    the last. A step that frees what the step before it left frees the block of the step that now precedes it that has
    the same size, and the same rank among those of its size.

    Raises:
        NoSteps: the steps are not known, or one frees what no other leaves.
    """
    ends = step_ends(recording)
    if len(ends) < 3:
        raise NoSteps("there is nothing to sort: the recording has fewer than two optimizer steps after the first")
    left, begun = _Left(), defaultdict[Key, list[int]](list)
    for segment in recording.segments:
        for block in segment.blocks:
            left.add((block.requested_bytes, segment.stream), block.address)
            begun[block.requested_bytes, segment.stream].append(block.address)
    bounds = [0, *ends, len(recording.events)]
    parts = [_part(recording.events[start:end], left) for start, end in zip(bounds, bounds[1:], strict=False)]
    ordered = [parts[0], *sorted(parts[1:-1], key=lambda part: -part.peak_bytes), parts[-1]]
    return tuple(_joined(ordered, begun))


def _part(events: Sequence[Event], left: _Left) -> _Part:
    """Describe a part; `left` has what earlier parts left, and becomes what this part leaves."""
    own: dict[int, Event] = {}
    taken_over = {}
    now = peak = 0
    for number, event in enumerate(events):
        if event.action == "alloc":
            own[event.address] = event
            now += event.bytes
            peak = max(peak, now)
        elif event.action == "free_completed" and event.address in own:
            now -= own.pop(event.address).bytes
        elif event.action == "free_completed" and (taken := left.take(event.address)) is not None:
            taken_over[number] = taken
    for event in own.values():
        left.add((event.bytes, event.stream), event.address)
    return _Part(events=events, peak_bytes=peak, taken_over=taken_over)


def _joined(parts: Sequence[_Part], begun: LiveAddresses) -> Iterator[Event]:
    """Join parts in a new order, with addresses that match again.

    Raises:
        NoSteps: a part frees a block of which no live one has the size.
    """
    left: LiveAddresses = defaultdict(list, begun)
    for turn, part in enumerate(parts):
        own: dict[int, Event] = {}
        for number, event in enumerate(part.events):
            if event.action == "alloc":
                own[event.address] = replace(event, address=event.address + turn * SCALE)
                yield own[event.address]
            elif event.action == "free_completed" and event.address in own:
                yield replace(event, address=own.pop(event.address).address)
            elif event.action == "free_completed" and number in part.taken_over:
                key, rank = part.taken_over[number]
                if rank >= len(left[key]):
                    raise NoSteps("steps cannot be sorted: one frees a tensor of a size that no other step leaves")
                yield replace(event, address=left[key].pop(rank))
        for event in own.values():
            left[event.bytes, event.stream].append(event.address)


LEAST_STEPS = 2
LEAST_GROWTH_BYTES = 2**20
TOO_FEW = "fewer than three optimizer steps end in this recording; three are needed to compare"


@dataclass(frozen=True, kw_only=True)
class RecordedSteps:
    """Where training steps begin, and what they leave behind."""

    found_by: str
    """How the steps were found; why not, if there are none."""
    begins: Sequence[int] = ()
    """Numbers of events before each step, ascending."""
    rows: Sequence[dict[str, Any]] = ()
    """Of each complete step: step, live bytes at its end, its peak, reserved bytes at its end."""
    growth: Sequence[Growth] = ()
    grown: Sequence[tuple[str, int, int]] = ()
    """What more is live after the last complete step than after the first: where, bytes, blocks. Largest first."""


def steps_of(timeline: Timeline) -> RecordedSteps:
    """Find the steps of a recording: by named ranges, else by its updates, else by its calls of backward."""
    begins, found_by = _begins(timeline)
    if len(begins) <= LEAST_STEPS:
        return RecordedSteps(found_by=found_by)
    allocated, reserved = timeline.allocated_E, timeline.reserved_E
    rows = [
        {
            "step": number,
            LIVE: int(allocated[end]),
            PEAK: int(allocated[start : end + 1].max()),
            RESERVED: int(reserved[end]),
        }
        for number, (start, end) in enumerate(zip(begins, begins[1:], strict=False))
    ]
    growth = tuple(classify(rows))
    return RecordedSteps(
        found_by=found_by, begins=begins, rows=rows, growth=growth, grown=_grown(timeline, begins[1], begins[-1])
    )


def _begins(timeline: Timeline) -> tuple[list[int], str]:
    """Numbers of events before each step, and how they were found."""
    try:
        if len(ends := step_ends(timeline.recording)) > LEAST_STEPS:
            return ends, "by the ends of optimizer steps"
        reason = TOO_FEW
    except NoSteps as error:
        reason = TOO_FEW if timeline.recording.stacks else str(error)
    if len(begins := _calls_of_backward(timeline)) > LEAST_STEPS:
        return begins, "by the calls of backward"
    return [], reason


def _calls_of_backward(timeline: Timeline) -> list[int]:
    """Where backward begins again after a forward."""
    begins, ready = [], True
    for block in np.flatnonzero(timeline.start_B >= 0):
        origin = timeline.origins_B[block]
        if origin.category == "backward" and ready:
            begins.append(int(timeline.start_B[block]))
            ready = False
        ready |= origin.category == "activations" and not origin.in_backward
    return begins


def _grown(timeline: Timeline, first: int, last: int) -> tuple[tuple[str, int, int], ...]:
    """What more is live at one instant than at an earlier one, by place."""
    bytes_by, blocks_by = Counter[str](), Counter[str]()
    for instant, sign in ((first, -1), (last, 1)):
        for block in timeline.live_at(instant):
            place = timeline.origins_B[block].place
            bytes_by[place] += sign * int(timeline.bytes_B[block])
            blocks_by[place] += sign
    return tuple(
        (place, size, blocks_by[place]) for place, size in bytes_by.most_common() if size >= LEAST_GROWTH_BYTES
    )
