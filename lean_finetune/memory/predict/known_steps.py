"""Predict other micro-batches of a model whose step was traced before, from one trace of a few of its layers.

A search for a limit predicts a dozen micro-batches of one model, which differ in their sizes alone. The first one is
predicted from traces of several depths or of all layers. They show which layers allocate and free alike: the *parts* of
the step in which such layers run have the same events, byte for byte. So a model of a few layers, one of each kind, has
every part of the deep model's step. For other micro-batches that model alone is traced, and its parts are put together
in the order of the deep model: each changes the bytes in use, and has its highest instant, relative to its start.

Parts of the deep model must equal those of the few layers in the first micro-batch, and the first prediction must
follow from them. In other micro-batches, layers that were alike must be alike again, and state and update must be the
same. Else the micro-batch is predicted anew.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lean_finetune.memory.predict.depth_extrapolation import NotRepeated, WindowTrace
from lean_finetune.memory.predict.layer_repetition import (
    Repetition,
    config_key,
    for_fewer_layers,
    layer_kinds,
    layer_signatures,
    shallow_models,
    with_some_layers,
)
from lean_finetune.memory.predict.traced_step import UPDATE_PHASES, TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.gradients_alone import leaves_gradients_alone
from lean_finetune.memory.trace.memory_trace import CATEGORIES, INPUTS, WORKSPACE, Peak
from lean_finetune.memory.trace.setting import Setting

MOST_KNOWN = 2
"""Settings of models whose traces are kept."""
FEWEST = 4
"""The fewest layers that a model is replaced by."""
WORTH = 2
"""A model must have so many times the layers of the one that is traced instead."""
Phases = Mapping[str, np.ndarray]
"""Bytes by category at the highest instant of each phase."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Consecutive events. C is the number of categories."""

    tokens: bytes
    """Operation, category, stream and size of each event; frees that follow each other are sorted."""
    net_C: np.ndarray
    """Bytes that the part leaves, less those that it frees."""
    highest_C: np.ndarray | None
    """Bytes at its highest instant, relative to its start; None if it allocates nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Visit:
    """A phase of forward or backward."""

    phase: str
    before_C: np.ndarray
    """Bytes that change between the phase before and this one."""
    first: Part
    layers: tuple[Part, ...]
    """By number of the layer; none if no layer runs."""
    upward: bool
    """Whether layers run in the order of their numbers."""
    last: Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The last micro-batch of a step, in parts."""

    base_C: np.ndarray
    """Bytes before its forward pass."""
    visits: tuple[Visit, ...]
    after_C: np.ndarray
    """Bytes that change between backward and the update."""
    update: bytes
    """The events of the update, up to the last allocation."""

    def profile(self, layer: int) -> tuple[bytes, ...]:
        """All events of a layer."""
        return tuple(visit.layers[layer].tokens for visit in self.visits if visit.layers)

    def put_together(self, base_C: np.ndarray, layers: Sequence[int]) -> tuple[Phases, np.ndarray]:
        """The highest instants of a model with these layers, and the bytes before the update."""
        highest: dict[str, np.ndarray] = {}
        for visit in self.visits:
            base_C = base_C + visit.before_C
            numbers = () if not visit.layers else layers if visit.upward else reversed(layers)
            found = highest.setdefault(visit.phase, base_C)
            for part in (visit.first, *(visit.layers[number] for number in numbers), visit.last):
                if part.highest_C is not None and base_C.sum() + part.highest_C.sum() > found.sum():
                    highest[visit.phase] = found = base_C + part.highest_C
                base_C = base_C + part.net_C
        return highest, base_C + self.after_C

    def repeats(self, other: "Layout", layers: Sequence[int]) -> bool:
        """Whether this is the layout of a model with these layers of the one of `other`, byte for byte."""
        if len(self.visits) != len(other.visits):
            return False
        return all(
            (mine.phase, mine.upward, mine.first.tokens, mine.last.tokens)
            == (its.phase, its.upward, its.first.tokens, its.last.tokens)
            and np.array_equal(mine.before_C, its.before_C)
            and np.array_equal(self.after_C, other.after_C)
            and [part.tokens for part in mine.layers] == [its.layers[n].tokens for n in layers if its.layers]
            for mine, its in zip(self.visits, other.visits, strict=True)
        )

    def alike(self) -> list[int]:
        """For each layer, the first one with the same events."""
        profiles = [self.profile(layer) for layer in range(max(len(visit.layers) for visit in self.visits))]
        return [profiles.index(profile) for profile in profiles]

    def differs_in_sizes(self, other: "Layout") -> bool:
        """Whether it has the phases of `other`, the same state and update, and layers that were alike there are here.

        Bytes before the forward pass may differ by those of the micro-batch itself, and by workspaces of the device.
        """
        changed = np.flatnonzero(self.base_C != other.base_C).tolist()
        order, others = ([(visit.phase, visit.upward) for visit in layout.visits] for layout in (self, other))
        return (
            all(CATEGORIES[number] in (INPUTS, WORKSPACE) for number in changed)
            and self.update == other.update
            and order == others
            and self.alike() == other.alike()
        )


class _Numbers:
    """Numbers of what is known of events: equal ones have the same number in all traces."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        """The number of a value."""
        return self._known.setdefault(value, len(self._known))


class _Events:
    """The events of a trace, and parts of them."""

    def __init__(self, trace: WindowTrace, numbers: _Numbers):
        made = np.array(trace.events, dtype=np.int64).reshape(-1, 2)
        storage_E, self.change_E = made[:, 0], made[:, 1]
        count = len(trace.exact_bytes)
        categories = [trace.category(storage) for storage in range(count)]
        kinds = list(zip(trace.operations, categories, trace.streams, strict=True))
        tokens = np.array([numbers.of(key) for key in zip(kinds, trace.exact_bytes, strict=True)])
        self.is_made_E = self.change_E > 0
        self.token_E = tokens[storage_E] * 2 + self.is_made_E
        self.category_E = np.array([CATEGORIES.index(name) for name in categories])[storage_E]

    def net_C(self, start: int, end: int) -> np.ndarray:
        """Bytes by category that these events add."""
        changes = np.zeros(len(CATEGORIES), dtype=np.int64)
        np.add.at(changes, self.category_E[start:end], self.change_E[start:end])
        return changes

    def tokens(self, start: int, end: int) -> bytes:
        """What the events are: the order of frees that follow each other differs by chance (see `deep_events`)."""
        is_made, tokens = self.is_made_E[start:end], self.token_E[start:end]
        begins = is_made.copy()
        begins[1:] |= is_made[:-1]
        return tokens[np.lexsort((tokens, begins.cumsum()))].tobytes()

    def part(self, start: int, end: int) -> Part:
        """These events."""
        made, highest_C = np.flatnonzero(self.is_made_E[start:end]), None
        if len(made):
            used = np.cumsum(self.change_E[start:end])
            highest_C = self.net_C(start, start + int(made[np.argmax(used[made])]) + 1)
        return Part(
            tokens=self.tokens(start, end),
            net_C=self.net_C(start, end),
            highest_C=highest_C,
        )


def layout_of(trace: WindowTrace, numbers: _Numbers) -> Layout | None:
    """The last micro-batch of a traced step, in parts; None if layers do not run one after the other."""
    events, begin = _Events(trace, numbers), trace.micro_batches[-1][0]
    visits, done, base_C = [], None, None
    for number, (start, end, name) in enumerate(trace.phases):
        if start < begin:
            continue
        if done is None:
            base_C = events.net_C(0, start)
        elif start < done:
            return None  # A phase within another one.
        if name in UPDATE_PHASES:
            break
        visit = _visit(events, trace, number, events.net_C(start if done is None else done, start))
        if visit is None:
            return None
        visits.append(visit)
        done = end
    if done is None or base_C is None:
        return None
    begin, end = start, trace.phases[-1][1]
    allocated = np.flatnonzero(events.is_made_E[begin:end])  # Later frees leave the peaks as they are.
    return Layout(
        base_C=base_C,
        visits=tuple(visits),
        after_C=events.net_C(done, begin),
        update=events.tokens(begin, begin + int(allocated[-1]) + 1) if len(allocated) else b"",
    )


def _visit(events: _Events, trace: WindowTrace, number: int, before_C: np.ndarray) -> Visit | None:
    """A phase in parts; None if layers do not run one after the other."""
    start, end, name = trace.phases[number]
    try:
        spans = trace.layer_spans(number)
    except NotRepeated:
        return None
    if not spans:
        whole, nothing = events.part(start, end), events.part(end, end)
        return Visit(phase=name, before_C=before_C, first=whole, layers=(), upward=True, last=nothing)
    parts = [events.part(first, last) for first, last, _ in spans]
    upward = spans[0][2] == 0
    return Visit(
        phase=name,
        before_C=before_C,
        first=events.part(start, spans[0][0]),
        layers=tuple(parts if upward else reversed(parts)),
        upward=upward,
        last=events.part(spans[-1][1], end),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Template:
    """What other micro-batches of a model are predicted from."""

    shallow: TracedModel
    """The model with a few layers."""
    layers: Sequence[int]
    """For each layer of the deep model, the one of these that works alike."""
    layout: Layout
    """Of the first micro-batch, with the few layers."""
    more_C: np.ndarray
    """Bytes that the other layers have before the micro-batch."""
    update: Phases
    """Highest instants of the update, relative to the bytes before it."""
    numbers: _Numbers

    def peaks(self, model: TracedModel, steps: TracedSteps) -> dict[str, Peak] | None:
        """The peaks of steps by phase; None if they do not follow from the first micro-batch."""
        shallow = replace(self.shallow, target=model.target, fakes=model.fakes)
        layout = layout_of(trace_steps(WindowTrace, shallow, steps, all_events=False)[0], self.numbers)
        if layout is None or not layout.differs_in_sizes(self.layout):
            return None
        highest, end_C = layout.put_together(layout.base_C + self.more_C, self.layers)
        update = {phase: end_C + relative_C for phase, relative_C in self.update.items()}
        return {phase: peak_of(sizes_C) for phase, sizes_C in {**highest, **update}.items()}


def peak_of(sizes_C: np.ndarray) -> Peak:
    """A peak from bytes by category."""
    found = dict(zip(CATEGORIES, sizes_C.tolist(), strict=True))
    by_category = {category: size for category, size in sorted(found.items()) if size}
    return Peak(bytes=sum(by_category.values()), by_category=by_category)


def _sizes(peak: Peak) -> np.ndarray:
    """Bytes by category."""
    return np.array([peak.by_category.get(category, 0) for category in CATEGORIES], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shown:
    """A model of a few layers that was traced, and from whose events those of a deep one follow."""

    model: TracedModel
    layers: Sequence[int]
    """For each layer of the deep model, the one of these that works alike."""
    base_C: np.ndarray
    """Bytes of the deep model before the forward pass of the last micro-batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Traced:
    """A step that was predicted from traces."""

    model: TracedModel
    steps: TracedSteps
    traces: Sequence[WindowTrace]
    """Of the depths of `repetition`, one of the model that is shown, or one of all layers."""
    repetition: Repetition | Shown | None
    by_phase: Mapping[str, Peak]

    def template(self) -> _Template | None:
        """What other micro-batches are predicted from; None if that does not follow from the traces."""
        numbers = _Numbers()
        layouts = [layout_of(trace, numbers) for trace in self.traces]
        if any(layout is None for layout in layouts):
            return None
        known: list[Layout] = [layout for layout in layouts if layout is not None]
        if isinstance(shown := self.repetition, Shown):
            shallow, layers, layout, more_C = shown.model, shown.layers, known[0], shown.base_C - known[0].base_C
        else:
            found = self._of_all_layers(known[0], numbers) if shown is None else self._of_depths(known, shown)
            if found is None:
                return None
            shallow, layers, layout, more_C = found
        highest, end_C = layout.put_together(layout.base_C + more_C, layers)
        if any(peak_of(sizes_C) != self.by_phase[phase] for phase, sizes_C in highest.items()):
            return None
        update = {phase: _sizes(peak) - end_C for phase, peak in self.by_phase.items() if phase not in highest}
        return _Template(shallow=shallow, layers=layers, layout=layout, more_C=more_C, update=update, numbers=numbers)

    def _of_depths(self, known: Sequence[Layout], repetition: Repetition) -> "_Found | None":
        """From three depths: the shallowest model has every part, and the deepest shows that others repeat them."""
        (low, middle, high), fewest = known, repetition.depths[0]
        period_C = middle.base_C - low.base_C
        deepest = _positions(repetition.depths[-1], fewest, repetition.period)
        kinds = layer_kinds(self.model.config)
        if kinds[repetition.period :] != kinds[: -repetition.period]:
            return None
        if not np.array_equal(high.base_C - middle.base_C, period_C) or not high.repeats(low, deepest):
            return None
        layers = _positions(repetition.layers, fewest, repetition.period)
        return shallow_models(self.model, repetition)[0], layers, low, period_C * repetition.more[0]

    def _of_all_layers(self, deep: Layout, numbers: _Numbers) -> "_Found | None":
        """From all layers: a trace of one of each kind shows that it has every part."""
        signatures = layer_kinds(self.model.config)
        count = len(signatures)
        kinds = [(signature, deep.profile(number)) for number, signature in enumerate(signatures)]
        lowest = {signature: number for number, signature in reversed([*enumerate(signatures)])}
        highest = {signature: number for number, signature in enumerate(signatures)}
        first = {kind: number for number, kind in reversed([*enumerate(kinds)])}
        chosen = sorted({0, count - 1, *lowest.values(), *highest.values(), *first.values()})
        if WORTH * len(chosen) > count:
            return None
        place = {number: place for place, number in enumerate(chosen)}
        layers = [place.get(number, place[first[kind]]) for number, kind in enumerate(kinds)]
        config = with_some_layers(self.model.config, chosen)
        if layer_kinds(config) != [signatures[number] for number in chosen]:
            return None
        fewer = for_fewer_layers(self.model.setting, self.model.config)
        shallow = self.model.with_setting(fewer).with_config(config)
        layout = layout_of(trace_steps(WindowTrace, shallow, self.steps)[0], numbers)
        if layout is None or not deep.repeats(layout, layers):
            return None
        return shallow, layers, layout, deep.base_C - layout.base_C


_Found = tuple[TracedModel, Sequence[int], Layout, np.ndarray]
"""The model with a few layers, which of them each layer works like, its layout, and bytes of the other layers."""


def _positions(count: int, fewest: int, period: int) -> list[int]:
    """For each layer of a model whose layers repeat, the one of a shallower model at the same end or of its kind."""
    return [
        layer
        if layer <= period
        else fewest - count + layer
        if layer >= count - 1 - period
        else 1 + (layer - 1) % period
        for layer in range(count)
    ]


# Keep what was traced last.

_Key = tuple[str, Setting, tuple[int, bool], bool]
_traced: OrderedDict[_Key, tuple[_Traced | _Template | None, str]] = OrderedDict()
"""By model, setting, kind of device and whether gradients exist: traces or what follows from them, and what was traced.

On another device of a kind, attention takes other operations, but which layers are alike stays the same.
"""


def _key(model: TracedModel, steps: TracedSteps) -> _Key | None:
    """What a template depends on; None if other micro-batches are not predicted from one."""
    train, target = model.setting.train, model.target
    if len(steps) > 1 or model.setting.layout.pipeline > 1 or train.row_kind.passes > 1 or train.grad_ckpt_layers:
        return None
    if train.offload_activations != "none" or (train.grad_ckpt and train.recomputed_every > 1):
        return None
    device = (target.granularity_bytes, target.foreach)
    return config_key(model.config), model.setting, device, len(steps[0]) > 1


def may_be_known(model: TracedModel, steps: TracedSteps) -> bool:
    """Whether a trace of all layers should tell them apart, because other micro-batches may be predicted from it."""
    count = model.config.get_text_config().num_hidden_layers
    if count < WORTH * FEWEST or _key(model, steps) is None:
        return False
    signatures = layer_signatures(model.config)
    return signatures is not None and len(signatures) == count


def remember(
    model: TracedModel,
    steps: TracedSteps,
    traces: Sequence[WindowTrace],
    repetition: Repetition | Shown | None,
    by_phase: Mapping[str, Peak],
    reason: str,
) -> None:
    """Keep the traces of predicted steps, from which others may be predicted: of depths, of few or of all layers."""
    key = _key(model, steps)
    if key is None or _traced.get(key, (key, ""))[0] is None:
        return
    found = _Traced(model=model, steps=steps, traces=traces, repetition=repetition, by_phase=by_phase)
    _traced[key] = found, reason
    _traced.move_to_end(key)
    while len(_traced) > MOST_KNOWN:
        _traced.popitem(last=False)


def known_peaks(model: TracedModel, steps: TracedSteps) -> tuple[dict[str, Peak], str] | None:
    """The peaks of steps by phase, and which layers were traced for the first ones of the model; None if not known."""
    key = _key(model, steps)
    if key is None or key not in _traced or (len(steps[0]) > 1 and not leaves_gradients_alone(steps[0])):
        return None
    known, reason = _traced[key]
    if isinstance(known, _Traced):
        known = known.template()
        _traced[key] = known, reason
    if known is None:
        return None
    peaks = known.peaks(model, steps)
    if peaks is None:
        del _traced[key]
        return None
    return peaks, reason
