"""Load a model and share its weights among the GPUs of a run (train.sharding)."""

from collections.abc import Mapping, Sequence
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
from lean_finetune.config.parallel_layout import Dimension, ParallelLayout
from lean_finetune.config.schema import Train
from lean_finetune.config.sharding_rules import SPLIT_WEIGHTS
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.context_parallel import HeadExchange
from lean_finetune.distributed.fsdp import REPLICATE, SHARD, ShardedModel, decoder_layers
from lean_finetune.distributed.pipeline import PipelineModel
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.replicated import ReplicatedModel
from lean_finetune.distributed.tensor_shards import TensorParallelModel, TensorShards
from lean_finetune.distributed.weight_broadcast import broadcast_weights, check_same_shapes
from lean_finetune.model.attention.kernels import TokenExchange
from lean_finetune.model.load_model import load_model, uninitialized_model
from lean_finetune.model.model_config import read_config
from lean_finetune.step.data_parallel import DataParallelModel

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params

READ_BY_EVERY_PROCESS: tuple[Method, ...] = ("int8_lora",)
"""Methods whose weights every process reads: 8-bit layers keep values outside of parameters and buffers."""


def host_bytes(of_process: Mapping[str, int], method: Method, processes: int, node: int = 0) -> int:
    """RAM that the `processes` of a node need, without margins.

    `of_process` is what one needs after `imports`, for `loading` (rank 0 reads weights for all where it can) and for
    `training`, which begins once loading is over.
    """
    readers = processes if method in READ_BY_EVERY_PROCESS else int(node == 0)
    return processes * of_process["imports"] + max(readers * of_process["loading"], processes * of_process["training"])


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """How the GPUs of a run share a model."""

    mode: Sharding
    group_gpus: int | None = None
    """Mode hsdp: GPUs that share one copy of the weights; None = the GPUs of a node."""
    offload_weights: bool = False
    """Sharded modes: each process keeps its shards, their gradients and the update in host memory; also on one GPU."""
    timeout_seconds: float | None = None
    """Timeout of collectives in a group that is a subset of all processes; None = PyTorch's default."""
    layout: ParallelLayout | None = None
    """None: all processes train different rows."""
    stage_layers: tuple[int, ...] | None = None
    """Number of layers of each stage of a pipeline; None = not decided yet, or no pipeline."""

    @classmethod
    def from_params(cls, params: "Params", stage_layers: Sequence[int] | None = None) -> "ShardSpec":
        """Read how GPUs share a run; `stage_layers` is what stage estimate decided."""
        offload_weights = params.train.offload == "parameters"
        return cls(
            # One GPU fetches its layers from the host as zero3 does: it is a group of one.
            mode="zero3" if offload_weights and params.hardware.num_gpus == 1 else params.train.sharding,
            group_gpus=params.train.shard_group_gpus,
            offload_weights=offload_weights,
            timeout_seconds=params.run.rank_timeout_seconds,
            layout=ParallelLayout.from_params(params),
            stage_layers=None if stage_layers is None else tuple(stage_layers),
        )

    @property
    def pipeline_stages(self) -> int:
        """Number of stages of a pipeline; 1 without one."""
        return 1 if self.layout is None else self.layout.pipeline

    @property
    def division(self) -> str:
        """Name of the way in which weights are divided; checkpoints of equal divisions have equal shards."""
        if self.pipeline_stages > 1:
            return f"stages of {' + '.join(map(str, self.stage_layers or ()))} layers"
        parts = f", {self.layout.tensor} GPUs a product" if self.layout and self.layout.tensor > 1 else ""
        return (self.mode if self.group_gpus is None else f"{self.mode} in groups of {self.group_gpus}") + parts

    @property
    def timeout(self) -> timedelta | None:
        """`timeout_seconds` as torch.distributed takes it."""
        return None if self.timeout_seconds is None else timedelta(seconds=self.timeout_seconds)

    def layout_of(self, world: World) -> ParallelLayout:
        """The layout of the processes of `world`."""
        return self.layout or ParallelLayout(data=world.size)


def load_parallel(
    directory: Path, train: Train, seed: int, world: World, sharing: ShardSpec, device: torch.device
) -> DataParallelModel:
    """Load a model from its files and share it among the processes; raises as `load_model` and `make_parallel`.

    Rank 0 reads the weights for all processes where it can. Weights to be split are loaded in host memory, since no GPU
    may hold all of them.
    """
    layout = sharing.layout_of(world)
    divided = sharing.mode in SPLIT_WEIGHTS or layout.tensor > 1 or layout.pipeline > 1
    loaded_on = torch.device("cpu") if divided else device
    if world.is_first or train.method in READ_BY_EVERY_PROCESS:
        model = load_model(directory, train, loaded_on, seed)
    else:
        model = uninitialized_model(read_config(directory), train, loaded_on)
    return make_parallel(model, world, sharing, device)


def make_parallel(model: nn.Module, world: World, spec: ShardSpec, device: torch.device) -> DataParallelModel:
    """Share a loaded model among the processes.

    `model` has the same shapes in every process and is on `device`, or in host memory if weights are sharded. The
    weights of rank 0 count. Raises UserError if the processes cannot be divided so.
    """
    if world.size == 1 and not spec.offload_weights:
        return DataParallelModel(model)
    layout = spec.layout_of(world)
    shards = _tensor_shards(model, world, spec) if layout.tensor > 1 else None
    parallel = _shared_model(model, world, spec, device, shards)
    if shards is not None:
        parallel = TensorParallelModel(parallel, shards)
    parallel.exchange = make_exchange(layout, spec.timeout)
    return parallel


def make_exchange(layout: ParallelLayout, timeout: timedelta | None) -> TokenExchange | None:
    """The exchange between the processes of dimension `context`; None where there is one. All processes call this."""
    return None if layout.context == 1 else HeadExchange(_group(layout, timeout, "context"))


def _shared_model(
    model: nn.Module, world: World, spec: ShardSpec, device: torch.device, shards: TensorShards | None
) -> DataParallelModel:
    """The model, or this process's part of it, with its weights shared as `spec.mode` says."""
    layout = spec.layout_of(world)
    if layout.pipeline > 1:
        if spec.stage_layers is None or len(spec.stage_layers) != world.size:
            raise UserError(
                "data/estimate/verdict.json: must say how train.pipeline_stages divides the layers; got "
                f"{spec.stage_layers} for {world.size} stages; run `dvc repro estimate`"
            )
        return PipelineModel(model, world, device, layout, spec.stage_layers, spec.timeout)
    if spec.mode not in SPLIT_WEIGHTS:
        check_same_shapes(model, world, device)
        if shards is not None:
            for layer in decoder_layers(model):
                shards.divide(broadcast_weights(layer, device))
        broadcast_weights(model, device)
        if shards is not None:
            shards.divide(model)
        if layout.sharing == 1:
            return DataParallelModel(model, rank=world.rank, size=world.size, layout=layout)
        group = None if shards is None else _group(layout, spec.timeout, "data", "context")
        return ReplicatedModel(model, world, device, owners=spec.mode == "zero1", layout=layout, group=group)
    return ShardedModel(
        model,
        world,
        device,
        _mesh(world, spec, device),
        layout=layout,
        reshard=spec.mode != "zero2",
        shards=shards,
        offload_weights=spec.offload_weights,
        # Full gradients of all weights would be the largest tensors of all; gradients of adapters are small.
        sum_every_micro_batch=all(parameter.requires_grad for parameter in model.parameters()),
    )


def _tensor_shards(model: nn.Module, world: World, spec: ShardSpec) -> TensorShards:
    """This process's part of every product.

    Raises:
        UserError: the processes of a product are not on one node, or the model cannot be divided so.
    """
    layout = spec.layout_of(world)
    if world.local_size % layout.tensor:
        raise UserError(
            f"train.tensor_parallel: must divide the GPUs of a node, whose links are fast; got {layout.tensor} with "
            f"{world.local_size} a node; lower it"
        )
    group, index = _group(layout, spec.timeout, "tensor"), layout.coordinates(world.rank).tensor
    return TensorShards(model, group, index, layout.tensor)


def _group(layout: ParallelLayout, timeout: timedelta | None, *dimensions: Dimension) -> dist.ProcessGroup:
    """The processes that differ from this one only in these dimensions of the mesh; all processes call this."""
    with unset_fake_temporarily():
        group, _ = dist.new_subgroups_by_enumeration(layout.groups(*dimensions), timeout=timeout)
    return group


def _mesh(world: World, spec: ShardSpec, device: torch.device) -> DeviceMesh:
    """One group of all processes, or several groups that each have all weights."""
    layout = spec.layout_of(world)
    if spec.mode != "hsdp":
        with unset_fake_temporarily():  # DeviceMesh reads the values of its rank table.
            if layout.tensor > 1:
                sharing = _group(layout, spec.timeout, "data", "context")
                return DeviceMesh.from_group(sharing, device.type, mesh_dim_names=(SHARD,))
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
