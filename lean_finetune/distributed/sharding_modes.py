"""How the GPUs of a run share its weights: train.sharding."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lean_finetune.config.field_types import Method, Sharding
from lean_finetune.config.schema import Params
from lean_finetune.config.sharding_rules import CUTTING
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.fsdp import REPLICATE, SHARD, ShardedModel
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.replicated import ReplicatedModel
from lean_finetune.step.parallel_model import ParallelModel, SingleProcess

READ_BY_ALL: tuple[Method, ...] = ("int8_lora",)
"""Methods whose weights every process reads: 8-bit ones hold values outside of all that is handed out."""


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """What of sharing is a parameter."""

    mode: Sharding
    group_gpus: int | None = None
    """Mode hsdp: GPUs that hold a copy of the weights together; None = those of a node."""
    offload_weights: bool = False
    """Where weights are cut: each process keeps its parts, their gradients and the update in its host's memory."""
    timeout_seconds: float | None = None
    """Longest wait of a process for the others of its group (mode hsdp); None = PyTorch's default."""

    @classmethod
    def from_params(cls, params: Params) -> "ShardSpec":
        """Read train.sharding, train.shard_group_gpus, train.offload and run.rank_timeout_seconds."""
        train = params.train
        offload_weights = train.offload == "parameters"
        return cls(
            mode=train.sharding,
            group_gpus=train.shard_group_gpus,
            offload_weights=offload_weights,
            timeout_seconds=params.run.rank_timeout_seconds,
        )

    @property
    def cut(self) -> str:
        """How weights are divided among as many processes: what tells one cut from another."""
        return self.mode if self.group_gpus is None else f"{self.mode} in groups of {self.group_gpus}"

    def reads_weights(self, world: World, method: Method) -> bool:
        """Whether this process reads the model's files; else the first one hands it the weights."""
        return world.is_first or method in READ_BY_ALL

    def load_device(self, device: torch.device) -> torch.device:
        """Where weights are loaded: where no GPU is to hold all of them, in the host's memory."""
        return torch.device("cpu") if self.mode in CUTTING else device


def make_parallel(model: nn.Module, world: World, spec: ShardSpec, device: torch.device) -> ParallelModel:
    """Share a loaded model as asked.

    Args:
        model: of the same form in every process, on `device`, or in the host's memory where weights are cut. The
            weights of the first process count.
        world: which process this is.
        spec: how.
        device: where this process computes.

    Raises:
        UserError: the processes cannot be divided so.
    """
    if world.size == 1:
        return SingleProcess(model)
    if spec.mode not in CUTTING:
        return ReplicatedModel(model, world, device, owners=spec.mode == "zero1")
    return ShardedModel(
        model,
        world,
        device,
        _mesh(world, spec, device),
        reshard=spec.mode != "zero2",
        offload_weights=spec.offload_weights,
        # Adapters' gradients are small: they wait for the last micro-batch. All weights' would be the largest of all.
        sum_every_micro_batch=all(parameter.requires_grad for parameter in model.parameters()),
    )


def _mesh(world: World, spec: ShardSpec, device: torch.device) -> DeviceMesh:
    """The processes in a row, or in groups that each hold all weights."""
    if spec.mode != "hsdp":
        with unset_fake_temporarily():  # Its table of ranks is read, so it is real where all else is fake.
            return init_device_mesh(device.type, (world.size,), mesh_dim_names=(SHARD,))
    group = world.local_size if spec.group_gpus is None else spec.group_gpus
    if world.size % group or not 1 < group < world.size:
        raise UserError(
            f"train.shard_group_gpus: must be a divisor of the GPUs, above 1 and below all; got {group} of "
            f"{world.size}; set it, or use train.sharding=zero3 (one group of all) or ddp (groups of one)"
        )
    timeout = None if spec.timeout_seconds is None else timedelta(seconds=spec.timeout_seconds)
    with unset_fake_temporarily():
        ranks = torch.arange(world.size).view(-1, group)
        # Groups that init_device_mesh makes have PyTorch's default timeout (10 to 30 minutes), not the first group's.
        replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
        shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return DeviceMesh.from_group([replicate, shard], device.type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))
