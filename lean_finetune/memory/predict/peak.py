"""The peak memory of a setting: the training step of `lean_finetune.step` run on fake tensors under a memory trace."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import OffloadActivations, OffloadState, OptimizerName, Precision
from lean_finetune.config.schema import Params
from lean_finetune.memory.predict.depth_extrapolation import (
    NotRepeated,
    Place,
    Window,
    WindowTrace,
    deep_peaks,
    deep_windows,
)
from lean_finetune.memory.predict.experts import refuse_experts
from lean_finetune.memory.predict.layer_structure import Repetition, find_repetition, with_layers
from lean_finetune.memory.predict.traced_offload import counting, offloaded_bytes
from lean_finetune.memory.predict.traced_shapes import TracedSteps, only
from lean_finetune.memory.trace.allocation_origins import OriginTrace
from lean_finetune.memory.trace.cached_fake_mode import QuickFakeMode
from lean_finetune.memory.trace.cuda_autocast import phase_of
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.fake_distributed import Sharing, shared
from lean_finetune.memory.trace.memory_trace import (
    WORKSPACE,
    MemoryTrace,
    Peak,
)
from lean_finetune.memory.trace.static_state import hold_state, random_states_held
from lean_finetune.memory.trace.trace_errors import untraceable_refused
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import Batch, empty_batch, idle_batch
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import OptimSpec, build_optimizer
from lean_finetune.step.training_step import StepSpec, training_step

CPU = torch.device("cpu")
FP32 = torch.float32
UPDATE_PHASES = ("clip", "optimizer")
Trace = TypeVar("Trace", bound=MemoryTrace)
Windows = TypeVar("Windows", bound=WindowTrace)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The parameters that memory depends on, besides the shapes of the micro-batches."""

    model: ModelSpec
    optimizer: OptimizerName
    loss_chunk: int | None
    max_grad_norm: float | None
    master_weights: bool = False
    offload_activations: OffloadActivations = "none"
    offload: OffloadState = "none"
    optimizer_in_backward: bool = False
    sharing: Sharing | None = None
    """How several GPUs share the run; None = one GPU."""

    @classmethod
    def from_params(cls, params: Params, precision: Precision, *, several_turns: bool) -> "Setting":
        """Read the `train` section, the seed and the number of GPUs.

        Args:
            params: of the run.
            precision: what train.precision means on the device.
            several_turns: whether a GPU has more than one micro-batch in a step.
        """
        return cls(
            model=ModelSpec.from_params(params, precision),
            optimizer=params.train.optimizer,
            loss_chunk=params.train.loss_chunk,
            max_grad_norm=params.train.max_grad_norm,
            master_weights=params.train.master_weights,
            offload_activations=params.train.offload_activations,
            offload=params.train.offload,
            optimizer_in_backward=params.train.optimizer_in_backward,
            sharing=Sharing.from_params(params, several_turns=several_turns),
        )

    @property
    def all_layers(self) -> str | None:
        """Why all layers must be traced whatever they are; None where it is theirs to say."""
        frees = self.master_weights or self.offload != "none"
        if self.sharing is None or self.sharing.spec.mode != "zero1" or not frees:
            return None
        return "zero1's update gives up the gradients of what it owns one by one"

    def of_whole(self, config: PretrainedConfig) -> "Setting":
        """For traces of the model with fewer layers than `config` says.

        Raises:
            UserError: the GPUs cannot share the model so.
        """
        return self if self.sharing is None else replace(self, sharing=self.sharing.of_whole(config, self.model))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Peaks of the traced steps."""

    by_phase: Mapping[str, Peak]
    """forward, backward, clip, optimizer."""
    steps_of_peak: TracedSteps
    """The first micro-batch and, where another one set the peak, that one in its position: enough to see it again."""
    layers_traced: str
    """Which layers were, and why no others."""
    offloaded_bytes: int = 0
    """The most that is away from the device at once: pinned host memory, or a file."""
    shallow: tuple[tuple[int, OriginTrace], ...] = field(default=(), compare=False, repr=False)
    """Traces of models of fewer layers, by their number, where they were asked to remember origins; else none."""

    @property
    def worst_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.by_phase, key=lambda phase: self.by_phase[phase].bytes)

    @property
    def peak(self) -> Peak:
        """The highest peak."""
        return self.by_phase[self.worst_phase]


def predict(config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target) -> Prediction:
    """Trace optimizer steps of these micro-batch shapes, without weights.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    refuse_experts(config)
    repetition, reason = find_repetition(config, setting.model, setting.all_layers)
    if repetition is not None:
        try:
            windows, shallow = shallow_windows(WindowTrace, config, setting, steps, target, repetition)
            away = offloaded_bytes([each for _, each in shallow], repetition)
            return replace(from_windows(windows, steps, target, reason), offloaded_bytes=away)
        except NotRepeated as error:
            reason = f"all {repetition.layers} layers: {error}"
    trace, position = _traced(MemoryTrace, config, setting, steps, target)
    return Prediction(
        by_phase=trace.peaks(),
        steps_of_peak=only(steps, *position),
        layers_traced=reason,
        offloaded_bytes=trace.offloaded_peak_bytes,
    )


def shallow_windows(
    kind: type[Windows],
    config: PretrainedConfig,
    setting: Setting,
    steps: TracedSteps,
    target: Target,
    repetition: Repetition,
) -> tuple[dict[Place, Window], tuple[tuple[int, Windows], ...]]:
    """The windows of the steps, from traces of the model with fewer layers; and these traces by number of layers.

    Raises:
        NotRepeated: they do not tell.
        UserError: PyTorch cannot trace an operation.
    """
    setting = setting.of_whole(config)
    shallow = (with_layers(config, depth) for depth in repetition.depths)
    traces = [_traced(kind, each, setting, steps, target)[0] for each in shallow]
    by_depth = tuple(zip(repetition.depths, traces, strict=True))
    return deep_windows(traces, repetition, target.granularity_bytes), by_depth


def from_windows(windows: Mapping[Place, Window], steps: TracedSteps, target: Target, reason: str) -> Prediction:
    """The prediction that the windows of a model's steps make; `reason` says which layers were traced."""
    peaks = deep_peaks(windows, target.granularity_bytes)
    positions = [(step, number) for step, shapes in enumerate(steps) for number in range(len(shapes))]
    return Prediction(
        by_phase=peaks.by_phase,
        steps_of_peak=only(steps, *positions[peaks.micro_batch]),
        layers_traced=reason,
    )


def new_trace(kind: type[Trace], config: PretrainedConfig, target: Target) -> Trace:
    """A trace of this model on this device."""
    vocabulary = config.get_text_config().vocab_size
    return kind(granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=vocabulary)


def _traced(
    kind: type[Trace], config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[Trace, tuple[int, int]]:
    """A trace of the steps, and the position of the micro-batch that set the peak.

    Raises:
        UserError: PyTorch cannot trace an operation.
    """
    trace = new_trace(kind, config, target)
    with untraceable_refused(config), QuickFakeMode(), target.attention():
        position = trace_steps(trace, config, setting, steps, target)
    return trace, position


def trace_steps(
    trace: MemoryTrace, config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[int, int]:
    """Build the model and the optimizer, count what they hold, and run the steps.

    Returns the step and the position in it of the micro-batch that set the peak.
    """
    with shared(fake_model(config, setting.model, CPU), setting.sharing, trace, CPU) as parallel:
        return _steps_of(parallel, trace, setting, steps, target)


def _steps_of(
    parallel: ParallelModel, trace: MemoryTrace, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[int, int]:
    """The steps of a shared model; see `trace_steps`."""
    optimizer = build_optimizer(parallel.owned, optim_of(setting), trace.elsewhere)
    away = setting.offload == "parameters"
    hold_state(trace, parallel, optimizer, setting.model, setting.optimizer, cuda=target.foreach, parts_away=away)
    trace.hold_bytes(target.constant_bytes, WORKSPACE)
    trace.begin_run(parallel.model)
    spec = StepSpec(
        loss_chunk=setting.loss_chunk,
        max_grad_norm=setting.max_grad_norm,
        foreach=target.foreach,
        optimizer_in_backward=setting.optimizer_in_backward,
    )
    scaler = LossScaler(finite=lambda norm: True) if setting.model.scales_loss else None
    store, offload = counting(trace, setting.offload_activations)
    highest_bytes, position = 0, (0, 0)
    several_turns = setting.sharing is not None and setting.sharing.several_turns

    def batches(step: int) -> Iterator[Batch]:
        nonlocal highest_bytes, position
        for number, shape in enumerate(steps[step]):
            trace.begin_micro_batch(shape)
            yield empty_batch(shape, CPU)
            if trace.highest_bytes > highest_bytes:  # Its backward is over: the step asks for the next one.
                highest_bytes, position = trace.highest_bytes, (step, number)
        if several_turns and len(steps[step]) == 1:  # Gradients are summed in another turn than this one.
            yield idle_batch(0)

    with trace.recording(), random_states_held(trace, cuda=target.foreach):
        for step in range(len(steps)):
            training_step(
                parallel.model,
                optimizer,
                batches(step),
                supervised_tokens=1,
                model_spec=setting.model,
                spec=spec,
                phase=lambda name: phase_of(
                    trace,
                    name,
                    like_cuda=target.foreach and setting.model.autocast_dtype is not None,
                    on_host=away and name in UPDATE_PHASES,
                ),
                guard=lambda losses, norm: None,
                scaler=scaler,
                offload=offload,
                parallel=parallel,
                micro_batches=max(len(steps[step]), 2 if several_turns else 1),
            )
    trace.offloaded_peak_bytes = store.peak_bytes
    return position


def optim_of(setting: Setting) -> OptimSpec:
    """The optimizer of a setting: its name decides its state, the numbers of its update do not."""
    return OptimSpec(
        name=setting.optimizer,
        lr=1.0,
        weight_decay=0.0,
        schedule="constant",
        warmup_fraction=0.0,
        master_weights=setting.master_weights,
        offload=setting.offload,
    )
