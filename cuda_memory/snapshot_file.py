"""Recordings from the file of `torch.cuda.memory._dump_snapshot`, one for each device.

The keys are those of torch/csrc/cuda/Module.cpp, as PyTorch has written them since 2.0. Every key that is used is
checked; others are ignored.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from cuda_memory.errors import UserError
from cuda_memory.recorded_state import settings_of
from cuda_memory.recording import (
    ACTIONS,
    MAX_ADDRESS,
    MAX_EVENTS,
    MAX_SIZE,
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
from cuda_memory.snapshot_values import Frames, Plain, Stacks, WrongKey, limit, value, whole
from cuda_memory.undo_events import MemoryState
from cuda_memory.units import counted

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
