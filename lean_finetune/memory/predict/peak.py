"""Predict the peak of a setting from traces of its training step, and explain it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lean_finetune.memory.predict.deep_events import StepEvents, deep_events, events_of
from lean_finetune.memory.predict.depth_extrapolation import (
    NotRepeated,
    Window,
    WindowKey,
    WindowTrace,
    deep_peaks,
    deep_windows,
    offloaded_bytes,
)
from lean_finetune.memory.predict.kinds_of_layers import find_kinds, trace_kinds
from lean_finetune.memory.predict.known_steps import known_peaks, may_be_known, remember
from lean_finetune.memory.predict.layer_repetition import (
    Repetition,
    config_key,
    divide_layers,
    find_repetition,
    shallow_models,
    stage_in_shallow_model,
)
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, only, trace_steps
from lean_finetune.memory.trace.memory_trace import MemoryTrace, Peak
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
    if (by_kinds := _of_kinds(model, steps, repetition, all_events=True)) is not None:
        return by_kinds
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
    if in_parts and (by_kinds := _of_kinds(model, steps, repetition, all_events=False)) is not None:
        return by_kinds[0], None
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


def _of_kinds(
    model: TracedModel, steps: TracedSteps, repetition: Repetition | None, *, all_events: bool
) -> tuple[Prediction, StepEvents] | None:
    """The prediction from some layers of each kind, and the events; None if other ways do or these do not."""
    kinds = find_kinds(model, repetition)
    deep = None if kinds is None else trace_kinds(model, steps, kinds, all_events=all_events)
    if kinds is None or deep is None:
        return None
    by_phase, micro_batch = deep.peaks()
    prediction = Prediction(
        setting=model.setting,
        by_phase=by_phase,
        steps_of_peak=_steps_of_peak(model, steps, micro_batch),
        layers_traced=kinds.text(),
    )
    return prediction, deep.events


def _steps_of_peak(model: TracedModel, steps: TracedSteps, micro_batch: int) -> TracedSteps:
    """The shortest steps with the same peak, if the trace's micro-batch of this number sets it."""
    # Rows that are not trained pass through the model as micro-batches of the same shapes before the step's own.
    passes = model.setting.train.row_kind.passes
    positions = [(step, n) for step, shapes in enumerate(steps) for _ in range(passes) for n in range(len(shapes))]
    return only(steps, *positions[micro_batch])


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
    prediction = Prediction(
        setting=model.setting,
        by_phase=by_phase,
        steps_of_peak=_steps_of_peak(model, steps, micro_batch),
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
