"""Load a model and share its weights among the GPUs of a run (train.sharding)."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lean_finetune.config.field_types import Method, Sharding
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.sharding_rules import SPLIT_WEIGHTS
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.context_parallel import HeadExchange
from lean_finetune.distributed.fsdp import REPLICATE, SHARD, ShardedModel
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.replicated import ReplicatedModel
from lean_finetune.model.attention import TokenExchange
from lean_finetune.model.load_model import load_model, uninitialized_model
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.data_parallel import DataParallelModel

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params

READ_BY_EVERY_PROCESS: tuple[Method, ...] = ("int8_lora",)
"""Methods whose weights every process reads: 8-bit layers keep values outside of parameters and buffers."""


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The settings of sharing."""

    mode: Sharding
    group_gpus: int | None = None
    """Mode hsdp: GPUs that share one copy of the weights; None = the GPUs of a node."""
    offload_weights: bool = False
    """Sharded modes: each process keeps its shards, their gradients and the update in host memory."""
    timeout_seconds: float | None = None
    """Longest wait for another process of a group of some processes; None = PyTorch's default."""
    layout: ParallelLayout | None = None
    """None: all processes train different rows."""

    @classmethod
    def from_params(cls, params: "Params") -> "ShardSpec":
        """Read train.sharding, train.shard_group_gpus, train.offload and run.rank_timeout_seconds."""
        return cls(
            mode=params.train.sharding,
            group_gpus=params.train.shard_group_gpus,
            offload_weights=params.train.offload == "parameters",
            timeout_seconds=params.run.rank_timeout_seconds,
            layout=ParallelLayout.from_params(params),
        )

    @property
    def division(self) -> str:
        """Name of the way in which weights are divided; checkpoints of equal divisions have equal shards."""
        return self.mode if self.group_gpus is None else f"{self.mode} in groups of {self.group_gpus}"

    @property
    def timeout(self) -> timedelta | None:
        """`timeout_seconds` as torch.distributed takes it."""
        return None if self.timeout_seconds is None else timedelta(seconds=self.timeout_seconds)

    def layout_of(self, world: World) -> ParallelLayout:
        """The layout of the processes of `world`."""
        return self.layout or ParallelLayout(data=world.size)


def load_parallel(
    directory: Path, spec: ModelSpec, world: World, sharing: ShardSpec, device: torch.device
) -> DataParallelModel:
    """Load a model from its files and share it among the processes; raises as `load_model` and `make_parallel`.

    Rank 0 reads the weights for all processes where it can. Weights to be split are loaded in host memory, since no GPU
    may hold all of them.
    """
    loaded_on = torch.device("cpu") if sharing.mode in SPLIT_WEIGHTS else device
    if world.is_first or spec.method in READ_BY_EVERY_PROCESS:
        model = load_model(directory, spec, loaded_on)
    else:
        model = uninitialized_model(read_config(directory), spec, loaded_on)
    return make_parallel(model, world, sharing, device)


def make_parallel(model: nn.Module, world: World, spec: ShardSpec, device: torch.device) -> DataParallelModel:
    """Share a loaded model among the processes.

    `model` has the same shapes in every process and is on `device`, or in host memory if weights are sharded. The
    weights of rank 0 count. Raises UserError if the processes cannot be divided so.
    """
    if world.size == 1:
        return DataParallelModel(model)
    parallel = _shared_model(model, world, spec, device)
    parallel.exchange = make_exchange(spec.layout_of(world), spec.timeout)
    return parallel


def make_exchange(layout: ParallelLayout, timeout: timedelta | None) -> TokenExchange | None:
    """The exchange between the processes of dimension `context`; None where there is one. All processes call this."""
    if layout.context == 1:
        return None
    with unset_fake_temporarily():
        group, _ = dist.new_subgroups_by_enumeration(layout.groups("context"), timeout=timeout)
    return HeadExchange(group)


def _shared_model(model: nn.Module, world: World, spec: ShardSpec, device: torch.device) -> DataParallelModel:
    """The model with its weights shared as `spec.mode` says."""
    if spec.mode not in SPLIT_WEIGHTS:
        return ReplicatedModel(model, world, device, owners=spec.mode == "zero1", layout=spec.layout_of(world))
    return ShardedModel(
        model,
        world,
        device,
        _mesh(world, spec, device),
        layout=spec.layout_of(world),
        reshard=spec.mode != "zero2",
        offload_weights=spec.offload_weights,
        # Full gradients of all weights would be the largest tensors of all; those of adapters are small.
        sum_every_micro_batch=all(parameter.requires_grad for parameter in model.parameters()),
    )


def _mesh(world: World, spec: ShardSpec, device: torch.device) -> DeviceMesh:
    """One group of all processes, or several groups that each have all weights."""
    if spec.mode != "hsdp":
        with unset_fake_temporarily():  # DeviceMesh reads the values of its rank table.
            return init_device_mesh(device.type, (world.size,), mesh_dim_names=(SHARD,))
    group = world.local_size if spec.group_gpus is None else spec.group_gpus
    if world.size % group or not 1 < group < world.size:
        raise UserError(
            f"train.shard_group_gpus: must be a divisor of the GPUs, above 1 and below all; got {group} of "
            f"{world.size}; set it, or use train.sharding=zero3 (one group of all) or ddp (groups of one)"
        )
    with unset_fake_temporarily():
        ranks = torch.arange(world.size).view(-1, group)
        # init_device_mesh would give its groups PyTorch's default timeout of 10 to 30 minutes.
        replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=spec.timeout)
        shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=spec.timeout)
        return DeviceMesh.from_group([replicate, shard], device.type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))
