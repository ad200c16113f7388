"""The events of a step for every shape, from traces of a few.

The step makes and frees the same tensors in the same order whatever the shapes, and the bytes of each are a constant
plus whole multiples of a few figures of the shape (its tokens, its supervised tokens, …). A traced run is cut into
units: what exists before the first step, the first micro-batch of a step, a later one, and the update that ends it.
Each unit's bytes are fitted from several traces and must be met by all of them exactly; the units of any sequence of
batches can then be put one after the other (`stages.estimate.replay`). Peaks are never extrapolated, only sizes.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Final, Literal

import numpy as np

FIRST: Final = "first"
LATER: Final = "later"
UPDATE: Final = "update"
Role = Literal["first", "later", "update"]
BIRTH = -1
MOST_TERMS = 2
"""Figures of the shape in the size of one tensor."""


class NotAffine(Exception):
    """The traces do not determine the events of other shapes."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a step."""

    role: Role
    """first or later micro-batch of its step, or its update."""
    kind: Hashable
    """Units of a kind have the same events in the same order: how often loops run belongs here."""
    figures: Mapping[str, int]
    """What its tensors' sizes depend on."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A traced run."""

    events: Sequence[tuple[int, int]]
    """(storage, bytes): positive when it is made, negative when it is freed."""
    units: Sequence[tuple[int, Unit]]
    """The number of events before each unit, and the unit; the events before the first exist before the first step."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """A unit's events, without sizes.

    What is freed with no birth in between is in a fixed order, because Python's varies from build to build: blocks
    freed in any order leave the allocator the same.
    """

    actions: tuple[int, ...]
    """BIRTH, or what is freed: the number of a birth of this unit, or a place in `foreign` as -2 - place."""
    foreign: tuple[tuple[str, int], ...]
    """Role of the unit that made what is freed here, and the tensor's rank among those that outlived that unit. Of a
    role that a step has several times, the tensors of all of them are freed there."""
    births: int
    outliving: tuple[int, ...]
    """Births of this unit that it does not free."""


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A figure that went along with another one in all traces, or was constant: nothing is known where it does not."""

    figure: str
    like: str | None
    """The other figure; None for a constant."""
    base: int
    like_base: int
    rise: int
    run: int
    """figure - base : like - like_base = rise : run."""

    def holds(self, figures: Mapping[str, int]) -> bool:
        """Whether it does so in these figures too."""
        other = 0 if self.like is None else figures[self.like]
        return (figures[self.figure] - self.base) * self.run == (other - self.like_base) * self.rise


@dataclass(frozen=True, kw_only=True, eq=False)
class Template:
    """The events of a kind of unit, for any figures."""

    events: Events
    constant: np.ndarray
    """Bytes of each birth that depend on no figure, int64."""
    slopes: Mapping[str, np.ndarray]
    """Bytes of each birth per unit of a figure, int64; figures no birth depends on are left out."""
    ties: tuple[Tie, ...]
    """What the traces could not tell apart."""

    def sizes(self, unit: Unit) -> np.ndarray:
        """Bytes of each birth, in order, int64.

        Raises:
            NotAffine: figures differ that went together in all traces.
        """
        for tie in self.ties:
            if not tie.holds(unit.figures):
                known = "constant" if tie.like is None else f"tied to {tie.like}"
                raise NotAffine(
                    f"{tie.figure} was {known} in all traces of {unit.role} units; got {dict(unit.figures)}"
                )
        return self.constant + sum(slope * unit.figures[name] for name, slope in self.slopes.items())


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """The events of any run of one setting."""

    before_bytes: tuple[int, ...]
    """Sizes of what exists before the first step, in order."""
    templates: Mapping[tuple[Role, Hashable], Template]
    """By role and kind of unit."""

    def template(self, unit: Unit) -> Template:
        """The events of a unit.

        Raises:
            NotAffine: no unit of this role and kind was traced.
        """
        if (unit.role, unit.kind) not in self.templates:
            raise NotAffine(f"no {unit.role} unit of kind {unit.kind!r} was traced")
        return self.templates[unit.role, unit.kind]


def fit(timelines: Sequence[Timeline]) -> RunModel:
    """Find the events of any run from traces of a few shapes.

    For n figures in the size of one tensor, n + 2 traces of different shapes are needed: the last checks the others.
    Every step has at least two micro-batches, so that the update's frees are all seen.

    Raises:
        NotAffine: the events of a kind differ, their sizes are no such sums, or the shapes cannot tell figures apart.
    """
    before: set[tuple[int, ...]] = set()
    seen: dict[tuple[Role, Hashable], list[tuple[Unit, Events, np.ndarray]]] = {}
    for timeline in timelines:
        start_bytes, units = _cut(timeline)
        before.add(start_bytes)
        for unit, events, sizes in units:
            seen.setdefault((unit.role, unit.kind), []).append((unit, events, sizes))
    if len(before) != 1:
        raise NotAffine("the traces begin with different states")
    return RunModel(before_bytes=before.pop(), templates={key: _fit_kind(key, found) for key, found in seen.items()})


def _cut(timeline: Timeline) -> tuple[tuple[int, ...], list[tuple[Unit, Events, np.ndarray]]]:
    """Sizes of what exists before the first step, and each unit with its events and the sizes of its births.

    Raises:
        NotAffine: something is freed before the first step, or outlives its unit in a way no rule is known for.
    """
    first = timeline.units[0][0]
    if any(change < 0 for _, change in timeline.events[:first]):
        raise NotAffine("something is freed before the first step")
    outlived: dict[int, tuple[str, int]] = {storage: ("", 0) for storage, _ in timeline.events[:first]}
    ends = [start for start, _ in timeline.units[1:]] + [len(timeline.events)]
    cut = []
    for (start, unit), end in zip(timeline.units, ends, strict=True):
        events, sizes, survivors = _cut_unit(timeline.events[start:end], outlived)
        outlived |= {storage: (unit.role, rank) for rank, storage in enumerate(survivors)}
        cut.append((unit, events, sizes))
    return tuple(change for _, change in timeline.events[:first]), cut


def _cut_unit(
    events: Sequence[tuple[int, int]], outlived: dict[int, tuple[str, int]]
) -> tuple[Events, np.ndarray, list[int]]:
    """One unit's events and sizes, and the storages that outlive it.

    `outlived` has the role of earlier units and the rank there of what they left, and loses what this unit frees.

    Raises:
        NotAffine: see `_cut`.
    """
    alive: dict[int, int] = {}
    actions: list[int] = []
    foreign: list[tuple[str, int]] = []
    sizes: list[int] = []
    for born, run in groupby(events, key=lambda event: event[1] > 0):
        if born:
            for storage, size in run:
                alive[storage] = len(sizes)
                sizes.append(size)
                actions.append(BIRTH)
            continue
        freed = {storage for storage, _ in run}
        origins = sorted({outlived.pop(storage) for storage in freed - alive.keys()})
        if any(not role for role, _ in origins):
            raise NotAffine("a step frees what existed before the first step")
        if again := set(origins) & set(foreign):
            raise NotAffine(f"what several {min(again)[0]} units left is not freed together")
        actions += [-2 - len(foreign) - place for place in range(len(origins))]
        foreign += origins
        actions += sorted(alive.pop(storage) for storage in freed & alive.keys())
    outliving = tuple(sorted(alive.values()))
    found = Events(actions=tuple(actions), foreign=tuple(foreign), births=len(sizes), outliving=outliving)
    return found, np.array(sizes, dtype=np.int64), sorted(alive, key=lambda storage: alive[storage])


def _fit_kind(key: tuple[Role, Hashable], found: Sequence[tuple[Unit, Events, np.ndarray]]) -> Template:
    """One kind's events, and the sums that give all sizes seen.

    Raises:
        NotAffine: see `fit`.
    """
    what = f"{key[0]} units of kind {key[1]!r}"
    events = found[0][1]
    if any(other != events for _, other, _ in found[1:]):
        raise NotAffine(f"{what} make or free tensors in different orders")
    names = sorted(found[0][0].figures)
    samples = list({tuple(unit.figures[name] for name in names): (unit, sizes) for unit, _, sizes in found}.values())
    free, ties = _tell_apart(names, [unit.figures for unit, _ in samples])
    figures_SF = np.array([[unit.figures[name] for name in free] for unit, _ in samples], dtype=np.int64)
    constant, slopes_FB = _fit_sizes(figures_SF, np.stack([sizes for _, sizes in samples]), what)
    slopes = {name: slope for name, slope in zip(free, slopes_FB, strict=True) if slope.any()}
    return Template(events=events, constant=constant, slopes=slopes, ties=tuple(ties))


def _tell_apart(names: Sequence[str], samples: Sequence[Mapping[str, int]]) -> tuple[list[str], list[Tie]]:
    """The figures that vary on their own, and how the others go along with one of them."""
    free: list[str] = []
    ties = []
    for name in names:
        if tie := next((t for like in (None, *free) if (t := _tie(name, like, samples)) is not None), None):
            ties.append(tie)
        else:
            free.append(name)
    return free, ties


def _tie(name: str, like: str | None, samples: Sequence[Mapping[str, int]]) -> Tie | None:
    """How a figure follows another one in all samples, or that it is constant; None where it does not."""
    base = samples[0]
    if like is None:
        tie = Tie(figure=name, like=None, base=base[name], like_base=0, rise=0, run=1)
    else:
        other = next(sample for sample in samples if sample[like] != base[like])
        rise, run = other[name] - base[name], other[like] - base[like]
        tie = Tie(figure=name, like=like, base=base[name], like_base=base[like], rise=rise, run=run)
    return tie if all(tie.holds(sample) for sample in samples) else None


def _fit_sizes(figures_SF: np.ndarray, sizes_SB: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Constants (B,) and slopes (F, B), whole numbers that give the sizes (S, B) of S different samples exactly.

    Each birth gets the sum with the fewest figures; one sample more than it has terms must agree with it.

    Raises:
        NotAffine: there are no such numbers.
    """
    (S, F), B = figures_SF.shape, sizes_SB.shape[1]
    constant, slopes = sizes_SB[0].copy(), np.zeros((F, B), dtype=np.int64)
    unexplained = np.flatnonzero((sizes_SB != constant).any(axis=0))
    for terms in range(1, min(MOST_TERMS, S - 2) + 1):
        for chosen in map(list, combinations(range(F), terms)):
            figures = figures_SF[:, chosen]
            design = np.column_stack([np.ones(S), figures])
            if np.linalg.matrix_rank(design) <= terms:
                continue
            solution = np.rint(np.linalg.lstsq(design, sizes_SB[:, unexplained], rcond=None)[0]).astype(np.int64)
            exact = (solution[0] + figures @ solution[1:] == sizes_SB[:, unexplained]).all(axis=0)
            constant[unexplained[exact]] = solution[0][exact]
            slopes[np.ix_(chosen, unexplained[exact])] = solution[1:][:, exact]
            unexplained = unexplained[~exact]
    if len(unexplained):
        seen = sizes_SB[:, unexplained[0]].tolist()
        raise NotAffine(f"birth {unexplained[0]} of {what}: {seen} bytes are no sum of figures of its {S} shapes")
    return constant, slopes
