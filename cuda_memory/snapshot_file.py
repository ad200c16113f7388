"""Recordings from the file of `torch.cuda.memory._dump_snapshot`, one for each device.

The keys are those of torch/csrc/cuda/Module.cpp, as PyTorch has written them since 2.0. Every key that is used is
checked; others are ignored. PyTorch keeps the newest events only and writes the state at the end, so the beginning is
found by undoing the events from the last to the first.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from cuda_memory.allocator import UNIT_BYTES
from cuda_memory.errors import UserError
from cuda_memory.recorded_state import settings_of
from cuda_memory.recording import (
    ACTIONS,
    MAX_ADDRESS,
    MAX_EVENTS,
    MAX_SIZE,
    MAX_STACK_FRAMES,
    Action,
    Annotation,
    Event,
    Frame,
    LiveBlock,
    Recording,
    Segment,
    printable,
)
from cuda_memory.snapshot_pickle import read_plain_pickle
from cuda_memory.units import counted

MAX_FRAMES = 20_000_000
Plain = Mapping[str, Any]


class WrongKey(Exception):
    """A key has a value of the wrong kind."""


def value(holder: Any, key: str, kind: type | tuple[type, ...], place: str) -> Any:
    """A value of a dictionary, of this type."""
    if type(holder) is not dict:
        raise WrongKey(f"{place} must be a dictionary")
    if key not in holder or not isinstance(holder[key], kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        got = type(holder[key]).__name__ if key in holder else "nothing"
        raise WrongKey(f"{place}{key} must be {' or '.join(each.__name__ for each in kinds)}, got {got}")
    return holder[key]


def whole(holder: Plain, key: str, place: str, end: int) -> int:
    """A whole number of a dictionary, from 0 and below `end`."""
    number = holder.get(key) if type(holder) is dict else None
    if type(number) is not int or not 0 <= number < end:
        value(holder, key, int, place)
        raise WrongKey(f"{place}{key} must be a whole number from 0 and below {end}")
    return number


@dataclass
class Frames:
    """The frames of a snapshot. PyTorch shares them, so each is read once."""

    by_id: dict[int, Frame] = field(default_factory=dict)
    in_stacks: int = 0
    """In all different stacks of all devices together."""


@dataclass
class Stacks:
    """Every different stack of a device once. PyTorch shares lists of frames, so each is read once."""

    frames: Frames
    stacks: list[tuple[Frame, ...]] = field(default_factory=list)
    _by_list: dict[int, int] = field(default_factory=dict)
    _by_frames: dict[tuple[int, ...], int] = field(default_factory=dict)

    def index(self, holder: Plain, place: str) -> int | None:
        """The stack of an event or a block; None without frames."""
        if "frames" not in holder:
            return None
        frames = holder["frames"]
        if (index := self._by_list.get(id(frames))) is not None:
            return index
        if not value(holder, "frames", list, place):
            return None
        limit("frames of a stack", len(frames), MAX_STACK_FRAMES)
        key = tuple(map(id, frames))
        if key not in self._by_frames:
            self.frames.in_stacks += len(frames)
            limit("frames of different stacks", self.frames.in_stacks, MAX_FRAMES)
            self._by_frames[key] = len(self.stacks)
            known = list(map(self.frames.by_id.get, key))
            stack = (found or self._frame(frame, place) for found, frame in zip(known, frames, strict=True))
            self.stacks.append(tuple(stack))
        self._by_list[id(frames)] = self._by_frames[key]
        return self._by_frames[key]

    def _frame(self, frame: Any, place: str) -> Frame:
        if (found := self.frames.by_id.get(id(frame))) is None:
            place = f"{place}frames[…]."
            file, function = (value(frame, key, str, place) for key in ("filename", "name"))
            line = max(0, value(frame, "line", int, place))
            found = Frame(printable(file), line, printable(function))
            self.frames.by_id[id(frame)] = found
        return found


def limit(what: str, count: int, most: int) -> None:
    """Refuse more than `most`."""
    if count > most:
        raise WrongKey(f"{what}: at most {most:,} are read, got {count:,}")


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
                    size = -(-event.bytes // UNIT_BYTES) * UNIT_BYTES
                    # Without the event's stack, which says where it was freed, not where it was allocated.
                    freed = LiveBlock(address=event.address, bytes=size, requested_bytes=event.bytes)
                    self.blocks[event.address] = freed
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


MAX_SEGMENTS, MAX_DEVICES = 100_000, 1024
MAX_UNKNOWN = 5
"""Unknown actions that are named."""
DEFAULT_POOL = (0, 0)
NAMED_RANGE = "user_defined"
"""The action that some versions wrote, instead of `external_annotations`, where a record_function begins or ends."""


def read_snapshot(path: Path) -> tuple[Recording, ...]:
    """Read the recordings of all devices that have memory or events.

    Raises:
        UserError: the file is no snapshot; the message names the key.
    """
    content = read_plain_pickle(path)
    try:
        recordings = tuple(_recordings(content, path.name))
    except WrongKey as error:
        raise UserError(f"{path}: {error}; it is no snapshot of torch.cuda.memory._dump_snapshot") from None
    if not recordings:
        raise UserError(f"{path}: has neither memory nor events of a device; record while CUDA is in use")
    return recordings


def _recordings(content: Any, name: str) -> Iterator[Recording]:
    """The recordings of a snapshot, by device."""
    segments, traces = (value(content, key, list, "") for key in ("segments", "device_traces"))
    for number, trace in enumerate(traces):
        if type(trace) is not list:
            raise WrongKey(f"device_traces[{number}] must be list, got {type(trace).__name__}")
    limit("segments", len(segments), MAX_SEGMENTS)
    limit("device_traces", len(traces), MAX_DEVICES)
    limit("device_traces: events", sum(map(len, traces)), MAX_EVENTS)
    blocks = [value(segment, "blocks", list, f"segments[{number}].") for number, segment in enumerate(segments)]
    limit("segments: blocks", sum(map(len, blocks)), MAX_EVENTS)
    frames, annotations = Frames(), _annotations(content)
    stacks: defaultdict[int, Stacks] = defaultdict(lambda: Stacks(frames))
    by_device: dict[int, list[Segment]] = {}
    for number, segment in enumerate(segments):
        place = f"segments[{number}]."
        device = whole(segment, "device", place, MAX_DEVICES) if "device" in segment else 0
        by_device.setdefault(device, []).append(_segment(segment, stacks[device], place))
    for device in sorted({*by_device, *(number for number, trace in enumerate(traces) if trace)}):
        trace = _trace(traces[device] if device < len(traces) else [], stacks[device], f"device_traces[{device}]")
        trace.annotations += annotations[device]
        yield _recording(name, device, by_device.get(device, []), trace, stacks[device].stacks, content)


def _segment(segment: Plain, stacks: Stacks, place: str) -> Segment:
    """A segment with its live blocks. Blocks follow each other without gaps, and older versions write no addresses."""
    start, size = whole(segment, "address", place, MAX_ADDRESS), whole(segment, "total_size", place, MAX_SIZE)
    at, live = start, []
    for number, block in enumerate(segment["blocks"]):
        inside = f"{place}blocks[{number}]."
        count, state = whole(block, "size", inside, MAX_SIZE), value(block, "state", str, inside)
        if state.startswith("active"):  # active_allocated; active_pending_free waits for another stream.
            requested = whole(block, "requested_size", inside, MAX_SIZE) if "requested_size" in block else count
            stack = stacks.index(_with_frames(block, inside), inside)
            live.append(LiveBlock(address=at, bytes=count, requested_bytes=requested, stack=stack))
        at += count
    if at > start + size:
        raise WrongKey(f"{place}blocks must have at most total_size bytes together")
    kind = value(segment, "segment_type", str, place)
    return Segment(
        address=start,
        bytes=size,
        stream=whole(segment, "stream", place, MAX_ADDRESS),
        is_expandable=bool(segment.get("is_expandable", False)),
        is_small=kind == "small",
        private_pool=_pool(segment, "segment_pool_id", place),
        blocks=tuple(live),
    )


def _with_frames(block: Plain, place: str) -> Plain:
    """What has the frames of a block: PyTorch 2.0 wrote them into its history."""
    history = block.get("history")
    if not history:
        return block
    newest = value(block, "history", list, place)[0]
    return newest if type(newest) is dict else {}


@dataclass
class _Trace:
    """What a device's trace contains."""

    events: list[Event] = field(default_factory=list)
    annotations: list[Annotation] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    """Other actions, by name."""


def _trace(entries: Sequence[Any], stacks: Stacks, place: str) -> _Trace:
    found = _Trace()
    for number, entry in enumerate(entries):
        inside = f"{place}[{number}]."
        action = value(entry, "action", str, inside)
        if action in ACTIONS:
            found.events.append(_event(action, entry, stacks, inside))
        elif action == NAMED_RANGE:
            found.annotations += _named_range(entry, inside)
        else:
            found.unknown[printable(action)[:40]] += 1
    return found


def _named_range(entry: Plain, place: str) -> Iterator[Annotation]:
    """The annotation of an entry `user_defined`: its frame has the name as its file, and START or END as function."""
    for frame in value(entry, "frames", list, place)[:1] if "frames" in entry else ():
        name, stage = (value(frame, key, str, f"{place}frames[0].") for key in ("filename", "name"))
        if stage in ("START", "END"):
            yield Annotation(name=printable(name), stage=stage, time_us=whole(entry, "time_us", place, MAX_ADDRESS))


def _event(action: Action, event: Plain, stacks: Stacks, place: str) -> Event:
    address = "device_free" if action == "oom" else "addr"
    return Event(
        action=action,
        address=whole(event, address, place, MAX_ADDRESS),
        bytes=whole(event, "size", place, MAX_SIZE),
        stream=whole(event, "stream", place, MAX_ADDRESS),
        stack=stacks.index(event, place),
        time_us=whole(event, "time_us", place, MAX_ADDRESS) if "time_us" in event else None,
        private_pool=_pool(event, "pool_id", place),
    )


def _pool(holder: Plain, key: str, place: str) -> tuple[int, int]:
    """The id of a private pool."""
    if key not in holder:
        return DEFAULT_POOL
    numbers = tuple(value(holder, key, (tuple, list), place))
    if numbers != DEFAULT_POOL and [type(number) for number in numbers] != [int, int]:
        raise WrongKey(f"{place}{key} must be two whole numbers")
    return numbers[0], numbers[1]


def _annotations(content: Plain) -> Mapping[int, list[Annotation]]:
    """The ranges that the program named, by device."""
    found: defaultdict[int, list[Annotation]] = defaultdict(list)
    annotations = value(content, "external_annotations", list, "") if "external_annotations" in content else []
    for number, annotation in enumerate(annotations[:MAX_EVENTS]):
        place = f"external_annotations[{number}]."
        device = whole(annotation, "device", place, MAX_ADDRESS)
        stage, name = (value(annotation, key, str, place) for key in ("stage", "name"))
        if stage in ("START", "END"):
            time_us = whole(annotation, "time_us", place, MAX_ADDRESS)
            found[device].append(Annotation(name=printable(name), stage=stage, time_us=time_us))
    return found


def _settings(content: Plain) -> dict[str, Any]:
    """The allocator's settings: numbers, flags, texts, and divisions by interval; PyTorch writes them since 2.2."""
    if "allocator_settings" not in content:
        return {}
    settings = value(content, "allocator_settings", dict, "")
    divisions = settings.get("roundup_power2_divisions")
    found: dict[str, Any] = {
        printable(key): printable(setting) if isinstance(setting, str) else setting
        for key, setting in settings.items()
        if isinstance(setting, bool | int | float | str)
    }
    if isinstance(divisions, dict) and all(type(number) is int for number in divisions.values()):
        found["roundup_power2_divisions"] = {printable(key): number for key, number in divisions.items()}
    return found


def _recording(
    name: str,
    device: int,
    segments: Sequence[Segment],
    trace: _Trace,
    stacks: Sequence[tuple[Frame, ...]],
    content: Plain,
) -> Recording:
    """The recording of one device: its beginning is found by undoing its events."""
    state, events = MemoryState(segments), tuple(trace.events)
    state.undo(events)
    initial, outside = state.with_blocks()
    earlier = sum(block.stack is not None for segment in initial for block in segment.blocks)
    notes, settings = [], _settings(content)
    try:
        settings_of(Recording(name=name, settings=settings))
    except UserError as error:
        notes.append(f"the allocator's settings are ignored, because PyTorch refuses them: {error}")
        settings = {}
    if not events:
        notes.append(
            "no events were recorded: this is what was live when the snapshot was taken. "
            "torch.cuda.memory._record_memory_history() before the run records them"
        )
    if events and earlier:
        notes.append(
            f"the events begin late: {counted(earlier, 'block')} recorded before the first of them. Either newer "
            "events have overwritten older ones (raise max_entries of torch.cuda.memory._record_memory_history), or an "
            "earlier recording in the same process had them"
        )
    if trace.unknown:
        notes.append(
            f"skipped {counted(trace.unknown.total(), 'event')} of unknown actions: "
            + ", ".join(sorted(trace.unknown)[:MAX_UNKNOWN])
        )
    if conflicts := state.conflicts.total() + outside:
        notes.append(f"events that contradict the memory after them: {conflicts:,}; figures are uncertain by these")
    return Recording(
        name=name,
        device=device,
        segments=initial,
        events=events,
        stacks=tuple(stacks),
        settings=settings,
        annotations=tuple(sorted(trace.annotations, key=attrgetter("time_us"))),
        notes=tuple(notes),
    )
