"""Predict the peak of a setting from traces of its training step, and explain it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuda_memory.units import GIB
from lean_finetune.memory.predict.deep_events import StepEvents, deep_events, events_of
from lean_finetune.memory.predict.depth_extrapolation import (
    AFTER,
    BEFORE,
    INSIDE,
    Label,
    NotRepeated,
    Window,
    WindowKey,
    WindowTrace,
    deep_peaks,
    deep_windows,
    offloaded_bytes,
    peak_of_contents,
)
from lean_finetune.memory.predict.known_steps import known_peaks, may_be_known, remember
from lean_finetune.memory.predict.layer_repetition import (
    Repetition,
    config_key,
    divide_layers,
    find_repetition,
    shallow_models,
    stage_in_shallow_model,
)
from lean_finetune.memory.predict.traced_step import UPDATE_PHASES, TracedModel, TracedSteps, only, trace_steps
from lean_finetune.memory.trace.memory_trace import CATEGORIES, MemoryTrace, Peak
from lean_finetune.memory.trace.origin_trace import KIND_FIELDS, AllocationKind, OriginTrace
from lean_finetune.memory.trace.setting import Setting

# A model whose layers repeat is traced at three small depths and extrapolated; any other model is traced whole.


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Peaks of the traced steps."""

    by_phase: Mapping[str, Peak]
    """forward, backward, clip, optimizer."""
    steps_of_peak: TracedSteps
    """The shortest steps with the same peak: the first micro-batch, and the one that set the peak in its position."""
    layers_traced: str
    """Which layers were traced, and why."""
    setting: Setting
    """The setting of the process with this peak; of a pipeline, the stage with the highest peak."""
    stages: tuple[tuple[int, int], ...] = ()
    """Layers and peak bytes of each stage of a pipeline."""
    offloaded_bytes: int = 0
    """Peak of activations offloaded to pinned host memory or to a file."""

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].bytes)

    @property
    def peak(self) -> Peak:
        """The highest peak."""
        return self.by_phase[self.worst_phase]


Extrapolation = tuple[Mapping[WindowKey, Window], Repetition]
"""Windows of a deep model, extrapolated from shallow ones (see `depth_extrapolation`), and how its layers repeat."""


def predict(model: TracedModel, steps: TracedSteps) -> Prediction:
    """Predict the peak of optimizer steps with these micro-batch shapes, without weights.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    return predict_from(WindowTrace, model, steps)[0]


def predict_with_events(model: TracedModel, steps: TracedSteps) -> tuple[Prediction, StepEvents | None]:
    """`predict`, and every allocation and free of the steps, from the same traces; None for a pipeline.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    setting = model.setting
    if setting.is_pipeline:
        return predict(model, steps), None
    repetition, reason = _repetition(model, parts=1)
    prediction = None
    if repetition is not None:
        traces = _shallow_traces(WindowTrace, model, steps, repetition, all_events=True)
        try:
            prediction, _ = _from_shallow(traces, model, steps, repetition, reason)
            remember(model, steps, traces, repetition, prediction.by_phase, reason)
            return prediction, deep_events(traces, repetition)
        except NotRepeated as error:
            if prediction is None:  # Else the events alone do not repeat.
                reason = _note_not_linear(model, repetition, error)
    found, events = _of_all_layers(model, steps, reason)
    return prediction or found, events


def predict_from(
    kind: type[WindowTrace], model: TracedModel, steps: TracedSteps
) -> tuple[Prediction, Extrapolation | None]:
    """`predict`, with shallow models traced by `kind`; and their extrapolation, None if all layers were traced."""
    setting = model.setting
    if setting.is_pipeline:
        return _of_pipeline(kind, model, steps)
    in_parts = kind is WindowTrace  # An explanation shows the windows of one part.
    if in_parts and (known := known_peaks(model, steps)) is not None:
        by_phase, reason = known
        last = only(steps, 0, len(steps[0]) - 1)
        return Prediction(by_phase=by_phase, steps_of_peak=last, layers_traced=reason, setting=setting), None
    repetition, reason = _repetition(model, parts=2 if in_parts else 0)
    if repetition is not None:
        try:
            return _extrapolated(kind, model, steps, repetition, reason)
        except NotRepeated as error:
            if not in_parts:  # Perhaps only what `kind` distinguishes does not repeat.
                return predict(model, steps), None
            reason = _note_not_linear(model, repetition, error)
    return _of_all_layers(model, steps, reason)[0], None


_not_linear: dict[tuple[str, Setting], str] = {}
"""Why all layers of a model are traced in a setting, if its memory was not linear in depth for some micro-batches."""


def _repetition(model: TracedModel, *, parts: int) -> tuple[Repetition | None, str]:
    """Call `find_repetition`, but return None if the model's memory was not linear before.

    A search predicts many micro-batches of one model, and shallow traces would be wasted for each.
    """
    setting = model.setting
    if _not_linear and (known := _not_linear.get((config_key(model.config), setting))) is not None:
        return None, known
    return find_repetition(model.config, setting.train, setting.all_layers_reason, parts=parts)


def _note_not_linear(model: TracedModel, repetition: Repetition, error: NotRepeated) -> str:
    """Remember that a model's memory is not linear in depth, and return why all layers are traced."""
    reason = f"all {repetition.layers} layers: {error}"
    _not_linear[config_key(model.config), model.setting] = reason
    return reason


MOST_COMPLETE = 4
_complete: dict[Any, tuple[Prediction, StepEvents]] = {}
"""What the latest traces of all layers gave: a search predicts a run, and the caller predicts what it found again."""


def _of_all_layers(
    model: TracedModel, steps: TracedSteps, reason: str, steps_of_peak: TracedSteps | None = None
) -> tuple[Prediction, StepEvents]:
    """The prediction from a trace of all layers, and its events."""
    key = config_key(model.config), model.setting, model.target.device, model.fakes.source, steps
    if key not in _complete:
        kind = WindowTrace if may_be_known(model, steps) else MemoryTrace
        trace, position = trace_steps(kind, model, steps)
        prediction = Prediction(
            setting=model.setting,
            by_phase=trace.peaks(),
            steps_of_peak=only(steps, *position),
            layers_traced=reason,
            offloaded_bytes=trace.offloaded_peak_bytes,
        )
        _complete[key] = prediction, events_of(trace)
        if len(_complete) > MOST_COMPLETE:
            del _complete[next(iter(_complete))]
        if isinstance(trace, WindowTrace):
            remember(model, steps, [trace], None, prediction.by_phase, reason)
    found, events = _complete[key]
    return replace(found, steps_of_peak=steps_of_peak or found.steps_of_peak, layers_traced=reason), events


def _extrapolated(
    kind: type[WindowTrace], model: TracedModel, steps: TracedSteps, repetition: Repetition, reason: str
) -> tuple[Prediction, Extrapolation]:
    """The prediction from traces of the model with fewer layers; NotRepeated if memory is not linear in depth."""
    traces = _shallow_traces(kind, model, steps, repetition, all_events=False)
    found = _from_shallow(traces, model, steps, repetition, reason)
    if kind is WindowTrace:
        remember(model, steps, traces, repetition, found[0].by_phase, reason)
    return found


def _shallow_traces(
    kind: type[WindowTrace], model: TracedModel, steps: TracedSteps, repetition: Repetition, *, all_events: bool
) -> list[WindowTrace]:
    """Trace the model with the numbers of layers in `repetition.traced`."""
    return [trace_steps(kind, one, steps, all_events=all_events)[0] for one in shallow_models(model, repetition)]


def _from_shallow(
    traces: Sequence[WindowTrace], model: TracedModel, steps: TracedSteps, repetition: Repetition, reason: str
) -> tuple[Prediction, Extrapolation]:
    """Extrapolate the prediction from traces with the numbers of layers in `repetition.traced`."""
    granularity_bytes = model.target.granularity_bytes
    windows = deep_windows(traces, repetition, granularity_bytes)
    by_phase, micro_batch = deep_peaks(windows, granularity_bytes)
    # Rows that are not trained pass through the model as micro-batches of the same shapes before the step's own.
    passes = model.setting.train.row_kind.passes
    positions = [(step, n) for step, shapes in enumerate(steps) for _ in range(passes) for n in range(len(shapes))]
    prediction = Prediction(
        setting=model.setting,
        by_phase=by_phase,
        steps_of_peak=only(steps, *positions[micro_batch]),
        layers_traced=reason,
        offloaded_bytes=offloaded_bytes(traces, repetition),
    )
    return prediction, (windows, repetition)


def _of_pipeline(
    kind: type[WindowTrace], model: TracedModel, steps: TracedSteps
) -> tuple[Prediction, Extrapolation | None]:
    """The prediction of the fullest stage; layers are split here unless they are already."""
    setting, layers = model.setting, model.config.get_text_config().num_hidden_layers
    traces = _StageTraces(kind, model, steps)
    counts = setting.stage_layers or divide_layers(layers, setting.layout.pipeline, traces.period, traces.peak_bytes)
    found = [traces.predict(stage, counts) for stage in range(len(counts))]
    stages = tuple((count, prediction.peak.bytes) for count, (prediction, _) in zip(counts, found, strict=True))
    fullest, deep = max(found, key=lambda pair: pair[0].peak.bytes)
    return replace(fullest, stages=stages), deep


class _StageTraces:
    """Traces of the stages of a pipeline."""

    def __init__(self, kind: type[WindowTrace], model: TracedModel, steps: TracedSteps):
        self._kind, self._model, self._steps = kind, model, steps
        self._repetition, self._reason = find_repetition(model.config, model.setting.train)
        self._traces: dict[tuple[int, int], WindowTrace] = {}
        self.period = 1 if self._repetition is None else self._repetition.period

    def peak_bytes(self, stage: int, count: int) -> int:
        """Peak of a stage with a number of layers, to split them: layers that do not repeat count as the first do."""
        own = self._of_stage(stage, ())
        if self._repetition is not None:
            deep = self._extrapolated(own, stage, replace(self._repetition, layers=count))
            return deep[0].peak.bytes if deep else self._traced_bytes(stage, count)
        known = own.config.get_text_config().num_hidden_layers // own.setting.layout.pipeline
        if count <= known:
            return self._traced_bytes(stage, count)
        layer_bytes = self._traced_bytes(stage, known) - self._traced_bytes(stage, max(1, known - 1))
        return self._traced_bytes(stage, known) + (count - known) * layer_bytes

    def predict(self, stage: int, counts: tuple[int, ...]) -> tuple[Prediction, Extrapolation | None]:
        """The prediction of a stage."""
        own = self._of_stage(stage, counts)
        # Where a stage begins within a period, its first layers differ from the model's first layers.
        repetition = self._repetition if sum(counts[:stage]) % self.period == 0 else None
        deep = repetition and self._extrapolated(own, stage, replace(repetition, layers=counts[stage]))
        if deep:
            return deep
        return _of_all_layers(own, self._steps, f"all {counts[stage]} of the stage", self._steps)[0], None

    def _of_stage(self, stage: int, counts: tuple[int, ...]) -> TracedModel:
        return self._model.with_setting(self._model.setting.of_stage(stage, counts))

    def _extrapolated(
        self, own: TracedModel, stage: int, repetition: Repetition
    ) -> tuple[Prediction, Extrapolation] | None:
        """The prediction from shallow traces; None if it has few layers, or memory is not linear in them."""
        if repetition.layers <= repetition.depths[-1]:
            return None
        traces = [self._trace(stage, depth) for depth in repetition.depths]
        try:
            found, deep = _from_shallow(traces, own, self._steps, repetition, self._reason)
        except NotRepeated:
            return None
        return replace(found, steps_of_peak=self._steps), deep  # Which micro-batches are in flight matters.

    def _traced_bytes(self, stage: int, count: int) -> int:
        return max(peak.bytes for peak in self._trace(stage, count).peaks().values())

    def _trace(self, stage: int, count: int) -> WindowTrace:
        """A trace of a stage with the first layers of the model."""
        if (stage, count) not in self._traces:
            shallow = stage_in_shallow_model(self._model, stage, count, self.period)
            self._traces[stage, count] = trace_steps(self._kind, shallow, self._steps)[0]
        return self._traces[stage, count]


# Explain a predicted peak: which allocations are alive at that instant, what made them, and the timeline up to it.
#
# A trace of all layers gives every instant. An extrapolation from shallow models gives the fullest instant of each of
# its windows; the windows of the other layers are interpolated between the windows of the first and the last layers.

MAX_GROUPS = 10
TIMELINE_POINTS = 400
"""Instants in a timeline: as many as a plot can show."""
TIMELINE_COLUMNS = ("event", "phase", *CATEGORIES)
BETWEEN = "between"
"""Phase of events outside any phase: a micro-batch is created, a loss is freed."""


AllocationGroup = Mapping[str, Any]
"""Allocations alive at the peak that are alike but for their layer: the fields of their kind, `count` and `bytes`."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the peak consists of."""

    peak_bytes: int
    phase: str
    top: tuple[AllocationGroup, ...]
    """The largest groups at the peak."""
    timeline: Sequence[Mapping[str, Any]]
    """GiB by category at instants of the worst step, in order; columns as in `TIMELINE_COLUMNS`."""

    def as_json(self) -> dict[str, Any]:
        """Content of explanation.json, without the states."""
        return {"peak_bytes": self.peak_bytes, "phase": self.phase, "top": self.top}


class OriginWindowTrace(WindowTrace, OriginTrace):
    """Finds the peak of every window, and distinguishes its allocations by their origin."""

    def label(self, storage_id: int) -> Label:
        """See WindowTrace."""
        return self.kind(storage_id)


def predict_explained(model: TracedModel, steps: TracedSteps) -> tuple[Prediction, Explanation]:
    """`predict`, with an explanation of the peak.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    prediction, deep = predict_from(OriginWindowTrace, model, steps)
    if deep is None:
        fullest = model.with_setting(prediction.setting)
        return prediction, explain(trace_origins(fullest, prediction.steps_of_peak))
    return prediction, _explain_extrapolation(deep, prediction, steps, model.target.granularity_bytes)


def trace_origins(model: TracedModel, steps: TracedSteps) -> OriginTrace:
    """Trace steps of the whole model, recording the origin of every allocation."""
    return trace_steps(OriginTrace, model, steps)[0]


def explain(trace: OriginTrace) -> Explanation:
    """Explain the peak of a trace of all layers."""
    changes = np.array([change for _, change in trace.events])
    phases = np.full(len(changes), BETWEEN, dtype="U16")
    for first, end, name in trace.phases:
        phases[first:end] = name
    current_bytes = np.cumsum(changes)
    # Between two phases only inputs grow, and the next phase begins with them.
    peak = int(np.argmax(np.where(phases != BETWEEN, current_bytes, -1)))
    live: dict[int, int] = {}
    for storage, change in trace.events[: peak + 1]:
        if change > 0:
            live[storage] = change
        else:
            del live[storage]
    return Explanation(
        peak_bytes=int(current_bytes[peak]),
        phase=str(phases[peak]),
        top=_largest_groups((trace.kind(storage), 1, size) for storage, size in live.items()),
        timeline=_timeline_of_trace(trace, changes, phases),
    )


def _largest_groups(allocations: Iterable[tuple[AllocationKind, int, int]]) -> tuple[AllocationGroup, ...]:
    """Sum (kind, count, bytes) by kind, and keep the largest."""
    counts: Counter[AllocationKind] = Counter()
    sizes: Counter[AllocationKind] = Counter()
    for kind, count, size in allocations:
        counts[kind] += count
        sizes[kind] += size
    largest = sorted(sizes.items(), key=lambda item: (-item[1], str(item[0])))[:MAX_GROUPS]
    return tuple(
        {**dict(zip(KIND_FIELDS, kind, strict=True)), "count": counts[kind], "bytes": size} for kind, size in largest
    )


def _timeline_of_trace(trace: OriginTrace, changes: np.ndarray, phases: np.ndarray) -> list[Mapping[str, Any]]:
    """Bytes by category at the highest instant of each of `TIMELINE_POINTS` equal intervals of the steps."""
    category = np.array([CATEGORIES.index(trace.category(storage)) for storage, _ in trace.events])
    bytes_CE = np.zeros((len(CATEGORIES), len(changes)), dtype=np.int64)  # C categories, E events.
    bytes_CE[category, np.arange(len(changes))] = changes
    bytes_CE = bytes_CE.cumsum(axis=1)
    total = bytes_CE.sum(axis=0)
    start = trace.micro_batches[0][0]
    edges = np.unique(np.linspace(start, len(changes), TIMELINE_POINTS + 1).astype(int)).tolist()
    rows: list[Mapping[str, Any]] = []
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        event = first + int(np.argmax(total[first:end]))
        sizes = dict(zip(CATEGORIES, bytes_CE[:, event].tolist(), strict=True))
        rows.append(_timeline_row(event - start, str(phases[event]), sizes))
    return rows


def _timeline_row(event: int, phase: str, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """A row of timeline.csv."""
    gib = {category: round(sizes.get(category, 0) / GIB, 6) for category in CATEGORIES}
    return {"event": event, "phase": phase, **gib}


def _explain_extrapolation(
    deep: Extrapolation, prediction: Prediction, steps: TracedSteps, granularity_bytes: int
) -> Explanation:
    """Explain the peak of a model that was extrapolated from shallow ones."""
    phase, windows = prediction.worst_phase, deep[0]
    in_phase = [window.contents for window in windows.values() if window.phase == phase]
    fullest = max(in_phase, key=lambda contents: peak_of_contents(contents, granularity_bytes).bytes)
    allocations = (
        (label, count, count * (-(-size // granularity_bytes) * granularity_bytes))
        for (label, size), count in fullest.items()
    )
    rows = _timeline_of_windows(deep, _shown_micro_batches(prediction, steps), granularity_bytes)
    return Explanation(
        peak_bytes=prediction.peak.bytes,
        phase=phase,
        top=_largest_groups(allocations),
        timeline=[_timeline_row(number, *row) for number, row in enumerate(rows)],
    )


def _timeline_of_windows(
    deep: Extrapolation, shown: Mapping[tuple[bool, int], bool], granularity_bytes: int
) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Phase, and bytes by category, of every window of the shown micro-batches, in the order of the steps."""
    windows, repetition = deep
    for visit in sorted({place[0] for place in windows}):
        of_visit = {place[1:]: window for place, window in windows.items() if place[0] == visit}
        phase, micro_batch = next((window.phase, window.micro_batch) for window in of_visit.values())
        if not shown[phase in UPDATE_PHASES, micro_batch]:
            continue
        sizes = {
            end: peak_of_contents(window.contents, granularity_bytes).by_category for end, window in of_visit.items()
        }
        for by_category in _in_order(sizes, repetition, backward=phase == "backward"):
            yield phase, by_category


def _shown_micro_batches(prediction: Prediction, steps: TracedSteps) -> Mapping[tuple[bool, int], bool]:
    """By (is update, number of the micro-batch): whether it is the first one, or has the shape that set the peak."""
    worst, later = prediction.steps_of_peak[-1][-1], len(prediction.steps_of_peak[-1]) > 1
    shown: dict[tuple[bool, int], bool] = {}
    number = 0
    for shapes in steps:
        first = number
        for index, shape in enumerate(shapes):
            shown[False, number] = number == 0 or (shape == worst and (index > 0) == later)
            number += 1
        shown[True, number - 1] = any(shown[False, micro_batch] for micro_batch in range(first, number))
    return shown


def _in_order(
    sizes: Mapping[tuple[str, int], Mapping[str, int]], repetition: Repetition, *, backward: bool
) -> Iterator[Mapping[str, int]]:
    """The windows of one phase in order: before any layer, every layer, after the last."""
    for before in (INSIDE, BEFORE):
        if ("outside", before) in sizes:
            yield sizes["outside", before]
    if any(end == "first" for end, _ in sizes):
        layers = range(repetition.layers)
        for layer in reversed(layers) if backward else layers:
            yield _layer_sizes(sizes, layer, repetition)
    if ("outside", AFTER) in sizes:
        yield sizes["outside", AFTER]


def _layer_sizes(
    sizes: Mapping[tuple[str, int], Mapping[str, int]], layer: int, repetition: Repetition
) -> Mapping[str, int]:
    """Bytes by category in one layer's window: as traced near both ends, else interpolated between alike layers."""
    period, from_end = repetition.period, repetition.layers - 1 - layer
    if layer <= period:
        return sizes["first", layer]
    if from_end <= period:
        return sizes["last", from_end]
    low = 1 + (layer - 1) % period
    high_from_end = 1 + (from_end - 1) % period
    below, above = sizes["first", low], sizes["last", high_from_end]
    span = repetition.layers - 1 - high_from_end - low
    return {
        category: below.get(category, 0) + (above.get(category, 0) - below.get(category, 0)) * (layer - low) // span
        for category in {**below, **above}
    }
