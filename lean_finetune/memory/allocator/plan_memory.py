"""Predict what the caching allocator reserves over a plan, and the optimizer step in which memory would run out.

A GPU holds more than tensors (torch.cuda.max_memory_allocated): they lie in blocks that the caching allocator reserves
(max_memory_reserved), and the process has a CUDA context besides, which only nvidia-smi counts. Reserved memory is
found by tracing a sample of the plan's steps and playing their allocations to the allocator's rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.core.units import GIB
from lean_finetune.memory.allocator.replay import Replay, replay
from lean_finetune.memory.allocator.reserved_memory import ALLOCATORS, kinds_by_suffix, segments_of
from lean_finetune.memory.allocator.sampled_steps import sample_steps
from lean_finetune.memory.gpus import CudaContext, Device
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import trace_origins
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.allocation_origins import OriginTrace
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.plan.batch_plan import Plan

RESERVED_COLUMNS = ("step", "allocated_gib", "reserved_gib", "reserved_expandable_gib", "retries")


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """The replays of sampled steps, with either kind of segments."""

    steps: tuple[int, ...]
    """Numbers of the sampled optimizer steps, ascending."""
    chosen: str
    """The run's own kind of segments: train.expandable_segments."""
    unlimited: Mapping[str, Replay]
    """By kind of segments, with unlimited memory."""
    limited: Mapping[str, Replay]
    """By kind of segments, within the device's memory less the most that a CUDA context takes."""
    context: CudaContext

    def reserved_bytes(self, kind: str) -> int:
        """Return the peak of reserved bytes with a kind of segments."""
        return self.unlimited[kind].reserved_peak_bytes

    def process_bytes(self, kind: str) -> int:
        """Return the peak of the whole process on the device, CUDA context included."""
        return self.reserved_bytes(kind) + self.context.bytes

    def failing_step(self, kind: str) -> int | None:
        """Return the optimizer step, from 0, that runs out of memory; None if none does."""
        found = self.limited[kind]
        return None if found.out_of_memory is None else self.steps[len(found.steps)]

    def first_step_above(self, limit_bytes: int) -> int | None:
        """Return the first optimizer step, from 0, whose tensors exceed a limit; None if none does."""
        replayed = zip(self.steps, self.unlimited["native"].steps, strict=True)
        return next((number for number, step in replayed if step.allocated_peak_bytes > limit_bytes), None)

    def metrics(self) -> dict[str, Any]:
        """Return the part of data/estimate/figures.json that only a replay knows."""
        metrics: dict[str, Any] = {"reserved_settled_step": self.steps[self.unlimited[self.chosen].settled_step]}
        for suffix, kind in kinds_by_suffix(ALLOCATORS[self.chosen]).items():
            metrics[f"retries_predicted{suffix}"] = self.limited[kind].retries
            metrics[f"out_of_memory_step{suffix}"] = self.failing_step(kind)
        return metrics

    def tiers(self) -> dict[str, Any]:
        """Return the content of tiers.json."""
        return {
            kind: {
                "reserved_bytes": self.reserved_bytes(kind),
                "reserved_by_phase": dict(self.unlimited[kind].reserved_by_phase),
                "retries": self.limited[kind].retries,
                "out_of_memory": self._failure(kind),
                "process_bytes": self.process_bytes(kind),
                "process_margin_bytes": self.context.margin_bytes,
            }
            for kind in ALLOCATORS
        }

    def _failure(self, kind: str) -> str | None:
        """Return where and why memory runs out; None if it does not."""
        found = self.limited[kind]
        if found.out_of_memory is None:
            return None
        return (
            f"optimizer step {self.failing_step(kind)}, {found.failed_phase or 'between phases'}: {found.out_of_memory}"
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of reserved.csv."""
        native, expandable = self.unlimited["native"].steps, self.unlimited["expandable"].steps
        limited = self.limited[self.chosen].steps
        return [
            {
                "step": step,
                "allocated_gib": round(native[place].allocated_peak_bytes / GIB, 6),
                "reserved_gib": round(native[place].reserved_peak_bytes / GIB, 6),
                "reserved_expandable_gib": round(expandable[place].reserved_peak_bytes / GIB, 6),
                "retries": limited[place].retries if place < len(limited) else None,
            }
            for place, step in enumerate(self.steps)
        ]


def row_without_replay(peak_bytes: int) -> dict[str, Any]:
    """Return the one row of reserved.csv where no plan was replayed: DVC cannot plot an empty file."""
    return {"step": 0, "allocated_gib": round(peak_bytes / GIB, 6)}


def replay_plan(
    plan: Plan,
    lengths: np.ndarray,
    config: PretrainedConfig,
    setting: Setting,
    target: Target,
    prediction: Prediction,
    *,
    expandable: bool,
    device: Device,
) -> tuple[PlanMemory | None, str]:
    """Replay a sample of a plan on one GPU, and describe the sample; return None and the reason for several GPUs.

    Args:
        plan: what one GPU computes.
        lengths: tokens of every training row.
        config: of the model.
        setting: what is trained, and how.
        target: rules of the device's kernels.
        prediction: of the same run.
        expandable: train.expandable_segments.
        device: whose memory limits the run.
    """
    if setting.sharing is not None:
        return (
            None,
            "worst micro-batches only: several GPUs share the steps, and communication allocates on other streams",
        )
    layers = config.get_text_config().num_hidden_layers
    sampled = sample_steps(plan, lengths, prediction.steps_of_peak, layers=layers)
    steps = tuple(sampled.values())
    trace = trace_origins(config, setting, steps, target)
    memory = replay_steps(trace, steps, expandable=expandable, device=device, numbers=tuple(sampled))
    return memory, _description(plan, steps)


def replay_steps(
    trace: OriginTrace, steps: TracedSteps, *, expandable: bool, device: Device, numbers: tuple[int, ...] | None = None
) -> PlanMemory:
    """Replay a trace with either kind of segments, without a limit and within a device's memory.

    Args:
        trace: of the steps.
        steps: shapes of their micro-batches.
        expandable: train.expandable_segments.
        device: whose memory limits the run.
        numbers: of the optimizer steps; None = 0, 1, …
    """
    usable_bytes = device.memory_bytes - device.context.max_bytes
    unlimited, limited = {}, {}
    for kind, expands in ALLOCATORS.items():
        unlimited[kind] = limited[kind] = replay(trace, steps, expandable=expands, capacity_bytes=None)
        if unlimited[kind].reserved_peak_bytes > usable_bytes:
            limited[kind] = replay(trace, steps, expandable=expands, capacity_bytes=usable_bytes)
    return PlanMemory(
        steps=numbers or tuple(range(len(steps))),
        chosen=segments_of(expandable),
        unlimited=unlimited,
        limited=limited,
        context=device.context,
    )


def _description(plan: Plan, steps: TracedSteps) -> str:
    """Say how much of the plan was replayed."""
    replayed, planned = sum(map(len, steps)), len(plan)
    if replayed == planned:
        return f"all {len(steps)} steps replayed"
    return (
        f"{replayed} of {planned} micro-batches in {len(steps)} of {len(plan.steps)} steps replayed: the first and the "
        "largest, and a sample of the others"
    )
