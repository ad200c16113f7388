"""Find the optimizer steps of a recording, and sort them by what they allocate.

A step ends where an optimizer's `step` ends: an annotation that PyTorch's optimizers make, or a stack that contains the
function `step` of a file with "optim" in its path.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lean_finetune.memory.recording.recording import Event, Frame, Recording

ANNOTATION = "Optimizer.step#"
"""Prefix of the names under which torch.optim annotates its steps."""
SCALE = 1 << 48
"""Moves the addresses of each step apart, so that a step's blocks have names of their own."""


class NoSteps(Exception):
    """The steps of a recording cannot be told apart, or not sorted; the message says why."""


def step_ends(recording: Recording) -> list[int]:
    """The numbers of the events after which an optimizer step ended, ascending.

    Raises:
        NoSteps: there are fewer than two.
    """
    ends = _ends_by_annotations(recording) or _ends_by_stacks(recording)
    if len(ends) < 2:
        why = f"shows {len(ends)} of them" if recording.stacks else "has neither stacks nor annotations"
        raise NoSteps(f"steps cannot be told apart: the recording {why}")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """The events of one optimizer step, and what it takes over from earlier ones."""

    events: Sequence[Event]
    peak_bytes: int
    """The most that it allocates at once, on top of what it finds."""


def largest_first(recording: Recording) -> tuple[Event, ...]:
    """The events with the steps sorted by their peak, the largest first.

    The first step stays the first, because it allocates gradients and optimizer states; events after the last end stay
    the last. A step that frees what the step before it left frees an equally large block of the step that now
    precedes it.

    Raises:
        NoSteps: steps cannot be told apart, or one frees what no other leaves.
    """
    ends = step_ends(recording)
    if len(ends) < 3:
        raise NoSteps("there is nothing to sort: the recording has fewer than two optimizer steps after the first")
    events = recording.events
    bodies = [_step(events[start:end]) for start, end in zip(ends, ends[1:], strict=False)]
    ordered = sorted(bodies, key=lambda step: -step.peak_bytes)
    return tuple(_renamed([events[: ends[0]], *(step.events for step in ordered), events[ends[-1] :]]))


def _step(events: Sequence[Event]) -> _Step:
    live: dict[int, int] = {}
    now = peak = 0
    for event in events:
        if event.action == "alloc":
            live[event.address] = event.bytes
            now += event.bytes
            peak = max(peak, now)
        elif event.action == "free_completed":
            now -= live.pop(event.address, 0)
    return _Step(events=events, peak_bytes=peak)


def _renamed(parts: Sequence[Sequence[Event]]) -> list[Event]:
    """Join parts of a recording in a new order, with addresses that match again.

    Raises:
        NoSteps: a part frees a block of which no live one has the size.
    """
    found: list[Event] = []
    left: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        own: dict[int, Event] = {}
        for event in part:
            if event.action == "alloc":
                own[event.address] = replace(event, address=event.address + number * SCALE)
                found.append(own[event.address])
            elif event.action in ("free_requested", "free_completed"):
                if event.action == "free_requested":
                    continue
                mine = own.pop(event.address, None)
                if mine is not None:
                    found.append(replace(event, address=mine.address))
                elif number == 0:
                    found.append(event)
                else:
                    waiting = left[event.bytes, event.stream]
                    if not waiting:
                        raise NoSteps("steps cannot be sorted: one frees a tensor of a size that no other step leaves")
                    found.append(replace(event, address=waiting.pop()))
            else:
                found.append(event)
        for event in own.values():
            left[event.bytes, event.stream].append(event.address)
    return found
