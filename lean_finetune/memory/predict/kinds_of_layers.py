"""Predict a model whose layers are of several kinds from models of a few layers, one or two of each kind.

Where layers of a kind share a tensor, as Gemma 3's do a rotary embedding, memory is not linear in periods of layers:
the lowest layer of the kind frees it. What a layer itself allocates and frees depends on its kind and on whether it is
the lowest or highest of it, not on its place. So the few layers of a first trace show what each layer does inside
itself. What is left, inputs and outputs of layers, gradients, and loops over all parameters, has a layer as its period,
whatever the kinds are: it is extrapolated from three depths as in `deep_events`, and the inner events are put back.

The third model has every kind of layer more than once, in other company. The events of the second and the third one
must be those that follow from the first one's, one by one. Else nothing is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.memory.predict.deep_events import (
    NONE,
    Comparable,
    StepEvents,
    check_frees,
    comparable,
    extrapolated,
)
from lean_finetune.memory.predict.depth_extrapolation import NotRepeated, WindowTrace
from lean_finetune.memory.predict.known_steps import Shown, peak_of, remember
from lean_finetune.memory.predict.layer_repetition import (
    Repetition,
    Signature,
    config_key,
    for_fewer_layers,
    layer_kinds,
    layer_signatures,
    with_some_layers,
)
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.memory_trace import CATEGORIES, Peak
from lean_finetune.memory.trace.setting import Setting

WORTH = 4 / 3
"""A model must have so many times the layers of those that are traced."""
OUTSIDE = -1
"""Number of the layer of events outside of any."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """Which layers stand for all."""

    traced: tuple[tuple[int, ...], ...]
    """The layers of each trace, by number."""
    positions: tuple[int, ...]
    """For each layer, the one of the first trace that works alike, by its number there."""

    @property
    def more(self) -> int:
        """By how many layers the model is deeper than the last trace."""
        return len(self.positions) - len(self.traced[-1])

    @property
    def deeper(self) -> tuple[int, int, int]:
        """By how many layers each trace is deeper than the first one."""
        return 0, 1, len(self.traced[-1]) - len(self.traced[0])

    def text(self) -> str:
        """Which layers are traced, and why."""
        depths = ", ".join(str(len(numbers)) for numbers in self.traced)
        return f"models of {depths} layers: its {len(self.positions)} are of several kinds"


_differ: set[tuple[str, Setting]] = set()
"""Models in settings whose layers differed by more than their kinds in some micro-batches."""


def find_kinds(model: TracedModel, repetition: Repetition | None) -> Kinds | None:
    """Which layers stand for all of a model; None if `repetition` is expected to do, or if they pay too little.

    A tensor that all layers of a kind share is freed at the lowest of them. Below it less is in use, so depths do where
    the last layers of the shallowest one are not there.
    """
    config, setting = model.config, model.setting
    train, signatures = setting.train, layer_signatures(config)
    recomputed_in_part = train.grad_ckpt and (train.recomputed_every > 1 or bool(train.grad_ckpt_layers))
    by_path = train.method != "full" and any("." in target for target in train.lora.targets)
    if recomputed_in_part or by_path or setting.layout.pipeline > 1 or train.offload_activations != "none":
        return None
    if setting.all_layers_reason or signatures is None or (config_key(config), setting) in _differ:
        return None
    kinds = layer_kinds(config)
    shapes = {tuple(item for item in signature if ":" in item[0]) for signature, *_ in kinds}
    if len(kinds) != config.get_text_config().num_hidden_layers or len(set(kinds)) == 1 or len(shapes) > 1:
        return None
    if repetition is not None:
        lowest = max(kinds.index(kind) for kind in set(kinds))
        if lowest < repetition.depths[0] - repetition.period:
            return None
    return _chosen(config, kinds)


def _chosen(config: PretrainedConfig, kinds: Sequence[Signature]) -> Kinds | None:
    """Choose the layers that are traced; None if too many are."""
    count = len(kinds)
    ends = {0, count - 1}
    for kind in set(kinds):
        ends |= {kinds.index(kind), count - 1 - kinds[::-1].index(kind)}
    between: dict[Any, list[int]] = {}
    for number, kind in enumerate(kinds):
        if number not in ends:
            between.setdefault(kind, []).append(number)
    first = sorted(ends | {numbers[0] for numbers in between.values()})
    others = [numbers[1] for numbers in between.values() if len(numbers) > 1]
    if not others:
        return None
    # One more of each kind, and others above those that stand for many.
    third = sorted({*first, *others, *(numbers[0] + 1 for numbers in between.values())})
    traced = tuple(first), tuple(sorted([*first, others[0]])), tuple(third)
    if WORTH * sum(map(len, traced)) > count:
        return None
    if any(layer_kinds(with_some_layers(config, one)) != [kinds[number] for number in one] for one in traced):
        return None
    place = {number: place for place, number in enumerate(first)}
    positions = tuple(place[n] if n in place else place[between[kind][0]] for n, kind in enumerate(kinds))
    return Kinds(traced=traced, positions=positions)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Split:
    """The events of a trace: those inside of layers, and the others. E is the number of all, R of the others."""

    events: StepEvents
    """All events; streams are those of `_with_categories`."""
    spans: dict[tuple[int, int], tuple[int, int]]
    """First event and end by (phase, layer), in the order of the run."""
    layer_E: np.ndarray
    """The layer of each event, or OUTSIDE."""
    visit_E: np.ndarray
    """The phase of each event of a layer."""
    inner_E: np.ndarray
    """Whether an event is inside of a layer: of a tensor that the layer makes and frees, or the free of one that no
    layer makes."""
    outer: Comparable
    """The events that are not inside of a layer; each layer begins with one of no bytes."""
    outer_E: np.ndarray
    """The number there of each event that is not inside of a layer."""

    @property
    def visits(self) -> list[tuple[int, bool]]:
        """Phases in which layers run, and whether in the order of their numbers."""
        first = {visit: layer for visit, layer in reversed(self.spans)}
        return [(visit, first[visit] == 0) for visit in sorted(first)]


def _split(trace: WindowTrace, numbers: dict[Any, int]) -> _Split:
    """Split the events of a trace; `numbers` as for `comparable`.

    Raises:
        NotRepeated: layers do not run one after the other.
    """
    whole = comparable(trace, numbers)
    events, count = _with_categories(whole), len(whole.events)
    if any(start < end for (_, end, _), (start, _, _) in pairwise(trace.phases)):
        raise NotRepeated("a phase is within another one")
    visits = range(len(trace.phases))
    spans = {(visit, layer): (start, end) for visit in visits for start, end, layer in trace.layer_spans(visit)}
    layer_E, visit_E, inner_E = np.full(count, OUTSIDE), np.full(count, OUTSIDE), np.zeros(count, dtype=bool)
    for (visit, layer), (start, end) in spans.items():
        layer_E[start:end], visit_E[start:end] = layer, visit
    frees = np.flatnonzero((events.target_E != NONE) & (layer_E != OUTSIDE))
    made = events.target_E[frees]
    own = layer_E[made] == layer_E[frees]
    inner_E[frees[own | (layer_E[made] == OUTSIDE)]] = True
    inner_E[made[own]] = True
    kept = np.flatnonzero(~inner_E)
    begins = np.array([start for start, _ in spans.values()], dtype=np.int64)
    place_R = np.concatenate([begins, kept])
    order = np.argsort(place_R, kind="stable")  # The beginning of a layer is before its first event.
    place_R, is_event_R = place_R[order], (order >= len(begins))
    outer_E = np.full(count, NONE)
    outer_E[kept] = np.flatnonzero(is_event_R)
    return _Split(
        events=events,
        spans=spans,
        layer_E=layer_E,
        visit_E=visit_E,
        inner_E=inner_E,
        outer=_outer(replace(whole, events=events), place_R, is_event_R, outer_E, numbers),
        outer_E=outer_E,
    )


def _outer(
    whole: Comparable, place_R: np.ndarray, is_event_R: np.ndarray, outer_E: np.ndarray, numbers: dict[Any, int]
) -> Comparable:
    """Events from their places among all; others are the beginnings of layers."""
    events = whole.events
    target_R = events.target_E[place_R]
    begin = 2 * numbers.setdefault("the beginning of a layer", len(numbers)) + 1

    def moved(place: int) -> int:
        return int(np.searchsorted(place_R, place))

    return Comparable(
        events=StepEvents(
            size_E=np.where(is_event_R, events.size_E[place_R], 0),
            target_E=np.where(is_event_R & (target_R != NONE), outer_E[target_R], NONE),
            stream_E=np.where(is_event_R, events.stream_E[place_R], 0),
            phases=tuple((moved(start), moved(end), name) for start, end, name in events.phases),
            micro_batches=tuple(map(moved, events.micro_batches)),
            workspaces=tuple((moved(place), moved(use)) for place, use in events.workspaces),
        ),
        token_E=np.where(is_event_R, whole.token_E[place_R], begin),
        kind_E=np.where(is_event_R, whole.kind_E[place_R], begin),
        category_E=whole.category_E[place_R],
    )


def _with_categories(whole: Comparable) -> StepEvents:
    """The events; their streams tell the category too."""
    return replace(whole.events, stream_E=whole.events.stream_E * len(CATEGORIES) + whole.category_E)


def _filled(outer: StepEvents, shown: _Split, positions: Sequence[int]) -> StepEvents:
    """All events of a model from those that are not inside of its layers.

    `positions` are, for each of its layers, the one of `shown` that works alike.

    Raises:
        NotRepeated: the layers have other events outside of themselves than those of `shown`.
    """
    begins = np.flatnonzero((outer.size_E == 0) & (outer.target_E == NONE))
    numbers = range(len(positions))
    runs = [(visit, n) for visit, upward in shown.visits for n in (numbers if upward else reversed(numbers))]
    if len(begins) != len(runs):
        raise NotRepeated("layers run in some depths alone")
    from_outer, from_shown, starts = [], [], {}
    done, count = 0, 0
    for begin, (visit, number) in zip(begins.tolist(), runs, strict=True):
        start, end = shown.spans[visit, positions[number]]
        kept = np.flatnonzero(~shown.inner_E[start:end])
        own = np.full(end - start, NONE)
        own[kept] = np.arange(begin + 1, begin + 1 + len(kept))
        from_outer += [np.arange(done, begin), own]
        from_shown += [np.full(begin - done, NONE), np.arange(start, end)]
        count += begin - done
        starts[visit, number] = count
        done, count = begin + 1 + len(kept), count + end - start
    from_outer.append(np.arange(done, len(outer)))
    from_shown.append(np.full(len(outer) - done, NONE))
    outer_E, shown_E = np.concatenate(from_outer), np.concatenate(from_shown)
    kept_E = outer_E != NONE
    new_R = np.full(len(outer) + 1, len(outer_E))
    new_R[outer_E[kept_E]] = np.flatnonzero(kept_E)
    new_R[begins] = [starts[run] for run in runs]
    _check_kept(outer, shown.events, outer_E, shown_E)
    target_E = np.where(kept_E, outer.target_E[outer_E], NONE)
    target_E = np.where(target_E == NONE, NONE, new_R[target_E])
    for (visit, number), first in starts.items():
        start, end = shown.spans[visit, positions[number]]
        frees = start + np.flatnonzero(shown.inner_E[start:end] & (shown.events.target_E[start:end] != NONE))
        for free, made in zip(frees.tolist(), shown.events.target_E[frees].tolist(), strict=True):
            if shown.layer_E[made] == OUTSIDE:
                target = new_R[_corresponding(int(shown.outer_E[made]), shown.outer.events, outer)]
            else:
                of_visit = int(shown.visit_E[made])
                target = starts[of_visit, number] + made - shown.spans[of_visit, positions[number]][0]
            target_E[first + free - start] = target

    def use(of_shown: int, of_outer: int) -> int:
        """Where a workspace is used first: perhaps inside of a layer."""
        layer = int(shown.layer_E[of_shown])
        if layer == OUTSIDE:
            return int(new_R[of_outer])
        visit = int(shown.visit_E[of_shown])
        return starts[visit, positions.index(layer)] + of_shown - shown.spans[visit, layer][0]

    uses = zip(shown.events.workspaces, outer.workspaces, strict=True)
    found = StepEvents(
        size_E=np.where(kept_E, outer.size_E[outer_E], shown.events.size_E[shown_E]),
        target_E=target_E,
        stream_E=np.where(kept_E, outer.stream_E[outer_E], shown.events.stream_E[shown_E]),
        phases=tuple((int(new_R[start]), int(new_R[end]), name) for start, end, name in outer.phases),
        micro_batches=tuple(int(new_R[start]) for start in outer.micro_batches),
        workspaces=tuple((int(new_R[place]), use(shows, of)) for (_, shows), (place, of) in uses),
    )
    return found.permuted(found.order())


def _check_kept(outer: StepEvents, shown: StepEvents, outer_E: np.ndarray, shown_E: np.ndarray) -> None:
    """Check that a layer's events outside of itself are those of the layer that works alike.

    Raises:
        NotRepeated: they are not.
    """
    both = (outer_E != NONE) & (shown_E != NONE)
    of_outer, of_shown = outer_E[both], shown_E[both]
    alike = (
        np.array_equal(outer.size_E[of_outer], shown.size_E[of_shown])
        and np.array_equal(outer.stream_E[of_outer], shown.stream_E[of_shown])
        and np.array_equal(outer.target_E[of_outer] == NONE, shown.target_E[of_shown] == NONE)
    )
    if not alike:
        raise NotRepeated("inputs, outputs or gradients of layers differ")


def _corresponding(place: int, shown: StepEvents, deep: StepEvents) -> int:
    """The place, among events outside of layers, that corresponds to one in a shallower model.

    It is as far from the beginning of its section, or from the end if layers run before it.
    """
    cuts, deep_cuts = shown.cuts, deep.cuts
    section = int(np.searchsorted(cuts, place, side="right")) - 1
    before = slice(cuts[section], place)
    if ((shown.size_E[before] == 0) & (shown.target_E[before] == NONE)).any():
        return deep_cuts[section + 1] - cuts[section + 1] + place
    return deep_cuts[section] - cuts[section] + place


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepSteps:
    """The events of steps of a model, with categories."""

    events: StepEvents
    category_E: np.ndarray
    granularity_bytes: int

    def _used_C(self, end: int) -> np.ndarray:
        """Bytes by category after the first events."""
        used_C = np.zeros(len(CATEGORIES), dtype=np.int64)
        np.add.at(used_C, self.category_E[:end], self._change_E[:end])
        return used_C

    @property
    def _change_E(self) -> np.ndarray:
        """Bytes that each event adds, as the allocator rounds them."""
        rounded_E = -(-self.events.size_E // self.granularity_bytes) * self.granularity_bytes
        return np.where(self.events.target_E == NONE, rounded_E, -rounded_E)

    @property
    def before_last_C(self) -> np.ndarray:
        """Bytes by category before the forward pass of the last micro-batch."""
        begin = self.events.micro_batches[-1]
        return self._used_C(next(start for start, _, _ in self.events.phases if start >= begin))

    def peaks(self) -> tuple[dict[str, Peak], int]:
        """Peaks by phase; and the number of the micro-batch with the highest forward or backward peak."""
        used_E = np.concatenate([[0], self._change_E.cumsum()])
        is_instant_E = np.concatenate([[False], self.events.target_E == NONE])
        ends: dict[str, int] = {}
        for start, end, name in self.events.phases:
            instants = np.concatenate([[start], start + 1 + np.flatnonzero(is_instant_E[start + 1 : end + 1])])
            highest = int(instants[np.argmax(used_E[instants])])
            if name not in ends or used_E[highest] > used_E[ends[name]]:
                ends[name] = highest
        fullest = max((ends[name] for name in ("forward", "backward") if name in ends), key=lambda end: used_E[end])
        micro_batch = int(np.searchsorted(self.events.micro_batches, fullest, side="right")) - 1
        return {name: peak_of(self._used_C(end)) for name, end in ends.items()}, micro_batch


def trace_kinds(model: TracedModel, steps: TracedSteps, kinds: Kinds, *, all_events: bool) -> DeepSteps | None:
    """The events of all layers from traces of some; None if they do not follow from these.

    Raises:
        UserError: PyTorch cannot trace an operation of the step.
    """
    fewer = model.with_setting(for_fewer_layers(model.setting, model.config))
    shallow = [fewer.with_config(with_some_layers(model.config, numbers)) for numbers in kinds.traced]
    traces = [trace_steps(WindowTrace, one, steps, all_events=all_events)[0] for one in shallow]
    try:
        deep = deep_steps(traces, kinds, model.target.granularity_bytes)
    except NotRepeated:
        _differ.add((config_key(model.config), model.setting))
        return None
    remember(
        model,
        steps,
        traces[:1],
        Shown(model=shallow[0], layers=kinds.positions, base_C=deep.before_last_C),
        deep.peaks()[0],
        kinds.text(),
    )
    return deep


def deep_steps(traces: Sequence[WindowTrace], kinds: Kinds, granularity_bytes: int) -> DeepSteps:
    """The events of all layers from traces with the layers of `kinds.traced`.

    Raises:
        NotRepeated: the last trace does not follow from the other ones.
    """
    numbers: dict[Any, int] = {}
    splits = [_split(trace, numbers) for trace in traces]
    first = splits[0]
    for split, layers in zip(splits[1:], kinds.traced[1:], strict=True):
        if split.visits != first.visits:
            raise NotRepeated("layers run in some depths alone")
        found = _filled(split.outer.events, first, [kinds.positions[number] for number in layers])
        if not _equal(found, split.events):
            raise NotRepeated("layers of a kind differ by their place")
    outer = extrapolated([split.outer for split in splits], kinds.deeper, kinds.more)
    deep = _filled(outer, first, kinds.positions)
    check_frees(deep)
    stream_E, category_E = np.divmod(deep.stream_E, len(CATEGORIES))
    return DeepSteps(
        events=replace(deep, stream_E=stream_E), category_E=category_E, granularity_bytes=granularity_bytes
    )


def _equal(one: StepEvents, other: StepEvents) -> bool:
    """Whether the events are the same."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("size_E", "target_E", "stream_E")
    ) and (one.phases, one.micro_batches, one.workspaces) == (other.phases, other.micro_batches, other.workspaces)
