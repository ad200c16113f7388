"""Find the optimizer steps of a recording, and sort them by what they allocate.

A step ends where an optimizer's `step` ends: an annotation that PyTorch's optimizers make, or a stack that contains the
function `step` of a file with "optim" in its path.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cuda_memory.recording import Event, Frame, Recording
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
    in_step = [any(map(_is_step, stack)) for stack in recording.stacks]
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


def _is_step(frame: Frame) -> bool:
    return frame.function == "step" and "optim" in frame.file


Key = tuple[int, int]
"""Size and stream of a block."""
Blocks = dict[Key, list[int]]
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


def _joined(parts: Sequence[_Part], begun: Blocks) -> Iterator[Event]:
    """Join parts in a new order, with addresses that match again.

    Raises:
        NoSteps: a part frees a block of which no live one has the size.
    """
    left: Blocks = defaultdict(list, begun)
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
