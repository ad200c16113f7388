"""Recordings from the file of `torch.cuda.memory._dump_snapshot`, one for each device.

The keys are those of torch/csrc/cuda/Module.cpp, as PyTorch has written them since 2.0. Every key that is used is
checked; others are ignored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.memory.recording.recording import (
    ACTIONS,
    MAX_ADDRESS,
    MAX_EVENTS,
    MAX_SIZE,
    Annotation,
    Event,
    Frame,
    LiveBlock,
    Recording,
    Segment,
    printable,
)
from lean_finetune.memory.recording.snapshot_pickle import read_plain_pickle
from lean_finetune.memory.recording.undo_events import MemoryState

MAX_SEGMENTS, MAX_DEVICES = 100_000, 1024
MAX_FRAMES = 20_000_000
DEFAULT_POOL = (0, 0)
Plain = Mapping[str, Any]


class WrongKey(Exception):
    """A key has a value of the wrong kind."""


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


def _value(holder: Any, key: str, kind: type | tuple[type, ...], place: str) -> Any:
    """A value of a dictionary, of this type."""
    if type(holder) is not dict:
        raise WrongKey(f"{place} must be a dictionary")
    if key not in holder or not isinstance(holder[key], kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        got = type(holder[key]).__name__ if key in holder else "nothing"
        raise WrongKey(f"{place}{key} must be {' or '.join(each.__name__ for each in kinds)}, got {got}")
    return holder[key]


def _whole(holder: Plain, key: str, place: str, end: int) -> int:
    """A whole number of a dictionary, from 0 and below `end`."""
    number = holder.get(key) if type(holder) is dict else None
    if type(number) is not int or not 0 <= number < end:
        _value(holder, key, int, place)
        raise WrongKey(f"{place}{key} must be a whole number from 0 and below {end}")
    return number


@dataclass
class _Stacks:
    """Every different stack once. PyTorch shares lists of frames, so each is read once."""

    stacks: list[tuple[Frame, ...]] = field(default_factory=list)
    frames_read: int = 0
    _by_list: dict[int, int] = field(default_factory=dict)
    _by_frames: dict[tuple[int, ...], int] = field(default_factory=dict)
    _frames: dict[int, Frame] = field(default_factory=dict)

    def index(self, holder: Plain, place: str) -> int | None:
        """The stack of an event or a block; None without frames."""
        if "frames" not in holder:
            return None
        frames = holder["frames"]
        if (index := self._by_list.get(id(frames))) is not None:
            return index
        if not _value(holder, "frames", list, place):
            return None
        key = tuple(map(id, frames))
        if key not in self._by_frames:
            self.frames_read += len(frames)
            _limit("frames of different stacks", self.frames_read, MAX_FRAMES)
            self._by_frames[key] = len(self.stacks)
            known = list(map(self._frames.get, key))
            stack = (found or self._frame(frame, place) for found, frame in zip(known, frames, strict=True))
            self.stacks.append(tuple(stack))
        self._by_list[id(frames)] = self._by_frames[key]
        return self._by_frames[key]

    def _frame(self, frame: Any, place: str) -> Frame:
        if (found := self._frames.get(id(frame))) is None:
            place = f"{place}frames[…]."
            file, function = (_value(frame, key, str, place) for key in ("filename", "name"))
            line = max(0, _value(frame, "line", int, place))
            found = Frame(printable(file), line, printable(function))
            self._frames[id(frame)] = found
        return found


def _recordings(content: Any, name: str) -> Iterator[Recording]:
    """The recordings of a snapshot, by device."""
    segments, traces = (_value(content, key, list, "") for key in ("segments", "device_traces"))
    for number, trace in enumerate(traces):
        if type(trace) is not list:
            raise WrongKey(f"device_traces[{number}] must be list, got {type(trace).__name__}")
    _limit("segments", len(segments), MAX_SEGMENTS)
    _limit("device_traces", len(traces), MAX_DEVICES)
    _limit("device_traces: events", sum(map(len, traces)), MAX_EVENTS)
    blocks = [_value(segment, "blocks", list, f"segments[{number}].") for number, segment in enumerate(segments)]
    _limit("segments: blocks", sum(map(len, blocks)), MAX_EVENTS)
    stacks = _Stacks()
    by_device: dict[int, list[Segment]] = {}
    for number, segment in enumerate(segments):
        place = f"segments[{number}]."
        device = _whole(segment, "device", place, MAX_DEVICES) if "device" in segment else 0
        by_device.setdefault(device, []).append(_segment(segment, stacks, place))
    for device in sorted({*by_device, *(number for number, trace in enumerate(traces) if trace)}):
        trace = traces[device] if device < len(traces) else []
        events = tuple(_event(event, stacks, f"device_traces[{device}][{n}].") for n, event in enumerate(trace))
        yield _recording(name, device, by_device.get(device, []), events, stacks.stacks, content)


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise WrongKey(f"{what}: at most {most:,} are read, got {count:,}")


def _segment(segment: Plain, stacks: _Stacks, place: str) -> Segment:
    """A segment with its live blocks. Blocks follow each other without gaps, and older versions write no addresses."""
    start, size = _whole(segment, "address", place, MAX_ADDRESS), _whole(segment, "total_size", place, MAX_SIZE)
    at, live = start, []
    for number, block in enumerate(segment["blocks"]):
        inside = f"{place}blocks[{number}]."
        count, state = _whole(block, "size", inside, MAX_SIZE), _value(block, "state", str, inside)
        if state.startswith("active"):  # active_allocated; active_pending_free waits for another stream.
            requested = _whole(block, "requested_size", inside, MAX_SIZE) if "requested_size" in block else count
            stack = stacks.index(_with_frames(block, inside), inside)
            live.append(LiveBlock(address=at, bytes=count, requested_bytes=requested, stack=stack))
        at += count
    if at > start + size:
        raise WrongKey(f"{place}blocks must have at most total_size bytes together")
    kind = _value(segment, "segment_type", str, place)
    return Segment(
        address=start,
        bytes=size,
        stream=_whole(segment, "stream", place, MAX_ADDRESS),
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
    newest = _value(block, "history", list, place)[0]
    return newest if type(newest) is dict else {}


def _event(event: Plain, stacks: _Stacks, place: str) -> Event:
    action = _value(event, "action", str, place)
    if action not in ACTIONS:
        raise WrongKey(f"{place}action must be one of {', '.join(ACTIONS)}, got {printable(action)[:40]!r}")
    address = "device_free" if action == "oom" else "addr"
    return Event(
        action=action,
        address=_whole(event, address, place, MAX_ADDRESS),
        bytes=_whole(event, "size", place, MAX_SIZE),
        stream=_whole(event, "stream", place, MAX_ADDRESS),
        stack=stacks.index(event, place),
        time_us=_whole(event, "time_us", place, MAX_ADDRESS) if "time_us" in event else None,
        private_pool=_pool(event, "pool_id", place),
    )


def _pool(holder: Plain, key: str, place: str) -> tuple[int, int]:
    """The id of a private pool."""
    if key not in holder:
        return DEFAULT_POOL
    numbers = tuple(_value(holder, key, (tuple, list), place))
    if numbers != DEFAULT_POOL and [type(number) for number in numbers] != [int, int]:
        raise WrongKey(f"{place}{key} must be two whole numbers")
    return numbers[0], numbers[1]


def _annotations(content: Plain, device: int) -> tuple[Annotation, ...]:
    """The ranges that the program named, of this device."""
    if "external_annotations" not in content:
        return ()
    found = []
    for number, annotation in enumerate(_value(content, "external_annotations", list, "")[:MAX_EVENTS]):
        place = f"external_annotations[{number}]."
        if _whole(annotation, "device", place, MAX_ADDRESS) != device:
            continue
        stage, name = (_value(annotation, key, str, place) for key in ("stage", "name"))
        if stage in ("START", "END"):
            time_us = _whole(annotation, "time_us", place, MAX_ADDRESS)
            found.append(Annotation(name=printable(name), stage=stage, time_us=time_us))
    return tuple(sorted(found, key=lambda annotation: annotation.time_us))


def _settings(content: Plain) -> dict[str, Any]:
    """The allocator's settings: numbers, flags, texts, and divisions by interval; PyTorch writes them since 2.2."""
    if "allocator_settings" not in content:
        return {}
    settings = _value(content, "allocator_settings", dict, "")
    divisions = settings.get("roundup_power2_divisions")
    found: dict[str, Any] = {
        printable(key): printable(value) if isinstance(value, str) else value
        for key, value in settings.items()
        if isinstance(value, bool | int | float | str)
    }
    if isinstance(divisions, dict) and all(type(value) is int for value in divisions.values()):
        found["roundup_power2_divisions"] = {printable(key): value for key, value in divisions.items()}
    return found


def _recording(
    name: str,
    device: int,
    segments: Sequence[Segment],
    events: tuple[Event, ...],
    stacks: Sequence[tuple[Frame, ...]],
    content: Plain,
) -> Recording:
    """The recording of one device: its beginning is found by undoing its events."""
    state = MemoryState(segments)
    state.undo(events)
    initial, outside = state.with_blocks()
    earlier = sum(block.stack is not None for segment in initial for block in segment.blocks)
    notes = []
    if not events:
        notes.append(
            "no events were recorded: this is what was live when the snapshot was taken. "
            "torch.cuda.memory._record_memory_history() before the run records them"
        )
    if events and earlier:
        notes.append(
            f"the events begin late: {earlier:,} blocks were recorded before the first of them. Either newer events "
            "have overwritten older ones (raise max_entries of torch.cuda.memory._record_memory_history), or an "
            "earlier recording in the same process had them"
        )
    if conflicts := state.conflicts.total() + outside:
        notes.append(f"{conflicts:,} events do not fit the memory after them: figures are uncertain by these")
    return Recording(
        name=name,
        device=device,
        segments=initial,
        events=events,
        stacks=tuple(stacks),
        settings=_settings(content),
        annotations=_annotations(content, device),
        notes=tuple(notes),
    )
