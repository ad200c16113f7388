"""Predict the peak memory of a setting from traces of its training step.

A model whose layers repeat is traced at three small depths and extrapolated; any other model is traced whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
from lean_finetune.memory.predict.layer_structure import Repetition, find_repetition, with_layers
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
    repetition, reason = find_repetition(config, setting.model, setting.all_layers_reason)
    if repetition is not None:
        try:
            return _extrapolated(kind, config, setting, steps, target, repetition, reason)
        except NotRepeated as error:
            if kind is not WindowTrace:  # Perhaps only what `kind` distinguishes does not repeat.
                return predict(config, setting, steps, target), None
            reason = f"all {repetition.layers} layers: {error}"
    trace, position = trace_steps(MemoryTrace, config, setting, steps, target)
    prediction = Prediction(
        by_phase=trace.peaks(),
        steps_of_peak=only(steps, *position),
        layers_traced=reason,
        offloaded_bytes=trace.offloaded_peak_bytes,
    )
    return prediction, None


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
    setting = setting.for_fewer_layers(config)
    traces = [trace_steps(kind, with_layers(config, depth), setting, steps, target)[0] for depth in repetition.depths]
    windows = deep_windows(traces, repetition, target.granularity_bytes)
    by_phase, micro_batch = deep_peaks(windows, target.granularity_bytes)
    positions = [(step, number) for step, shapes in enumerate(steps) for number in range(len(shapes))]
    prediction = Prediction(
        by_phase=by_phase,
        steps_of_peak=only(steps, *positions[micro_batch]),
        layers_traced=reason,
        offloaded_bytes=offloaded_bytes(traces, repetition),
    )
    return prediction, (windows, repetition)
