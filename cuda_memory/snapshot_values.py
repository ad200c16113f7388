"""Values of a snapshot's dictionaries, each checked, and its stacks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuda_memory.recording import MAX_STACK_FRAMES, Frame, printable

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
