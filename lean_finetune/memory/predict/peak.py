"""Predict the peak memory of a setting from traces of its training step.

A model whose layers repeat is traced at three small depths and extrapolated; any other model is traced whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from lean_finetune.memory.predict.depth_extrapolation import (
    NotRepeated,
    Place,
    Window,
    WindowTrace,
    deep_peaks,
    deep_windows,
    offloaded_bytes,
)
from lean_finetune.memory.predict.layer_structure import (
    Repetition,
    divide_layers,
    find_repetition,
    is_pipeline,
    of_stage,
    stage_in_shallow_model,
    with_layers,
)
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps, only
from lean_finetune.memory.predict.traced_step import trace_steps
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import MemoryTrace, Peak


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


Extrapolation = tuple[Mapping[Place, Window], Repetition]
"""Windows of a deep model, extrapolated from shallow ones (see `depth_extrapolation`), and how its layers repeat."""


def predict(config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target) -> Prediction:
    """Predict the peak of optimizer steps with these micro-batch shapes, without weights.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    return predict_from(WindowTrace, config, setting, steps, target)[0]


def predict_from(
    kind: type[WindowTrace], config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[Prediction, Extrapolation | None]:
    """`predict`, with shallow models traced by `kind`; and their extrapolation, None if all layers were traced."""
    if is_pipeline(setting):
        return _of_pipeline(kind, config, setting, steps, target)
    repetition, reason = find_repetition(config, setting.train, setting.all_layers_reason)
    if repetition is not None:
        try:
            return _extrapolated(kind, config, setting, steps, target, repetition, reason)
        except NotRepeated as error:
            if kind is not WindowTrace:  # Perhaps only what `kind` distinguishes does not repeat.
                return predict(config, setting, steps, target), None
            reason = f"all {repetition.layers} layers: {error}"
    trace, position = trace_steps(MemoryTrace, config, setting, steps, target)
    return _of_all_layers(trace, setting, only(steps, *position), reason), None


def _of_all_layers(trace: MemoryTrace, setting: Setting, steps_of_peak: TracedSteps, reason: str) -> Prediction:
    """The prediction from a trace of all layers."""
    return Prediction(
        setting=setting,
        by_phase=trace.peaks(),
        steps_of_peak=steps_of_peak,
        layers_traced=reason,
        offloaded_bytes=trace.offloaded_peak_bytes,
    )


def _extrapolated(
    kind: type[WindowTrace],
    config: PretrainedConfig,
    setting: Setting,
    steps: TracedSteps,
    target: Target,
    repetition: Repetition,
    reason: str,
) -> tuple[Prediction, Extrapolation]:
    """The prediction from traces of the model with fewer layers; NotRepeated if memory is not linear in depth."""
    shallow = setting.for_fewer_layers(config)
    traces = [trace_steps(kind, with_layers(config, depth), shallow, steps, target)[0] for depth in repetition.depths]
    return _from_shallow(traces, setting, steps, target, repetition, reason)


def _from_shallow(
    traces: Sequence[WindowTrace],
    setting: Setting,
    steps: TracedSteps,
    target: Target,
    repetition: Repetition,
    reason: str,
) -> tuple[Prediction, Extrapolation]:
    """The prediction from traces at `repetition.depths`."""
    windows = deep_windows(traces, repetition, target.granularity_bytes)
    by_phase, micro_batch = deep_peaks(windows, target.granularity_bytes)
    positions = [(step, number) for step, shapes in enumerate(steps) for number in range(len(shapes))]
    prediction = Prediction(
        setting=setting,
        by_phase=by_phase,
        steps_of_peak=only(steps, *positions[micro_batch]),
        layers_traced=reason,
        offloaded_bytes=offloaded_bytes(traces, repetition),
    )
    return prediction, (windows, repetition)


def _of_pipeline(
    kind: type[WindowTrace], config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[Prediction, Extrapolation | None]:
    """The prediction of the fullest stage; layers are divided here unless they are already."""
    assert setting.sharing is not None
    spec, layers = setting.sharing.spec, config.get_text_config().num_hidden_layers
    traces = _StageTraces(kind, config, setting, steps, target)
    counts = spec.stage_layers or divide_layers(layers, spec.pipeline_stages, traces.period, traces.peak_bytes)
    found = [traces.predict(stage, counts) for stage in range(len(counts))]
    stages = tuple((count, prediction.peak.bytes) for count, (prediction, _) in zip(counts, found, strict=True))
    fullest, deep = max(found, key=lambda pair: pair[0].peak.bytes)
    return replace(fullest, stages=stages), deep


class _StageTraces:
    """Traces of the stages of a pipeline."""

    def __init__(
        self, kind: type[WindowTrace], config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
    ):
        self._kind, self._config, self._setting, self._steps, self._target = kind, config, setting, steps, target
        self._repetition, self._reason = find_repetition(config, setting.train)
        self._traces: dict[tuple[int, int], WindowTrace] = {}
        self.period = 1 if self._repetition is None else self._repetition.period

    def peak_bytes(self, stage: int, count: int) -> int:
        """Peak of a stage with a number of layers, to divide them: layers that do not repeat count as the first do."""
        own = of_stage(self._setting, stage, ())
        if self._repetition is not None:
            deep = self._extrapolated(own, stage, replace(self._repetition, layers=count))
            return deep[0].peak.bytes if deep else self._traced_bytes(stage, count)
        assert own.sharing is not None
        known = self._config.get_text_config().num_hidden_layers // own.sharing.spec.pipeline_stages
        if count <= known:
            return self._traced_bytes(stage, count)
        layer_bytes = self._traced_bytes(stage, known) - self._traced_bytes(stage, max(1, known - 1))
        return self._traced_bytes(stage, known) + (count - known) * layer_bytes

    def predict(self, stage: int, counts: tuple[int, ...]) -> tuple[Prediction, Extrapolation | None]:
        """The prediction of a stage."""
        own = of_stage(self._setting, stage, counts)
        # Where a stage begins within a period, its first layers differ from the model's first layers.
        repetition = self._repetition if sum(counts[:stage]) % self.period == 0 else None
        deep = repetition and self._extrapolated(own, stage, replace(repetition, layers=counts[stage]))
        if deep:
            return deep
        trace = trace_steps(MemoryTrace, self._config, own, self._steps, self._target)[0]
        return _of_all_layers(trace, own, self._steps, f"all {counts[stage]} of the stage"), None

    def _extrapolated(
        self, setting: Setting, stage: int, repetition: Repetition
    ) -> tuple[Prediction, Extrapolation] | None:
        """The prediction from shallow traces; None if it has few layers, or memory is not linear in them."""
        if repetition.layers <= repetition.depths[-1]:
            return None
        traces = [self._trace(stage, depth) for depth in repetition.depths]
        try:
            found, deep = _from_shallow(traces, setting, self._steps, self._target, repetition, self._reason)
        except NotRepeated:
            return None
        return replace(found, steps_of_peak=self._steps), deep  # Which micro-batches are in flight matters.

    def _traced_bytes(self, stage: int, count: int) -> int:
        return max(peak.bytes for peak in self._trace(stage, count).peaks().values())

    def _trace(self, stage: int, count: int) -> WindowTrace:
        """A trace of a stage with the first layers of the model."""
        if (stage, count) not in self._traces:
            model = stage_in_shallow_model(self._config, self._setting, stage, count, self.period)
            self._traces[stage, count] = trace_steps(self._kind, *model, self._steps, self._target)[0]
        return self._traces[stage, count]
