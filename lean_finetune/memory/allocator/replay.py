"""What a plan reserves, step by step: its micro-batches' events in the plan's order, played to the allocator."""

from collections.abc import Sequence
from dataclasses import dataclass

from lean_finetune.memory.allocator.caching_allocator import UNIT_BYTES, OutOfMemory
from lean_finetune.memory.allocator.cut import FIRST, LATER, UPDATE, Unit
from lean_finetune.memory.allocator.templates import RunModel
from lean_finetune.memory.allocator.unit_player import UnitPlayer, play_template


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
    player = PlanPlayer(model, expandable=expandable, capacity_bytes=capacity_bytes)
    for units in steps:
        player.step(units)
    return player.replay


class PlanPlayer:
    """Plays a plan step by step: what repeats is looked up."""

    def __init__(self, model: RunModel, *, expandable: bool, capacity_bytes: int | None):
        """With what exists before the first step; see `replay`."""
        self._finished: list[StepMemory] = []
        self._error: OutOfMemory | None = None
        self._player: UnitPlayer | None = None
        try:
            self._player = UnitPlayer(model, expandable=expandable, capacity_bytes=capacity_bytes)
        except OutOfMemory as error:
            self._error = error

    @property
    def replay(self) -> Replay:
        """What was played so far."""
        return Replay(steps=tuple(self._finished), out_of_memory=self._error)

    @property
    def played_events(self) -> int:
        """Events that were played so far, not looked up: the time it took."""
        return self._player.played_events if self._player else 0

    def step(self, units: Sequence[Unit]) -> None:
        """Play one more step, unless one before it failed.

        Raises:
            NotAffine: see `replay`.
        """
        if self._error is not None or self._player is None:
            return
        try:
            played = [self._player.play(unit) for unit in units]
        except OutOfMemory as error:
            self._error = error
            return
        self._finished.append(
            StepMemory(
                allocated_peak_bytes=max(unit.allocated_peak_units for unit in played) * UNIT_BYTES,
                reserved_peak_bytes=max(unit.reserved_peak_units for unit in played) * UNIT_BYTES,
                reserved_bytes=played[-1].reserved_units * UNIT_BYTES,
                retries=sum(unit.retries for unit in played),
            )
        )


def stitched_events(model: RunModel, steps: Sequence[Sequence[Unit]]) -> list[tuple[int, int]]:
    """The events of a plan as a direct trace would list them: (storage, ± bytes), storages numbered by birth.

    What is freed with no birth in between may come in another order.

    Raises:
        NotAffine: see `replay`.
    """
    listed = _EventList()
    left: dict[str, list[list[int]]] = {FIRST: [], LATER: [], UPDATE: []}
    for size in model.before_bytes:
        listed.allocate(size)
    for unit in (unit for units in steps for unit in units):
        template = model.template(unit)
        if unit.role == FIRST:
            left[FIRST], left[LATER] = [], []
        foreign = [[unit[rank] for unit in reversed(left[role])] for role, rank in template.events.foreign]
        outliving = play_template(template, template.sizes(unit), foreign, listed)
        left[unit.role] = [*([] if unit.role == UPDATE else left[unit.role]), outliving]
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
