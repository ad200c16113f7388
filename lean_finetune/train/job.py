"""The training job: the input of the training loop, and its result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.distributed.processes import SINGLE_PROCESS, World
from lean_finetune.distributed.sharding_modes import division
from lean_finetune.pinning.locate import NO_FILES, FileVersions
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.run.assets import Assets
from lean_finetune.step.batches import TokenPart
from lean_finetune.step.offload.activation_offload import KeptActivations
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.monitor.growth_advice import Settings
from lean_finetune.train.monitor.memory_monitor import HostPeak


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Input of one training run."""

    assets: Assets
    config: PretrainedConfig
    """Of the model as this run builds it."""
    plan: Plan
    rows: TokenRows
    heldout: TokenRows
    pad_id: int
    chat_template: Path | None = None
    """The file of the chat template that made the tokens; None for the tokenizer's."""
    train: Train
    """With the precision and the learning rate of this run, not `auto`."""
    seed: int
    foreach: bool
    """Compute norms and clip with the multi-tensor kernels, as PyTorch does on CUDA."""
    offload: KeptActivations
    """Where activations are stored between forward and backward; None = on the device."""
    disk: DiskPlace | None = None
    """The file of offloaded master weights and optimizer state; None = on the device or in host memory."""
    measured_steps: frozenset[int]
    """Steps whose peak memory is measured; always includes the first."""
    loader_threads: int
    """Threads that read batches ahead."""
    device: torch.device
    progress: bool
    world: World = SINGLE_PROCESS
    stage_layers: tuple[int, ...] | None = None
    """Number of layers of each stage of a pipeline; None without one."""
    rank_timeout: timedelta | None = None
    """Timeout of collectives in a group that is a subset of all processes; None = PyTorch's default."""
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
    adapter_files: FileVersions = NO_FILES
    """Files of the adapter that goes on, in the process that verified them."""
    note: str | None = None
    """A line for the user about the learning rate."""
    trackers: Sequence[str] = ()
    """Names of the trackers that receive the run's figures."""

    @property
    def division(self) -> str:
        """How the processes shard weights: a checkpoint resumes with the same division."""
        return division(self.train, self.world.size, self.stage_layers)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The trained model and the record of its training."""

    parallel: ParallelModel
    curves: list[dict[str, Any]]
    """One row per optimizer step, keys `CURVE_COLUMNS`."""
    skipped_steps: int | None
    """Updates skipped because fp16 gradients overflowed; None if the loss is not scaled."""
    memory_by_phase: Mapping[str, Mapping[str, int | None]]
    """Highest figures at the ends of each phase."""
    load_host: HostPeak
    """Host memory while the model was loaded."""

    @property
    def model(self) -> nn.Module:
        """The trained model, or this process's shard."""
        return self.parallel.model
