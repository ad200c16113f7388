"""The step that is traced: how the model is trained, the shapes of micro-batches, and the run on fake tensors."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PretrainedConfig

from cuda_memory.units import round_up
from lean_finetune.memory.predict.state_formulas import kept_book_bytes
from lean_finetune.memory.trace.alike_parts import part_loop, skip_alike_layers, skipping_parts
from lean_finetune.memory.trace.cached_fake_mode import refuse_untraceable
from lean_finetune.memory.trace.cuda_kernels import Target, without_launches
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE, FakeBatches
from lean_finetune.memory.trace.gradients_alone import first_left_out, leaves_gradients_alone
from lean_finetune.memory.trace.known_values import known_lists
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, QUANTISATION_STATE, MemoryTrace
from lean_finetune.memory.trace.origin_trace import OriginTrace
from lean_finetune.memory.trace.registered_state import register_rng_states, register_state, shared
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.precision import autocast_dtype
from lean_finetune.plan.batch_plan import Plan, memory_figures, worst_micro_batches
from lean_finetune.step.batches import IDLE_TOKENS, Batch, BatchShape, TokenPart, empty_batch, idle_batch
from lean_finetune.step.offload.activation_offload import KEPT, ActivationOffload
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import loss_scaler


@dataclass(frozen=True, eq=False)
class TracedModel:
    """What is traced: a model, how it is trained, and the device whose rules apply."""

    config: PretrainedConfig
    setting: Setting
    target: Target
    fakes: FakeBatches = TEXT_ALONE
    """Makes its micro-batches."""

    def with_setting(self, setting: Setting) -> "TracedModel":
        """The same model on the same device, trained otherwise."""
        return replace(self, setting=setting)

    def with_config(self, config: PretrainedConfig) -> "TracedModel":
        """Another model, trained so on the same device."""
        return replace(self, config=config)


# Choose the micro-batches to trace: the worst of the plan, in their positions within a step.

TracedSteps = tuple[tuple[BatchShape, ...], ...]
"""Optimizer steps, each a sequence of micro-batch shapes."""


def traced_steps(plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool, chunk: int = 0) -> TracedSteps:
    """Steps that reach the peak of the whole plan.

    The first step has the plan's first micro-batch and the worst of all that follow another one in their step, where
    gradients exist already. Each further step has one micro-batch that is the first of its step.

    `lengths` are the tokens of every training row. `tiled`: the device's attention works in tiles of tokens.
    `windowed`: the model creates masks, or saves attention scores. `chunk` as in `memory_figures`.
    """
    first, later = worst_micro_batches(plan, lengths, tiled=tiled, windowed=windowed, chunk=chunk)
    starts = list(dict.fromkeys(BatchShape.of(micro_batch, lengths) for micro_batch in first))
    following = list(dict.fromkeys(BatchShape.of(micro_batch, lengths) for micro_batch in later))
    return ((starts[0], *following), *((start,) for start in starts[1:]))


def steps_in_flight(plan: Plan, lengths: np.ndarray, stages: int, **kinds: Any) -> TracedSteps:
    """Steps that reach the peaks of all stages of a pipeline: consecutive micro-batches that are in flight together.

    Of each number of them up to `stages`, those with the largest sums of `memory_figures`, at the start of a step and
    after it. There an idle micro-batch comes first, so that gradients exist. Other arguments as `traced_steps`.
    """
    figures = memory_figures(plan, lengths, **kinds)
    chosen: list[tuple[bool, tuple[BatchShape, ...]]] = []
    numbers = np.arange(len(plan))
    step_of = np.searchsorted(plan.step_bounds, numbers, side="right") - 1
    sums = np.concatenate([np.zeros((1, figures.shape[1]), np.int64), figures.cumsum(axis=0)])
    first = numbers == plan.step_bounds[step_of]
    for count in range(stages, 0, -1):
        ends = np.minimum(numbers + count, plan.step_bounds[step_of + 1])
        in_flight = sums[ends] - sums[numbers]
        for starts in (numbers[~first], numbers[first]):
            for start in dict.fromkeys(starts[in_flight[starts].argmax(axis=0)].tolist()) if len(starts) else ():
                micro_batches = map(plan.micro_batch, range(start, int(ends[start])))
                window = tuple(BatchShape.of(micro_batch, lengths) for micro_batch in micro_batches)
                if not any(_contains(other, window) for later, other in chosen if later >= (not first[start])):
                    chosen.append((not first[start], window))
    idle = BatchShape(rows=1, length=IDLE_TOKENS, supervised=0, packed_lengths=None)
    return tuple((idle, *window) if later else window for later, window in chosen)


def _contains(shapes: tuple[BatchShape, ...], part: tuple[BatchShape, ...]) -> bool:
    """Whether micro-batches of the shapes of `part` follow each other in `shapes`."""
    return any(shapes[start : start + len(part)] == part for start in range(len(shapes)))


def only(steps: TracedSteps, step: int, number: int) -> TracedSteps:
    """The smallest steps in which a micro-batch has the same position, after the gradients that exist before it."""
    start = steps[0][0]
    if (step, number) == (0, 0):
        return ((start,),)
    found = steps[step][number]
    return ((start, found),) if number else ((start,), (found,))


def halved(steps: TracedSteps) -> TracedSteps | None:
    """Steps as with half of bucket.max_tokens: half the rows; None if every micro-batch has one row.

    Supervised tokens are an upper bound, so the prediction is never too low.
    """
    if all(len(shape.packed_lengths or (0,) * shape.rows) < 2 * shape.kind.unit for step in steps for shape in step):
        return None
    return tuple(tuple(map(_halved, step)) for step in steps)


def _halved(shape: BatchShape) -> BatchShape:
    """Half the rows of a micro-batch, rounded up: of packed rows every second, of attachments the largest."""
    joined = shape.packed_lengths
    if joined is not None:
        joined = tuple(sorted(joined, reverse=True)[::2])
    rows = 1 if joined else round_up(-(-shape.rows // 2), shape.kind.unit)
    length = sum(joined) if joined else shape.length
    return replace(
        shape,
        rows=rows,
        length=length,
        supervised=min(shape.supervised, rows * length),
        packed_lengths=joined,
        attached=tuple(one.largest(rows) for one in shape.attached),
    )


# Run the training step of `lean_finetune.step` on fake tensors under a memory trace.

CPU = torch.device("cpu")
UPDATE_PHASES = ("clip", "optimizer")
Trace = TypeVar("Trace", bound=MemoryTrace)


def new_trace(kind: type[Trace], model: TracedModel) -> Trace:
    """An empty trace of class `kind` for this model and device."""
    target, vocabulary = model.target, model.config.get_text_config().vocab_size
    return kind(granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=vocabulary)


def trace_steps(
    kind: type[Trace], model: TracedModel, steps: TracedSteps, *, all_events: bool = True
) -> tuple[Trace, tuple[int, int]]:
    """Build model and optimizer without weights, and trace optimizer steps of these micro-batch shapes.

    Without `all_events`, events that set no peak may be missing: of frozen parts beside the decoder and of the loss.

    Returns:
        The trace; and the step and index of the micro-batch that set the peak.

    Raises:
        UserError: PyTorch cannot trace an operation of the step.
    """
    return skipping_parts(partial(_trace_steps, kind, model, steps, all_events=all_events))


def _trace_steps(
    kind: type[Trace], model: TracedModel, steps: TracedSteps, skip: bool, *, all_events: bool = True
) -> tuple[Trace, tuple[int, int]]:
    """`trace_steps`; `skip`: without running parts of a loop that are alike."""
    trace, setting, target = new_trace(kind, model), model.setting, model.target
    with (
        refuse_untraceable(model.config),
        model.fakes.mode(),
        known_lists(),
        target.attention(),
        without_launches(setting.train.fused_kernels, target.multiprocessors, target.capability),
        shared(fake_model(model.config, setting.train, CPU), setting, trace, CPU) as parallel,
        part_loop(trace, skip=skip, all_events=all_events),
    ):
        if skip:
            skip_alike_layers(parallel.model, trace, all_events=all_events)
        return trace, _run_steps(parallel, trace, model, steps, skip)


def _run_steps(
    parallel: ParallelModel, trace: MemoryTrace, model: TracedModel, steps: TracedSteps, skip: bool
) -> tuple[int, int]:
    """Register the state, run the steps, and return the position of the micro-batch that set the peak."""
    setting, target = model.setting, model.target
    # The state depends on the optimizer's name alone, so the numbers of its update are arbitrary.
    train = setting.train.model_copy(update={"lr": 1.0, "weight_decay": 0.0})
    optimizer = build_optimizer(parallel.local_shard, train, on_host=trace.on_host)
    cuda, on_host = target.foreach, train.offload == "parameters"
    register_state(trace, parallel, optimizer, train, cuda=cuda, weights_on_host=on_host)
    trace.register_bytes(kept_book_bytes(setting, cuda=cuda), QUANTISATION_STATE)
    trace.register_matmul_workspaces(target.constant_bytes, target.bias_workspace_bytes)
    trace.begin_steps(parallel.model)
    scaler = loss_scaler(train, finite=lambda norm: True)
    store = CountingStore(pinned=train.offload_activations == "cpu")
    offload = KEPT
    if (train.offload_activations, train.compress_activations) != ("none", "none"):
        offload = ActivationOffload(
            None if train.offload_activations == "none" else store,
            train.compress_activations,
            restoring=partial(trace.allocating_as, ACTIVATIONS),
        )
    goal = StepGoal.of_any_rows(train)
    passes_before = train.row_kind.passes > 1
    highest_bytes, position = 0, (0, 0)
    cuda_autocast = cuda and autocast_dtype(train) is not None
    parts = setting.layout.context
    accumulates_gradients = setting.distributed and setting.accumulates_gradients and setting.stage is None

    def batches(step: int) -> Iterator[Batch]:
        nonlocal highest_bytes, position
        for number, shape in enumerate(steps[step]):
            trace.begin_micro_batch(shape)
            yield model.fakes.batch(shape, parts)
            if trace.highest_bytes > highest_bytes:  # The step requests the next batch after backward.
                highest_bytes, position = trace.highest_bytes, (step, number)
        # Gradients are reduced in a later micro-batch than this one.
        if accumulates_gradients and len(steps[step]) == 1:
            yield idle_batch(0, TokenPart(index=0, parts=parts) if parts > 1 else None)

    def before(step: int) -> Iterator[Batch]:
        for shape in steps[step] if passes_before else ():
            trace.begin_micro_batch(shape)
            yield empty_batch(shape, CPU, parts)

    # Origins are of the operations that create gradients, experts count the rows of every micro-batch, and rows that
    # are not trained pass before the first one.
    leave_out = skip and not (setting.distributed or isinstance(trace, OriginTrace) or has_experts(parallel.model))
    leave_out = leave_out and not passes_before
    with trace.recording(), register_rng_states(trace, cuda=cuda):
        for step in range(len(steps)):
            kept_state = torch.get_rng_state()  # As the training loop keeps it, in case the step must be repeated.
            left_out = leave_out and leaves_gradients_alone(steps[step])
            with first_left_out(parallel) if left_out else nullcontext():
                training_step(
                    parallel,
                    optimizer,
                    batches(step),
                    before=before(step),
                    micro_batches=max(len(steps[step]), 2 if accumulates_gradients else 1),
                    goal=goal,
                    train=train,
                    foreach=cuda,
                    phase=lambda name: _phase(
                        trace, name, cuda_autocast=cuda_autocast, on_host=on_host and name in UPDATE_PHASES
                    ),
                    guard=lambda losses, norm: None,
                    scaler=scaler,
                    offload=offload,
                )
            del kept_state
    trace.offloaded_peak_bytes = store.peak_bytes
    return position


@contextmanager
def _phase(trace: MemoryTrace, name: str, *, cuda_autocast: bool, on_host: bool) -> Iterator[None]:
    """The step's `phase` hook. `cuda_autocast`: report CUDA's autocast as enabled, since peft asks for it."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", cuda_autocast)
    try:
        with trace.phase(name), trace.on_host() if on_host else nullcontext():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Counted:
    """Handle of an offloaded tensor."""

    count: int
    dtype: torch.dtype


class CountingStore:
    """A store for `step.offload.activation_offload` that has no values: it counts bytes and their peak."""

    def __init__(self, *, pinned: bool):
        """`pinned`: blocks are powers of two, as in CUDA's CachingHostAllocator."""
        self.device = torch.device("cpu")
        self.peak_bytes = 0
        self._bytes, self._pinned = 0, pinned

    def put(self, values: torch.Tensor) -> _Counted:
        """Count `values` until the handle is freed."""
        size = 1 << (values.nbytes - 1).bit_length() if self._pinned else values.nbytes
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        handle = _Counted(count=values.numel(), dtype=values.dtype)
        weakref.finalize(handle, self._drop, size).atexit = False
        return handle

    def get(self, handle: _Counted) -> torch.Tensor:
        """New memory on the traced device."""
        return torch.empty(handle.count, dtype=handle.dtype)

    def _drop(self, size: int) -> None:
        self._bytes -= size
