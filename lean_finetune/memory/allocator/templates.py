"""The events of a step for every shape and depth, from traces of a few.

The step makes and frees the same tensors in the same order whatever the shapes, and the bytes of each are a constant
plus whole multiples of a few figures of the shape (its tokens, its supervised tokens, …). A traced run is cut into
units: what exists before the first step, the first micro-batch of a step, a later one, and the update that ends it.
More layers, and more chunks of the loss, insert the same blocks once more (module `program`). Each tensor's
bytes are fitted from several traces and must be met by all of them exactly; the units of any sequence of batches can
then be put one after the other (module `replay`). Peaks are never extrapolated, only sizes.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lean_finetune.memory.allocator.cut import (
    FREE,
    MAKE,
    UPDATE,
    Living,
    NotAffine,
    Piece,
    Role,
    Timeline,
    Token,
    Unit,
    cut,
    left_by,
)
from lean_finetune.memory.allocator.find_program import find_program
from lean_finetune.memory.allocator.loops import find_loops
from lean_finetune.memory.allocator.program import LAYERS, TRACED_TURNS, Counts, Program, Turns, count_births
from lean_finetune.memory.allocator.sizes import Tie, fit_sizes, tell_apart

BIRTH = -1


@dataclass(frozen=True, kw_only=True)
class Events:
    """A unit's events, without sizes."""

    actions: tuple[int, ...]
    """BIRTH, or what is freed: the number of a birth of this unit, or a place in `foreign` as -2 - place."""
    foreign: tuple[tuple[str, int], ...]
    """Role of the unit that made what is freed here, and the tensor's rank among those that outlived that unit. Of a
    role that a step has several times, the tensors of all of them are freed there."""
    births: int
    outliving: tuple[int, ...]
    """Births of this unit that it does not free."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteSizes:
    """Bytes of the births of every site, for any figures."""

    constant: np.ndarray
    """Bytes that depend on no figure, int64, by site."""
    slopes: Mapping[str, np.ndarray]
    """Bytes per unit of a figure, int64, by site; figures no birth depends on are left out."""
    ties: tuple[Tie, ...]
    """What the traces could not tell apart."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Template:
    """The events of a kind of unit, for any figures."""

    role: Role
    events: Events
    turns: tuple[Turns, ...]
    """Where actions repeat, with births of equal sizes."""
    layers: int
    sizes_by_site: SiteSizes
    sites: np.ndarray
    """Of each birth."""

    def sizes(self, unit: Unit) -> np.ndarray:
        """Bytes of each birth, in order, int64.

        Raises:
            NotAffine: figures differ that went together in all traces.
        """
        figures = {**unit.figures, LAYERS: self.layers}
        for tie in self.sizes_by_site.ties:
            if tie.figure != LAYERS and not tie.holds(figures):
                known = "constant" if tie.like is None else f"tied to {tie.like}"
                raise NotAffine(
                    f"{tie.figure} was {known} in all traces of {unit.role} units; got {dict(unit.figures)}"
                )
        known_sizes = self.sizes_by_site
        total = known_sizes.constant + sum(slope * figures[name] for name, slope in known_sizes.slopes.items())
        return total[self.sites]


class RunModel:
    """The events of any run of one setting."""

    def __init__(
        self,
        before_bytes: Sequence[int],
        programs: Mapping[tuple[Role, Hashable], tuple[Program, SiteSizes]],
        layers: int,
        movable: Callable[[Hashable], bool],
    ):
        """What exists before the first step, in order, and the programs of units by role and kind.

        `movable` as in `Timeline`.
        """
        self.before_bytes, self._programs, self._layers = tuple(before_bytes), programs, layers
        self._movable = movable
        self._templates: dict[tuple[Role, Hashable, int], Template] = {}
        self._left: dict[str, tuple[Hashable, ...]] = {}

    def template(self, unit: Unit) -> Template:
        """The events of a unit.

        Raises:
            NotAffine: no unit of this role and kind was traced, or its loops run as often as no trace tells.
        """
        key = (unit.role, unit.kind, unit.chunks)
        if key not in self._templates:
            if key[:2] not in self._programs:
                raise NotAffine(f"no {unit.role} unit of kind {unit.kind!r} was traced")
            program, sizes = self._programs[key[:2]]
            counts = Counts(layers=self._layers, chunks=unit.chunks)
            tokens, sites = program.unroll(counts)
            events, left = _resolve(tokens, self._left_by, self._movable)
            if left != self._left_by(unit.role):
                raise NotAffine(f"{unit.role} units of kind {unit.kind!r} leave other tensors")
            found, turns = np.array(sites, dtype=np.int64), program.turns(counts)
            self._templates[key] = Template(
                role=unit.role, events=events, turns=turns, layers=self._layers, sizes_by_site=sizes, sites=found
            )
        return self._templates[key]

    def _left_by(self, role: str) -> tuple[Hashable, ...]:
        """Kinds of what units of a role leave."""
        if role not in self._left:
            program = next(program for (known, _), (program, _) in self._programs.items() if known == role)
            tokens, _ = program.unroll(Counts(layers=self._layers, chunks=program.counts.chunks))
            living = Living()
            born = 0
            kinds: list[Hashable] = []
            for token in tokens:
                if token[0] == MAKE:
                    living.add(token[1], born)
                    kinds.append(token[1])
                    born += 1
                elif token[0] == FREE:
                    living.take(token[1], _number(token[2]))
            self._left[role] = tuple(kinds[number] for number in _in_order(living, kinds, self._movable))
        return self._left[role]


def fit(timelines: Sequence[Timeline], layers: int | None = None) -> RunModel:
    """Find the events of any run from traces of a few shapes.

    For n figures in the size of one tensor, n + 2 traces of different shapes are needed: the last checks the others.
    Where models of several depths were traced, those are three at one distance, of one shape; all other shapes are of
    the least. Of a loss in chunks, units of three consecutive numbers of them that are alike otherwise are needed.
    Steps have at least two micro-batches, so that the update's frees are all seen; updates after one are left out where
    that is so.

    Args:
        timelines: the traces.
        layers: of the model whose run is asked for; None for that of the traces.

    Raises:
        NotAffine: the events of a kind differ, their sizes are no such sums, or the shapes cannot tell figures apart.
    """
    befores: dict[int, set[tuple[tuple[Hashable, int], ...]]] = {}
    by_kind: dict[tuple[Role, Hashable], list[Piece]] = {}
    for timeline in timelines:
        before, pieces = cut(timeline)
        befores.setdefault(timeline.layers, set()).add(before)
        for piece in pieces:
            by_kind.setdefault((piece.unit.role, piece.unit.kind), []).append(piece)
    wanted = min(befores) if layers is None else layers
    for key in [key for key in by_kind if key[0] == UPDATE]:
        by_kind[key] = _after_several(by_kind[key])
    programs = {key: find_program(pieces, _named(key)) for key, pieces in by_kind.items()}
    sizes: dict[tuple[Role, Hashable], SiteSizes] = {}
    for keys in _with_equal_births(programs, by_kind):
        pooled = [(programs[key], piece) for key in keys for piece in by_kind[key]]
        found = _fit_sites(pooled, _named(keys[0]))
        sizes |= {key: found for key in keys}
    fitted = {key: (program, sizes[key]) for key, program in programs.items()}
    return RunModel(_before_bytes(befores, wanted), fitted, wanted, timelines[0].movable)


def _named(key: tuple[Role, Hashable]) -> str:
    """A kind of unit as it is told."""
    return f"{key[0]} units of kind {key[1]!r}"


def _after_several(updates: Sequence[Piece]) -> list[Piece]:
    """Updates of steps with several micro-batches, where every depth has one; else all."""
    several = [piece for piece in updates if piece.unit.figures.get("micro_batches", 2) > 1]
    return several if {piece.layers for piece in several} == {piece.layers for piece in updates} else list(updates)


def _before_bytes(befores: Mapping[int, set[tuple[tuple[Hashable, int], ...]]], layers: int) -> list[int]:
    """Sizes of what exists before the first step.

    Raises:
        NotAffine: traces of a depth begin with different states, or depths do not tell of `layers`.
    """
    if any(len(found) != 1 for found in befores.values()):
        raise NotAffine("the traces begin with different states")
    depths = sorted(befores)
    states = [next(iter(befores[depth])) for depth in depths]
    if len(depths) == 1:
        turns, insertions = layers - depths[0], []
    elif len(depths) == TRACED_TURNS:
        turns, insertions = (layers - depths[0]) // (depths[1] - depths[0]), find_loops(*states)
    else:
        raise NotAffine(f"depths {depths} are not three at one distance")
    if turns and not insertions:
        raise NotAffine(f"{layers} layers do not follow from those traced")
    sizes: list[int] = []
    place = 0
    for insertion in insertions:
        sizes += [size for _, size in states[0][place : insertion.place]]
        sizes += [size for _, size in insertion.block] * turns
        place = insertion.place
    return [*sizes, *(size for _, size in states[0][place:])]


def _with_equal_births(
    programs: Mapping[tuple[Role, Hashable], Program], by_kind: Mapping[tuple[Role, Hashable], Sequence[Piece]]
) -> list[list[tuple[Role, Hashable]]]:
    """Kinds in groups that make the same tensors in the same order at the same sites, whatever they free."""
    groups: dict[Hashable, list[tuple[Role, Hashable]]] = {}
    for key, program in programs.items():
        births = tuple(token[1] for token in program.base if token[0] == MAKE)
        blocks = tuple(
            (block.loop, block.sites, tuple(token[1] for token in block.tokens if token[0] == MAKE))
            for block in program.blocks
        )
        figures = tuple(sorted(by_kind[key][0].unit.figures))
        few = tuple(
            (chunks, part.sites, count_births(program.base[: part.start]), count_births(program.base[: part.end]))
            for chunks, parts in program.few.items()
            for part in parts
        )
        groups.setdefault((births, blocks, few, figures), []).append(key)
    return list(groups.values())


def _fit_sites(pooled: Sequence[tuple[Program, Piece]], what: str) -> SiteSizes:
    """The sums that give all sizes seen.

    Raises:
        NotAffine: see `fit`.
    """
    count = 1 + max(max(program.all_sites, default=-1) for program, _ in pooled)
    names = sorted(pooled[0][1].unit.figures)
    if len({piece.layers for _, piece in pooled}) > 1:
        names.append(LAYERS)
    samples: dict[tuple[int, ...], np.ndarray] = {}
    for program, piece in pooled:
        figures = {**piece.unit.figures, LAYERS: piece.layers}
        sites = np.array(program.unroll(Counts(layers=piece.layers, chunks=piece.unit.chunks))[1], dtype=np.int64)
        found = samples.setdefault(tuple(figures[name] for name in names), np.full(count, -1, dtype=np.int64))
        fresh = found[sites] < 0
        found[sites[fresh]] = np.array(piece.sizes, dtype=np.int64)[fresh]
        if (found[sites] != piece.sizes).any():
            raise NotAffine(f"{what}: tensors of a loop differ in size from turn to turn")
    figures_SF = np.array(list(samples), dtype=np.int64).reshape(len(samples), -1)
    sizes_SB = np.stack(list(samples.values()))
    free, ties = tell_apart(names, [dict(zip(names, row, strict=True)) for row in figures_SF.tolist()])
    figures_SF = figures_SF[:, [names.index(name) for name in free]]
    constant, slopes_FB = np.zeros(count, np.int64), np.zeros((len(free), count), np.int64)
    seen_SB = sizes_SB >= 0
    for mask in np.unique(seen_SB, axis=1).T:
        chosen = np.flatnonzero((seen_SB == mask[:, None]).all(axis=0))
        constant[chosen], slopes_FB[:, chosen] = fit_sizes(figures_SF[mask], sizes_SB[np.ix_(mask, chosen)], what)
    slopes = {name: slope for name, slope in zip(free, slopes_FB, strict=True) if slope.any()}
    return SiteSizes(constant=constant, slopes=slopes, ties=tuple(ties))


def _number(value: Hashable) -> int:
    """The number in a token."""
    assert isinstance(value, int)
    return value


def _resolve(
    tokens: Sequence[Token], left_by_role: Callable[[str], Sequence[Hashable]], movable: Callable[[Hashable], bool]
) -> tuple[Events, tuple[Hashable, ...]]:
    """Tokens as actions, and the kinds of what outlives the unit.

    Raises:
        NotAffine: what is freed does not exist.
    """
    living = Living()
    left: dict[str, Living] = {}
    actions: list[int] = []
    foreign: list[tuple[str, int]] = []
    kinds: list[Hashable] = []
    for token in tokens:
        if token[0] == MAKE:
            living.add(token[1], len(kinds))
            kinds.append(token[1])
            actions.append(BIRTH)
        elif token[0] == FREE:
            actions.append(living.take(token[1], _number(token[2])))
        else:
            role = str(token[1])
            if role not in left:
                left[role] = left_by(left_by_role(role))
            actions.append(-2 - len(foreign))
            foreign.append((role, left[role].take(token[2], _number(token[3]))))
    outliving = _in_order(living, kinds, movable)
    events = Events(actions=tuple(actions), foreign=tuple(foreign), births=len(kinds), outliving=outliving)
    return events, tuple(kinds[number] for number in outliving)


def _in_order(living: Living, kinds: Sequence[Hashable], movable: Callable[[Hashable], bool]) -> tuple[int, ...]:
    """What outlives a unit: of movable kinds, then of others, each in order of birth."""
    return tuple(sorted(living.numbers, key=lambda number: not movable(kinds[number])))
