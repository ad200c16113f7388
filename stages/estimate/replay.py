"""What a plan reserves, step by step: its micro-batches' events in the plan's order, played to the allocator."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stages.estimate.allocator import UNIT_BYTES, CachingAllocator, OutOfMemory, Snapshot
from stages.estimate.cut import FIRST, LATER, UPDATE, Unit
from stages.estimate.templates import BIRTH, RunModel, Template


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """A replayed optimizer step."""

    allocated_peak_bytes: int
    """torch.cuda.max_memory_allocated over the step."""
    reserved_peak_bytes: int
    """torch.cuda.max_memory_reserved over the step."""
    reserved_bytes: int
    """torch.cuda.memory_reserved after it: what the next step finds, and nvidia-smi shows."""
    retries: int
    """How often cached blocks had to be given back in it."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A replayed plan."""

    steps: tuple[StepMemory, ...]
    """The steps that were finished."""
    out_of_memory: OutOfMemory | None
    """Why the step after them failed; None when all were finished."""

    @property
    def settled_step(self) -> int:
        """The first step from which on what is reserved no longer changes; 0 where no step was finished."""
        last = len(self.steps)
        while last > 1 and self.steps[last - 2].reserved_bytes == self.steps[last - 1].reserved_bytes:
            last -= 1
        return max(last - 1, 0)


class Allocates(Protocol):
    """What events can be played to."""

    def allocate(self, count_bytes: int) -> int:
        """Serve a request and return its handle."""

    def free(self, handle: int) -> None:
        """Take back what a handle stands for."""


def replay(model: RunModel, steps: Sequence[Sequence[Unit]], *, expandable: bool, capacity_bytes: int | None) -> Replay:
    """Play a plan to the allocator.

    Args:
        model: the events of its setting.
        steps: the units of each step: first, any number of later ones, update.
        expandable: whether segments expand.
        capacity_bytes: memory for PyTorch's blocks; None for no limit.

    Raises:
        NotAffine: a unit's shape or kind is beyond what was traced.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    player = _RememberingPlayer(model, allocator)
    finished: list[StepMemory] = []
    try:
        player.begin()
        for units in steps:
            finished.append(_replay_step(player, allocator, units))
    except OutOfMemory as error:
        return Replay(steps=tuple(finished), out_of_memory=error)
    return Replay(steps=tuple(finished), out_of_memory=None)


def _replay_step(player: "_RememberingPlayer", allocator: CachingAllocator, units: Sequence[Unit]) -> StepMemory:
    """Play one step and read the allocator's counters, as one would around a real step."""
    retries = allocator.retries
    allocated, reserved = [], []
    for unit in units:
        player.unit(unit)
        allocated.append(allocator.peak_allocated_bytes)
        reserved.append(allocator.peak_reserved_bytes)
    return StepMemory(
        allocated_peak_bytes=max(allocated),
        reserved_peak_bytes=max(reserved),
        reserved_bytes=allocator.reserved_bytes,
        retries=allocator.retries - retries,
    )


def stitched_events(model: RunModel, steps: Sequence[Sequence[Unit]]) -> list[tuple[int, int]]:
    """The events of a plan as a direct trace would list them: (storage, ± bytes), storages numbered by birth.

    What is freed with no birth in between may come in another order.

    Raises:
        NotAffine: see `replay`.
    """
    listed = _EventList()
    player = _Player(model, listed)
    player.begin()
    for units in steps:
        for unit in units:
            player.unit(unit)
    return listed.events


class _EventList:
    """Lists what it is asked for."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self._sizes: list[int] = []

    def allocate(self, count_bytes: int) -> int:
        self._sizes.append(count_bytes)
        self.events.append((len(self._sizes) - 1, count_bytes))
        return len(self._sizes) - 1

    def free(self, handle: int) -> None:
        self.events.append((handle, -self._sizes[handle]))


class _Player:
    """Plays units one after the other; knows what earlier ones left."""

    def __init__(self, model: RunModel, allocator: Allocates):
        self._model, self._allocator = model, allocator
        self._left: dict[str, list[list[int]]] = {FIRST: [], LATER: [], UPDATE: []}

    def begin(self) -> None:
        """Allocate what exists before the first step."""
        for size in self._model.before_bytes:
            self._allocator.allocate(size)

    def unit(self, unit: Unit) -> None:
        """Play one unit."""
        template = self._model.template(unit)
        if unit.role == FIRST:
            self._left[FIRST], self._left[LATER] = [], []
        foreign = [[left[rank] for left in reversed(self._left[role])] for role, rank in template.events.foreign]
        outliving = self._play(template, template.sizes(unit), foreign)
        if unit.role == UPDATE:
            self._left[UPDATE] = []
        self._left[unit.role].append(outliving)

    def _play(self, template: Template, sizes: np.ndarray, foreign: list[list[int]]) -> list[int]:
        """Play a template's events; returns the handles that outlive it, in order of birth."""
        allocate, free = self._allocator.allocate, self._allocator.free
        handles: list[int] = []
        size = iter(sizes.tolist())
        for action in template.events.actions:
            if action == BIRTH:
                handles.append(allocate(next(size)))
            elif action >= 0:
                free(handles[action])
            else:
                for handle in foreign[-2 - action]:
                    free(handle)
        return [handles[place] for place in template.events.outliving]


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What a unit led to from one state of the allocator."""

    after: Snapshot
    outliving: list[int]
    retries: int


class _RememberingPlayer(_Player):
    """Plays a unit once for each state it meets: where shapes repeat, states soon do too.

    The allocator's peaks are those of the last unit played.
    """

    def __init__(self, model: RunModel, allocator: CachingAllocator):
        super().__init__(model, allocator)
        self._caching = allocator
        self._outcomes: dict[Hashable, _Outcome] = {}

    def _play(self, template: Template, sizes: np.ndarray, foreign: list[list[int]]) -> list[int]:
        caching = self._caching
        blocks = (-(-sizes // UNIT_BYTES)).tobytes()
        key = (id(template), blocks, tuple(map(tuple, foreign)), caching.state())
        if key in self._outcomes:
            outcome = self._outcomes[key]
            caching.restore(outcome.after)
            caching.retries += outcome.retries
            return outcome.outliving
        retries = caching.retries
        caching.reset_peaks()
        outliving = super()._play(template, sizes, foreign)
        self._outcomes[key] = _Outcome(after=caching.snapshot(), outliving=outliving, retries=caching.retries - retries)
        return outliving
