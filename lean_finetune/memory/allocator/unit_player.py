"""Units one after the other, each played to both pools of an allocator or, where memory ends, to a whole one."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np

from lean_finetune.memory.allocator.caching_allocator import SMALL_UNITS, UNIT_BYTES, CachingAllocator
from lean_finetune.memory.allocator.cut import FIRST, LATER, UPDATE, Unit
from lean_finetune.memory.allocator.pool_events import PoolEvents, pool_events
from lean_finetune.memory.allocator.pool_player import (
    Outcome,
    PoolPlayer,
    Stream,
    load,
)
from lean_finetune.memory.allocator.templates import BIRTH, RunModel, Template

SMALL, LARGE = 0, 1
ROLES = (FIRST, LATER, UPDATE)


class Allocates(Protocol):
    """What events can be played to."""

    def allocate(self, count_bytes: int) -> int:
        """Serve a request and return its handle."""

    def free(self, handle: int) -> None:
        """Take back what a handle stands for."""


@dataclass(frozen=True, kw_only=True)
class PlayedUnit:
    """What a unit led to, in the allocator's units."""

    allocated_peak_units: int
    reserved_peak_units: int
    reserved_units: int
    """After it."""
    retries: int
    after: tuple[int, int] | None
    """Numbers of the two pools' states; None where one allocator has both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Streams:
    """A unit's events by pool."""

    template: Template
    large: np.ndarray
    """Of each birth: whether it is in the pool of large blocks."""
    pools: tuple[Stream, Stream]


class UnitPlayer:
    """Plays units; knows what earlier ones left."""

    def __init__(self, model: RunModel, *, expandable: bool, capacity_bytes: int | None):
        """With what exists before the first step.

        Raises:
            OutOfMemory: that alone is more than there is.
        """
        self._model, self._expandable, self._capacity_bytes = model, expandable, capacity_bytes
        whole = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
        for size in model.before_bytes:
            whole.allocate(size)
        small = [size for size in model.before_bytes if size <= SMALL_UNITS * UNIT_BYTES]
        large = [size for size in model.before_bytes if size > SMALL_UNITS * UNIT_BYTES]
        self._pools = tuple(
            PoolPlayer(sizes, expandable=expandable, capacity_bytes=capacity_bytes, small=pool == SMALL)
            for pool, sizes in enumerate((small, large))
        )
        self._at = self._pools[SMALL].start, self._pools[LARGE].start
        self._events: dict[tuple[int, bytes], PoolEvents] = {}
        self._numbers: dict[Hashable, int] = {}
        self._played: dict[Hashable, PlayedUnit] = {}
        self._whole: WholePlayer | None = None

    @property
    def played_events(self) -> int:
        """Events that were played so far, not looked up."""
        pools = sum(pool.played_events for pool in self._pools)
        return pools + (self._whole.played_events if self._whole else 0)

    def play(self, unit: Unit) -> PlayedUnit:
        """Play one unit.

        Raises:
            NotAffine: its shape or kind is beyond what was traced.
            OutOfMemory: there is no memory for it, also after cached blocks were given back.
        """
        if self._whole is not None:
            return self._whole.play(unit)
        key = (self._at, unit.role, unit.kind, unit.chunks, tuple(unit.figures.values()))
        if key not in self._played:
            found = self._apart(self._split(unit))
            if found is None:
                self._whole = self._join()
                return self._whole.play(unit)
            self._played[key] = found
        played = self._played[key]
        assert played.after is not None
        self._at = played.after
        return played

    def _split(self, unit: Unit) -> _Streams:
        """A unit's events by pool."""
        template = self._model.template(unit)
        units = -(-template.sizes(unit) // UNIT_BYTES)
        large = units > SMALL_UNITS
        pools = self._stream(template, units, ~large), self._stream(template, units, large)
        return _Streams(template=template, large=large, pools=pools)

    def _stream(self, template: Template, units: np.ndarray, chosen: np.ndarray) -> Stream:
        """The chosen births and what becomes of them."""
        place = (id(template), chosen.tobytes())
        if place not in self._events:
            self._events[place] = pool_events(template, chosen)
        events, wanted = self._events[place], units[chosen].astype(np.int32)
        if place not in self._numbers:
            own = (events.outliving, template.role) if events.outliving else None
            foreign = template.events.foreign if (events.actions < BIRTH).any() else ()
            alike = (sha256(events.actions.tobytes()).digest(), own and repr(own), foreign)
            self._numbers[place] = self._numbers.setdefault(alike, len(self._numbers))
        key = (self._numbers[place], sha256(wanted.tobytes()).digest())
        number = self._numbers.setdefault(key, len(self._numbers))
        return Stream(number=number, template=template, events=events, units=wanted)

    def _apart(self, streams: _Streams) -> PlayedUnit | None:
        """Play each pool for itself; None where both together take more than there is."""
        small, large = (
            pool.play(at, stream) for pool, at, stream in zip(self._pools, self._at, streams.pools, strict=True)
        )
        if small is None or large is None:
            return None
        reserved = small.reserved_units + large.reserved_units
        if self._capacity_bytes is not None and reserved > self._capacity_bytes // UNIT_BYTES:
            return None
        return PlayedUnit(
            allocated_peak_units=self._allocated_peak(streams, small, large),
            reserved_peak_units=reserved,
            reserved_units=reserved,
            retries=0,
            after=(small.after, large.after),
        )

    def _allocated_peak(self, streams: _Streams, small: Outcome, large: Outcome) -> int:
        """The most that both pools' blocks hold at an instant."""
        actions = np.array(streams.template.events.actions, dtype=np.int64)
        held = np.empty(len(streams.large), dtype=np.int64)
        held[streams.large], held[~streams.large] = large.held_units, small.held_units
        freed = small.freed_units + large.freed_units
        changes = np.empty(len(actions), dtype=np.int64)
        changes[actions == BIRTH] = held
        own, foreign = actions >= 0, actions < BIRTH
        changes[own] = -held[actions[own]]
        changes[foreign] = -freed[-2 - actions[foreign]]
        before = sum(pool.state(at).allocated_units for pool, at in zip(self._pools, self._at, strict=True))
        return before + max(0, int(changes.cumsum().max(initial=0)))

    def _join(self) -> "WholePlayer":
        """One allocator in the state of both pools: from here on memory is short, and they depend on each other."""
        allocator = CachingAllocator(expandable=self._expandable, capacity_bytes=self._capacity_bytes)
        left: dict[str, list[dict[int, int]]] = {role: [] for role in ROLES}
        for place, (pool, at) in enumerate(zip(self._pools, self._at, strict=True)):
            state = pool.state(at)
            load(allocator, state, small=place == SMALL)
            for role in ROLES:
                left[role] += [{rank: start for rank, (start, _) in unit} for unit in state.left[role]]
        return WholePlayer(self._model, allocator, left)


class WholePlayer:
    """Plays units to one allocator, event by event."""

    def __init__(self, model: RunModel, allocator: CachingAllocator, left: dict[str, list[dict[int, int]]]):
        """Go on from an allocator; `left` has the handles of what units left, by their rank there, by role."""
        self._model, self._allocator, self._left = model, allocator, left
        self.played_events = 0

    def play(self, unit: Unit) -> PlayedUnit:
        """Play one unit.

        Raises:
            NotAffine: its shape or kind is beyond what was traced.
            OutOfMemory: there is no memory for it, also after cached blocks were given back.
        """
        template, allocator, left = self._model.template(unit), self._allocator, self._left
        retries = allocator.retries
        allocator.reset_peaks()
        if unit.role == FIRST:
            left[FIRST], left[LATER] = [], []
        foreign = [
            [of.pop(rank) for of in reversed(left[role]) if rank in of] for role, rank in template.events.foreign
        ]
        self.played_events += len(template.events.actions)
        outliving = play_template(template, template.sizes(unit), foreign, allocator)
        left[unit.role] = [*([] if unit.role == UPDATE else left[unit.role]), dict(enumerate(outliving))]
        return PlayedUnit(
            allocated_peak_units=allocator.peak_allocated_bytes // UNIT_BYTES,
            reserved_peak_units=allocator.peak_reserved_bytes // UNIT_BYTES,
            reserved_units=allocator.reserved_bytes // UNIT_BYTES,
            retries=allocator.retries - retries,
            after=None,
        )


def play_template(
    template: Template, sizes: np.ndarray, foreign: Sequence[Sequence[int]], allocator: Allocates
) -> list[int]:
    """Play a unit's events; returns the handles that outlive it, in order of birth.

    Args:
        template: the events.
        sizes: bytes of each birth.
        foreign: handles of what each place in the template's `foreign` frees.
        allocator: what plays them.
    """
    handles: list[int] = []
    size = iter(sizes.tolist())
    for action in template.events.actions:
        if action == BIRTH:
            handles.append(allocator.allocate(next(size)))
        elif action >= 0:
            allocator.free(handles[action])
        else:
            for handle in foreign[-2 - action]:
                allocator.free(handle)
    return [handles[place] for place in template.events.outliving]
