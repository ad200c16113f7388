"""Input and output of the training loop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lean_finetune.config.train_schema import Train
from lean_finetune.distributed.processes import SINGLE_PROCESS, World
from lean_finetune.distributed.sharding_modes import ShardSpec
from lean_finetune.pinning.locate import NO_FILES, FileVersions
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.worst_micro_batches import worst_steps
from lean_finetune.step.activation_offload import ActivationOffload
from lean_finetune.step.batches import TokenPart
from lean_finetune.step.data_parallel import DataParallelModel
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.monitor.growth_advice import Settings
from lean_finetune.train.monitor.memory_monitor import HostPeak

CONTROL_STEPS = 4
"""Steps that are measured besides those predicted to be the worst."""


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Input of one training run."""

    model_directory: Path
    plan: Plan
    rows: TokenRows
    heldout: TokenRows
    pad_id: int
    train: Train
    """With the precision and the learning rate of this run, not `auto`."""
    seed: int
    foreach: bool
    """Compute norms and clip with the multi-tensor kernels, as PyTorch does on CUDA."""
    offload: ActivationOffload | None
    """Where activations are stored between forward and backward; None = on the device."""
    disk: DiskPlace | None = None
    """Where offloaded master weights and optimizer state are; None = in host memory."""
    measured_steps: frozenset[int]
    """Steps whose peak memory is measured; always includes the first."""
    loader_threads: int
    """Threads that read batches ahead."""
    device: torch.device
    progress: bool
    world: World = SINGLE_PROCESS
    sharing: ShardSpec = ShardSpec(mode="none")
    """How the processes of `world` share the model."""
    part: TokenPart | None = None
    """This process's part of each row's tokens; None = complete rows."""
    settings: Settings = field(default_factory=dict)
    """Parameters of the run by dotted name, for callbacks and advice."""
    predicted_peak_bytes: int | None = None
    """Peak tensor memory predicted by stage estimate, for callbacks."""
    predicted_duration: str | None = None
    """How long all steps take as predicted by stage estimate, for callbacks; None on a CPU."""
    base_files: FileVersions = NO_FILES
    """Files of the base model, in the process that verified them."""
    note: str | None = None
    """A line for the user about the learning rate."""
    trackers: Sequence[str] = ()
    """Names of the trackers that receive the run's figures."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The trained model and the record of its training."""

    parallel: DataParallelModel
    curves: list[dict[str, Any]]
    """One row per optimizer step, keys `CURVE_COLUMNS`."""
    skipped_steps: int | None
    """Updates skipped because fp16 gradients overflowed; None if the loss is not scaled."""
    memory_by_phase: Mapping[str, Mapping[str, int | None]]
    """Highest figures at the ends of each phase."""
    oom_splits: Mapping[str, int] | None
    """Steps that were split after an out-of-memory error; None without any."""
    load_host: HostPeak
    """Host memory while the model was loaded."""

    @property
    def model(self) -> nn.Module:
        """The trained model, or this process's shard."""
        return self.parallel.model


def measured_steps(plan: Plan, lengths: np.ndarray, *, chunked: bool) -> frozenset[int]:
    """Return the steps to measure where measuring costs time: the predicted worst ones, and controls.

    The controls are spread evenly over the run, regardless of size, so that a worst step that the prediction overlooks
    may be among them. `chunked`: layers work in chunks of a row.
    """
    last = len(plan.steps) - 1
    controls = {round(last * number / CONTROL_STEPS) for number in range(1, CONTROL_STEPS + 1)}
    return frozenset({*worst_steps(plan, lengths, chunked=chunked), *controls})
