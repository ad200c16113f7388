"""Every allocation and free of a deep model's steps, in order, from traces of shallow ones.

Reserved memory depends on the whole sequence of requests, so the highest instants of `depth_extrapolation` do not
suffice. A deeper model's sequence has more copies of some parts: a layer's requests in each visit of a phase, and one
layer's share of loops over parameters. Three depths are aligned to find these parts. Literal events between them are
the same at every depth.

An allocation has a size, a free has the position of its allocation. Both must be linear in depth, and in the number of
the copy within a part. Two depths define each line, and the third must lie on it: if the sequence of the deepest trace
does not follow exactly from the other two, nothing is predicted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lean_finetune.memory.predict.depth_extrapolation import NotRepeated
from lean_finetune.memory.predict.layer_repetition import Repetition, find_repetition, shallow_models
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.memory_trace import CATEGORIES, MemoryTrace

NONE = -1
"""Target of an allocation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEvents:
    """Allocations and frees of traced steps, in order. E is the number of events."""

    size_E: np.ndarray
    """Bytes of an allocation before rounding; of the freed one for a free."""
    target_E: np.ndarray
    """Position of the allocation that is freed; NONE for an allocation."""
    stream_E: np.ndarray
    """Stream of an allocation; of the freed one for a free."""
    phases: tuple[tuple[int, int, str], ...]
    """First event and end of each phase, and its name."""
    micro_batches: tuple[int, ...]
    """First event of each micro-batch."""
    workspaces: tuple[tuple[int, int], ...] = ()
    """Allocations of cuBLAS' workspaces, and the event before which each is really made: after its first product."""

    def __len__(self) -> int:
        """The number of events."""
        return len(self.size_E)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Ends of phases and micro-batches, and places of workspaces, ascending: they correspond at all depths."""
        spans = [(start, end) for start, end, _ in self.phases]
        bounds = (place for span in (*spans, *self.workspaces) for place in span)
        return tuple(sorted([0, *self.micro_batches, *bounds, len(self)]))

    def order(self) -> np.ndarray:
        """The events, with frees that follow each other in the order of their allocations."""
        is_alloc_E = self.target_E == NONE
        begins_E = is_alloc_E.copy()
        begins_E[1:] |= is_alloc_E[:-1]
        begins_E[[cut for cut in self.cuts if cut < len(self)]] = True
        return np.lexsort((self.target_E, begins_E.cumsum()))

    def permuted(self, order: np.ndarray) -> "StepEvents":
        """The events in another order, in which allocations keep their places."""
        return replace(self, **{name: getattr(self, name)[order] for name in ("size_E", "target_E", "stream_E")})


def events_of(trace: MemoryTrace) -> StepEvents:
    """The events of a trace of all layers."""
    return _ordered(trace)[0]


def _ordered(trace: MemoryTrace) -> tuple[StepEvents, np.ndarray]:
    """The events of a trace, and the storage of each.

    The order of frees that follow each other does not matter to the allocator, and it differs by chance: autocast
    forgets its copies of weights in the order of a hash table. So they are in the order of their allocations.
    """
    made = np.array(trace.events, dtype=np.int64).reshape(-1, 2)
    storage_E, is_alloc_E = made[:, 0], made[:, 1] > 0
    allocated_at = np.empty(int(is_alloc_E.sum()), dtype=np.int64)  # Storages are numbered from 0.
    allocated_at[storage_E[is_alloc_E]] = np.flatnonzero(is_alloc_E)
    target_E = np.where(is_alloc_E, NONE, allocated_at[storage_E])
    size_E = np.array(trace.exact_bytes, dtype=np.int64)
    events = StepEvents(
        size_E=size_E[storage_E],
        target_E=target_E,
        stream_E=np.array(trace.streams, dtype=np.int64)[storage_E],
        phases=tuple(trace.phases),
        micro_batches=tuple(start for start, _ in trace.micro_batches),
        workspaces=tuple((int(allocated_at[storage]), place) for storage, place in trace.first_products.items()),
    )
    order = events.order()
    return events.permuted(order), storage_E[order]


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparable:
    """The events of one depth, comparable with those of the others."""

    events: StepEvents
    token_E: np.ndarray
    """Number of (allocation or free, operation, category, stream, bytes)."""
    kind_E: np.ndarray
    """The same without the bytes."""
    category_E: np.ndarray
    """Number of the category."""


def comparable(trace: MemoryTrace, numbers: dict[Any, int]) -> Comparable:
    """The events of a trace; `numbers` are those of tokens and kinds at all depths."""
    events, storage_E = _ordered(trace)
    kind_of, token_of = [], []
    made = zip(trace.operations, trace.exact_bytes, trace.streams, strict=True)
    for storage, (operation, size, stream) in enumerate(made):
        kind = (operation, trace.category(storage), stream)
        kind_of.append(numbers.setdefault(kind, len(numbers)))
        token_of.append(numbers.setdefault((kind, size), len(numbers)))
    is_alloc_E = events.target_E == NONE
    return Comparable(
        events=events,
        token_E=np.array(token_of)[storage_E] * 2 + is_alloc_E,
        kind_E=np.array(kind_of)[storage_E] * 2 + is_alloc_E,
        category_E=np.array([CATEGORIES.index(trace.category(k)) for k in range(len(kind_of))])[storage_E],
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of the sequence that a deeper model repeats: so many events from a place in each trace."""

    starts: tuple[int, ...]
    """Where the first copy begins in each trace."""
    length: int
    """Events of a copy."""


def deep_events(traces: Sequence[MemoryTrace], repetition: Repetition) -> StepEvents:
    """Extrapolate the events of a deep model from traces with the numbers of layers in `repetition.traced`.

    Raises:
        NotRepeated: the deepest trace does not follow from the other two.
    """
    numbers: dict[Any, int] = {}
    more = (repetition.layers - repetition.depths[-1]) // repetition.period
    return extrapolated([comparable(trace, numbers) for trace in traces], (0, 1, 2), more)


Deeper = tuple[int, int, int]
"""By how many copies of each part every trace is deeper than the first one, which has one."""
Section = tuple[tuple[int, int], ...]
"""Start and end, in each trace, of the events between two cuts."""


def extrapolated(depths: Sequence[Comparable], deeper: Deeper, more: int) -> StepEvents:
    """The events of a model that has `more` copies of each part than the deepest of three depths.

    Raises:
        NotRepeated: the deepest one does not follow from the other two.
    """
    if len({len(depth.events.cuts) for depth in depths}) > 1:
        raise NotRepeated("a phase runs in some depths alone")
    sections = zip(*(pairwise(depth.events.cuts) for depth in depths), strict=True)
    parts = [part for section in sections for part in _repeated(depths, section, deeper)]
    return _Deepened(depths, parts, deeper, more).events()


def _repeated(depths: Sequence[Comparable], section: Section, deeper: Deeper) -> Iterator[_Part]:
    """The parts that are repeated within a section.

    Raises:
        NotRepeated: there are none by which the depths differ, or references in them are not linear.
    """
    starts = tuple(start for start, _ in section)
    first, second, third = (end - start for start, end in section)
    growth = second - first
    if third - first != deeper[-1] * growth or growth < 0:
        raise NotRepeated(f"a section has {first}, {second}, {third} events")
    found = _Alignment(depths, section, growth, deeper).insertions()
    if found is None:
        raise NotRepeated("events of the depths differ by more than repeated parts")
    shift, free_from = 0, 0
    for place, length in found:
        part = _Place(depths, starts, deeper, place=place, length=length, shift=shift).part(free_from)
        yield part
        free_from = part.starts[0] - starts[0] + length
        shift += length


class _Alignment:
    """Finds where events are inserted as a model gets deeper, in one section."""

    def __init__(self, depths: Sequence[Comparable], section: Section, growth: int, deeper: Deeper):
        self._a, self._b, self._c = (d.token_E[start:end] for d, (start, end) in zip(depths, section, strict=True))
        self._kinds = [d.kind_E[start:end] for d, (start, end) in zip(depths, section, strict=True)]
        self._sizes = [d.events.size_E[start:end] for d, (start, end) in zip(depths, section, strict=True)]
        self._growth, self._deeper = growth, deeper
        self._dead: set[tuple[int, int]] = set()

    def insertions(self) -> list[tuple[int, int]] | None:
        """(Place in the first trace, number of inserted events), ascending; None if there is no such explanation.

        The second trace has them once and the third several times, as copies of the events before the place.
        """
        return self._from(0, 0)

    def _from(self, start: int, shift: int) -> list[tuple[int, int]] | None:
        """The insertions from `start` on, if `shift` events were inserted before."""
        if (start, shift) in self._dead:
            return None
        place = start + self._alike(start, shift)
        if place == len(self._a) and shift == self._growth:
            return []
        # The fewest parts explain most, so the longest is tried first.
        for length in range(min(self._growth - shift, place), 0, -1):
            if self._is_inserted(place, length, shift):
                rest = self._from(place, shift + length)
                if rest is not None:
                    return [(place, length), *rest]
        self._dead.add((start, shift))
        return None

    def _alike(self, start: int, shift: int) -> int:
        """How many events from `start` are alike at all depths, or differ by a size that is linear in depth."""
        count = len(self._a) - start
        count = min(count, len(self._b) - start - shift, len(self._c) - start - self._deeper[-1] * shift)
        ranges = [slice(start + k * shift, start + k * shift + count) for k in self._deeper]
        a, b, c = self._a[ranges[0]], self._b[ranges[1]], self._c[ranges[2]]
        alike = (a == b) & (b == c)
        if not alike.all():
            kinds = [kind[r] for kind, r in zip(self._kinds, ranges, strict=True)]
            low, middle, high = (size[r] for size, r in zip(self._sizes, ranges, strict=True))
            grows = (middle > low) & (high - low == self._deeper[-1] * (middle - low))
            alike |= (kinds[0] == kinds[1]) & (kinds[1] == kinds[2]) & grows
        differ = np.flatnonzero(~alike)
        return int(differ[0]) if len(differ) else count

    def _is_inserted(self, place: int, length: int, shift: int) -> bool:
        """Whether the events before a place are repeated there, once in the second trace and often in the third."""
        copies = self._deeper[-1]
        b, c = place + shift, place + copies * shift
        if c + copies * length > len(self._c) or self._c[c] != self._a[place - length]:
            return False
        copy = self._a[place - length : place]
        return np.array_equal(self._b[b : b + length], copy) and np.array_equal(
            self._c[c : c + copies * length], np.tile(copy, copies)
        )


class _Place:
    """Chooses which copies of a part are repeated: those whose references are linear; the others stay literal.

    Copies near an end of the model may refer to something outside of the layers.
    """

    def __init__(
        self,
        depths: Sequence[Comparable],
        starts: Sequence[int],
        deeper: Deeper,
        *,
        place: int,
        length: int,
        shift: int,
    ):
        self._tokens = depths[0].token_E[starts[0] : starts[0] + place]
        self._target_E = [depth.events.target_E for depth in depths]
        self._origins = [start + k * shift for k, start in zip(deeper, starts, strict=True)]
        self._deeper, self._place, self._length = deeper, place, length

    def part(self, free_from: int) -> _Part:
        """The part; its copies begin at `free_from` or after.

        Raises:
            NotRepeated: none of them have linear references.
        """
        place, length = self._place, self._length
        # The part's copies before `place`, perhaps incomplete: from `earliest` on, each event equals that a copy later.
        unlike = np.flatnonzero(self._tokens[free_from : place - length] != self._tokens[free_from + length : place])
        earliest = free_from + (int(unlike[-1]) + 1 if len(unlike) else 0)
        position = np.arange(earliest, place)
        before = self._is_linear(position, (0, 0, 0))
        after = self._is_linear(position, self._deeper)
        core = self._is_linear_in_copies(position)
        count = len(position) - length + 1
        sums = [np.concatenate([[0], np.cumsum(~good)]) for good in (before, core, after)]
        first = np.arange(count)
        faults = sums[0][first] + sums[1][first + length] - sums[1][first] + sums[2][-1] - sums[2][first + length]
        good = np.flatnonzero(faults == 0)
        if not len(good):
            raise NotRepeated("what a layer frees does not follow from other depths")
        chosen = earliest + int(good[len(good) // 2])
        return _Part(starts=tuple(origin + chosen for origin in self._origins), length=length)

    def _targets(self, depth: int, position: np.ndarray, copy: int) -> np.ndarray:
        """What a copy of events frees, if the first copy has a position."""
        target_E = self._target_E[depth]
        return target_E[np.minimum(self._origins[depth] + position + copy * self._length, len(target_E) - 1)]

    def _is_linear(self, position: np.ndarray, copies: Deeper) -> np.ndarray:
        """Whether what events free is linear in depth."""
        low, middle, high = (self._targets(depth, position, copy) for depth, copy in enumerate(copies))
        return (high - low == self._deeper[-1] * (middle - low)) & ((low == NONE) == (high == NONE))

    def _is_linear_in_copies(self, position: np.ndarray) -> np.ndarray:
        """Whether what events free is linear in depth and in the number of the copy."""
        per_copy = self._targets(1, position, 1) - self._targets(1, position, 0)
        linear = self._is_linear(position, (0, 0, 0))
        for copy in range(self._deeper[-1]):
            linear &= self._targets(2, position, copy + 1) - self._targets(2, position, copy) == per_copy
        return linear


class _Deepened:
    """Puts the events of a deeper model together."""

    def __init__(self, depths: Sequence[Comparable], parts: Sequence[_Part], deeper: Deeper, more: int):
        self._depths, self._parts = [depth.events for depth in depths], parts
        self._deeper, self._more = deeper, more
        self._sizes: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._streams: list[np.ndarray] = []

    def events(self) -> StepEvents:
        """The events.

        Raises:
            NotRepeated: literal events are not linear in depth, or an allocation is freed twice.
        """
        places = [0, 0, 0]
        for part in self._parts:
            self._literal(places, part.starts)
            self._copies(part)
            places = [start + (1 + k) * part.length for k, start in zip(self._deeper, part.starts, strict=True)]
        self._literal(places, [len(events) for events in self._depths])
        last = self._depths[-1]
        moved = self._moved()
        found = StepEvents(
            size_E=np.concatenate(self._sizes),
            target_E=np.concatenate(self._targets),
            stream_E=np.concatenate(self._streams),
            phases=tuple((moved(start), moved(end), name) for start, end, name in last.phases),
            micro_batches=tuple(moved(start) for start in last.micro_batches),
            workspaces=tuple((moved(place), moved(use)) for place, use in last.workspaces),
        )
        check_frees(found)
        return found

    def _literal(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Events that every depth has once."""
        if len({end - start for start, end in zip(starts, ends, strict=True)}) > 1:
            raise NotRepeated("parts do not follow each other alike")
        spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        for name, found in (("size_E", self._sizes), ("target_E", self._targets), ("stream_E", self._streams)):
            low, middle, high = (getattr(events, name)[span] for events, span in zip(self._depths, spans, strict=True))
            if not np.array_equal(high - low, self._deeper[-1] * (middle - low)):
                raise NotRepeated("what is freed between layers is not linear in depth")
            found.append(high + (middle - low) * self._more)

    def _copies(self, part: _Part) -> None:
        """All copies of a part."""
        (first, second, third), (a, b, c) = self._depths, part.starts
        span = slice(c, c + part.length)
        low = third.target_E[span]
        per_copy = third.target_E[c + part.length : c + 2 * part.length] - low
        per_depth = second.target_E[b : b + part.length] - first.target_E[a : a + part.length]
        copies = 1 + self._deeper[-1] + self._more
        self._sizes.append(np.tile(third.size_E[span], copies))
        self._streams.append(np.tile(third.stream_E[span], copies))
        self._targets.append((low + per_depth * self._more + per_copy * np.arange(copies)[:, np.newaxis]).reshape(-1))

    def _moved(self) -> Any:
        """A function from a place between events of the deepest trace, at a cut, to the same place in the result."""
        starts = np.array([part.starts[2] for part in self._parts])
        lengths = np.array([0, *(part.length for part in self._parts)]).cumsum()
        return lambda place: int(place + self._more * lengths[np.searchsorted(starts, place, side="left")])


def check_frees(events: StepEvents) -> None:
    """Check that every free refers to an earlier allocation of its size, which is freed once.

    Raises:
        NotRepeated: it does not.
    """
    frees = np.flatnonzero(events.target_E != NONE)
    targets = events.target_E[frees]
    sound = (
        bool((targets >= 0).all())
        and bool((targets < frees).all())
        and bool((events.target_E[targets] == NONE).all())
        and np.array_equal(events.size_E[targets], events.size_E[frees])
        and len(np.unique(targets)) == len(targets)
    )
    if not sound:
        raise NotRepeated("a deeper model would free what it does not have")


def layers_to_trace(model: TracedModel) -> int:
    """Layers that `step_events` traces."""
    setting = model.setting
    repetition, _ = find_repetition(model.config, setting.train, setting.all_layers_reason)
    return model.config.get_text_config().num_hidden_layers if repetition is None else sum(repetition.depths)


def step_events(model: TracedModel, steps: TracedSteps) -> tuple[StepEvents, str]:
    """The events of steps of a model, and which layers were traced for them, and why.

    Raises:
        UserError: PyTorch cannot trace an operation of the step.
    """
    setting = model.setting
    repetition, reason = find_repetition(model.config, setting.train, setting.all_layers_reason)
    if repetition is not None:
        try:
            traces = [trace_steps(MemoryTrace, one, steps)[0] for one in shallow_models(model, repetition)]
            return deep_events(traces, repetition), reason
        except NotRepeated as error:
            reason = f"all {repetition.layers} layers: {error}"
    return events_of(trace_steps(MemoryTrace, model, steps)[0]), reason
