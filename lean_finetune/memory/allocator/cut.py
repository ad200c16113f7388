"""A traced run cut into units, each a sequence of tokens that is the same whatever the sizes.

What is freed is named by its kind (the operation, module and phase that made it) and its standing: how many tensors of
that kind that still exist were made after it, or before it. So the tokens of a layer are those of the next one, and
those of a deep model follow from shallow ones (`lean_finetune.memory.allocator.program`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal, TypeVar

FIRST: Final = "first"
LATER: Final = "later"
UPDATE: Final = "update"
Role = Literal["first", "later", "update"]
MAKE, FREE, FREE_LEFT = "make", "free", "free left"
Token = tuple[Hashable, ...]
"""(MAKE, kind); (FREE, kind, standing) of this unit's; (FREE_LEFT, role, kind, standing) of what units of a role left.

Of a role that a step has several times, the tensors of all of them are freed there.
"""
Place = TypeVar("Place")


class NotAffine(Exception):
    """The traces do not determine the events of other shapes."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a step."""

    role: Role
    """first or later micro-batch of its step, or its update."""
    kind: Hashable
    """Units of a kind have the same events in the same order, but for how often loops run."""
    figures: Mapping[str, int]
    """What its tensors' sizes depend on."""
    chunks: int = 1
    """How often the loss runs."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A traced run."""

    events: Sequence[tuple[int, int]]
    """(storage, bytes): positive when it is made, negative when it is freed."""
    units: Sequence[tuple[int, Unit]]
    """The number of events before each unit, and the unit; the events before the first exist before the first step."""
    kinds: Mapping[int, Hashable] = field(default_factory=dict)
    """What made each storage; those left out are of one kind."""
    movable: Callable[[Hashable], bool] = lambda kind: False
    """Whether a kind is made at other places of like units: those are told before others freed with them."""
    layers: int = 0
    """Of the traced model."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A unit that was traced."""

    unit: Unit
    layers: int
    tokens: tuple[Token, ...]
    sizes: tuple[int, ...]
    """Bytes of its births, in order."""
    left: tuple[Hashable, ...]
    """Kinds of what outlives it, in order of birth."""

    def sized(self) -> list[tuple[Token, int]]:
        """Its tokens, births with their bytes; 0 for frees."""
        sizes = iter(self.sizes)
        return [(token, next(sizes) if token[0] == MAKE else 0) for token in self.tokens]


class Living:
    """What exists, by kind, the youngest last: turns tensors into their standing and back."""

    def __init__(self) -> None:
        """Nothing exists."""
        self._by_kind: dict[Hashable, list[int]] = {}

    def add(self, kind: Hashable, number: int) -> None:
        """A tensor is made."""
        self._by_kind.setdefault(kind, []).append(number)

    def forget(self, kind: Hashable, number: int) -> int:
        """Forget a tensor; returns its standing: how many of its kind are younger or, where those are fewer, older.

        A number of older ones is told as -1 less that number: both count from 0.
        """
        alive = self._by_kind[kind]
        older = alive.index(number)
        younger = len(alive) - 1 - older
        del alive[older]
        return younger if younger <= older else -1 - older

    def take(self, kind: Hashable, standing: int) -> int:
        """Forget and return the tensor of a kind that stands there.

        Raises:
            NotAffine: there is none.
        """
        alive = self._by_kind.get(kind, [])
        if not -len(alive) <= standing < len(alive):
            raise NotAffine(f"a tensor of kind {kind!r} is freed that does not exist")
        return alive.pop(-1 - standing)

    @property
    def numbers(self) -> list[int]:
        """All that exist, in order of birth."""
        return sorted(number for alive in self._by_kind.values() for number in alive)


def cut(timeline: Timeline) -> tuple[tuple[tuple[Hashable, int], ...], list[Piece]]:
    """Kind and bytes of what exists before the first step, and each unit.

    Raises:
        NotAffine: something is freed before the first step, or outlives its unit in a way no rule is known for.
    """
    first = timeline.units[0][0]
    if any(change < 0 for _, change in timeline.events[:first]):
        raise NotAffine("something is freed before the first step")
    before = tuple((timeline.kinds.get(storage), change) for storage, change in timeline.events[:first])
    outlived: dict[int, tuple[str, int]] = {storage: ("", 0) for storage, _ in timeline.events[:first]}
    ends = [start for start, _ in timeline.units[1:]] + [len(timeline.events)]
    survivors: dict[str, tuple[Hashable, ...]] = {}
    pieces = []
    for (start, unit), end in zip(timeline.units, ends, strict=True):
        cutter = _Cutter(timeline, outlived, survivors)
        pieces.append(cutter.piece(unit, timeline.layers, timeline.events[start:end]))
        outlived |= {storage: (unit.role, rank) for rank, storage in enumerate(cutter.left)}
        survivors[unit.role] = pieces[-1].left
    return before, pieces


class _Cutter:
    """Turns the events of one unit into tokens."""

    def __init__(
        self,
        timeline: Timeline,
        outlived: dict[int, tuple[str, int]],
        survivors: Mapping[str, tuple[Hashable, ...]],
    ):
        """`outlived` has the role of earlier units and the rank there of what they left, and loses what is freed."""
        self._kinds, self._movable, self._outlived = timeline.kinds, timeline.movable, outlived
        self._left = {role: left_by(found) for role, found in survivors.items()}
        self._survivors = survivors
        self._gone: set[tuple[str, int]] = set()
        self.left: list[int] = []
        """Storages that outlive the unit, in order of birth."""

    def piece(self, unit: Unit, layers: int, events: Sequence[tuple[int, int]]) -> Piece:
        """The unit; what is freed with no birth in between is put in order, for Python's varies from build to build."""
        tokens: list[Token] = []
        sizes: list[int] = []
        alive: dict[int, int] = {}
        living = Living()
        for born, run in groupby(events, key=lambda event: event[1] > 0):
            if born:
                for storage, size in run:
                    kind = self._kinds.get(storage)
                    alive[storage] = len(sizes)
                    living.add(kind, len(sizes))
                    sizes.append(size)
                    tokens.append((MAKE, kind))
                continue
            freed = {storage for storage, _ in run}
            tokens += self._frees_left(freed - alive.keys())
            own = sorted(freed & alive.keys(), key=lambda storage: -alive[storage])
            tokens += [
                (FREE, kind := self._kinds.get(storage), living.forget(kind, alive.pop(storage))) for storage in own
            ]
        self.left = sorted(alive, key=lambda storage: alive[storage])
        left = tuple(self._kinds.get(storage) for storage in self.left)
        return Piece(unit=unit, layers=layers, tokens=tuple(tokens), sizes=tuple(sizes), left=left)

    def _frees_left(self, storages: set[int]) -> list[Token]:
        """Tokens for what earlier units left.

        Raises:
            NotAffine: see `cut`.
        """
        origins = sorted({self._outlived.pop(storage) for storage in storages}, reverse=True)
        if any(not role for role, _ in origins):
            raise NotAffine("a step frees what existed before the first step")
        if again := self._gone & set(origins):
            raise NotAffine(f"what several {min(again)[0]} units left is not freed together")
        self._gone |= set(origins)
        tokens: list[Token] = []
        told = [(role, rank, self._survivors[role][rank]) for role, rank in origins]
        for role, rank, kind in sorted(told, key=lambda one: not self._movable(one[2])):
            tokens.append((FREE_LEFT, role, kind, self._left[role].forget(kind, rank)))
        return tokens


def left_by(kinds: Sequence[Hashable]) -> Living:
    """What a unit left, numbered by rank."""
    living = Living()
    for rank, kind in enumerate(kinds):
        living.add(kind, rank)
    return living
