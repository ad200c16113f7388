"""Run the training step of `lean_finetune.step` on fake tensors under a memory trace."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.cached_fake_mode import CachedFakeMode, refuse_untraceable
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.fake_distributed import shared
from lean_finetune.memory.trace.fused_launches import without_launches
from lean_finetune.memory.trace.memory_trace import ACTIVATIONS, WORKSPACE, MemoryTrace
from lean_finetune.memory.trace.static_state import register_rng_states, register_state
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.precision import autocast_dtype
from lean_finetune.step.activation_offload import ActivationOffload
from lean_finetune.step.batches import Batch, TokenPart, empty_batch, idle_batch
from lean_finetune.step.data_parallel import DataParallelModel
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.training_step import training_step

CPU = torch.device("cpu")
UPDATE_PHASES = ("clip", "optimizer")
Trace = TypeVar("Trace", bound=MemoryTrace)


def new_trace(kind: type[Trace], config: PretrainedConfig, target: Target) -> Trace:
    """An empty trace of class `kind` for this model and device."""
    vocabulary = config.get_text_config().vocab_size
    return kind(granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=vocabulary)


def trace_steps(
    kind: type[Trace], config: PretrainedConfig, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[Trace, tuple[int, int]]:
    """Build model and optimizer without weights, and trace optimizer steps of these micro-batch shapes.

    Returns:
        The trace; and the step and index of the micro-batch that set the peak.

    Raises:
        UserError: PyTorch cannot trace an operation of the step.
    """
    trace = new_trace(kind, config, target)
    with (
        refuse_untraceable(config),
        CachedFakeMode(),
        target.attention(),
        without_launches(setting.train.fused_kernels, target.multiprocessors),
        shared(fake_model(config, setting.train, CPU), setting.sharing, trace, CPU) as parallel,
    ):
        return trace, _run_steps(parallel, trace, setting, steps, target)


def _run_steps(
    parallel: DataParallelModel, trace: MemoryTrace, setting: Setting, steps: TracedSteps, target: Target
) -> tuple[int, int]:
    """Register the state, run the steps, and return the position of the micro-batch that set the peak."""
    # The state depends on the optimizer's name alone, so the numbers of its update are arbitrary.
    train = setting.train.model_copy(update={"lr": 1.0, "weight_decay": 0.0})
    optimizer = build_optimizer(parallel.owned, train, on_host=trace.on_host)
    cuda, on_host = target.foreach, train.offload == "parameters"
    register_state(trace, parallel, optimizer, train, cuda=cuda, weights_on_host=on_host)
    trace.register_bytes(target.constant_bytes, WORKSPACE)
    trace.begin_steps(parallel.model)
    scaler = LossScaler(finite=lambda norm: True) if train.scales_loss else None
    store = CountingStore(pinned=train.offload_activations == "cpu")
    offload = None
    if (train.offload_activations, train.compress_activations) != ("none", "none"):
        offload = ActivationOffload(
            None if train.offload_activations == "none" else store,
            train.compress_activations,
            restoring=partial(trace.allocating_as, ACTIVATIONS),
        )
    highest_bytes, position = 0, (0, 0)
    cuda_autocast = cuda and autocast_dtype(train) is not None
    parts, sharing = setting.context, setting.sharing
    accumulates_gradients = sharing is not None and sharing.accumulates_gradients and sharing.stage is None

    def batches(step: int) -> Iterator[Batch]:
        nonlocal highest_bytes, position
        for number, shape in enumerate(steps[step]):
            trace.begin_micro_batch(shape)
            yield empty_batch(shape, CPU, parts)
            if trace.highest_bytes > highest_bytes:  # The step requests the next batch after backward.
                highest_bytes, position = trace.highest_bytes, (step, number)
        # Gradients are reduced in a later micro-batch than this one.
        if accumulates_gradients and len(steps[step]) == 1:
            yield idle_batch(0, TokenPart(index=0, parts=parts) if parts > 1 else None)

    with trace.recording(), register_rng_states(trace, cuda=cuda):
        for step in range(len(steps)):
            training_step(
                parallel.model,
                optimizer,
                batches(step),
                supervised_tokens=1,
                train=train,
                foreach=cuda,
                phase=lambda name: _phase(
                    trace, name, cuda_autocast=cuda_autocast, on_host=on_host and name in UPDATE_PHASES
                ),
                guard=lambda losses, norm: None,
                scaler=scaler,
                offload=offload,
                parallel=parallel,
                micro_batches=max(len(steps[step]), 2 if accumulates_gradients else 1),
            )
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
    """A store for `lean_finetune.step.activation_offload` that has no values: it counts bytes and their peak."""

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
