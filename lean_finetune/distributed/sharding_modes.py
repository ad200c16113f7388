"""Load a model and share its weights among the GPUs of a run (train.sharding)."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PretrainedConfig

from lean_finetune.config.field_types import SPLIT_WEIGHTS
from lean_finetune.config.parallel_layout import Dimension, ParallelLayout
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.context_parallel import HeadExchange
from lean_finetune.distributed.fsdp import REPLICATE, SHARD, ShardedModel, layers_to_shard
from lean_finetune.distributed.pipeline import PipelineModel
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.replicated import ReplicatedModel
from lean_finetune.distributed.tensor_shards import TensorParallelModel, TensorShards
from lean_finetune.distributed.weight_broadcast import broadcast_weights, check_same_shapes
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.attention.kernels import TokenExchange
from lean_finetune.model.load_model import load_model, uninitialized_model
from lean_finetune.step.parallel_model import READ_BY_EVERY_PROCESS, ParallelModel


def division(train: Train, gpus: int, stage_layers: Sequence[int] | None) -> str:
    """Name of the way in which weights are sharded; checkpoints of equal divisions have equal shards."""
    layout, mode, group = train.layout(gpus), train.sharding_on(gpus), train.shard_group_gpus
    if layout.pipeline > 1:
        return f"stages of {' + '.join(map(str, stage_layers or ()))} layers"
    parts = f", {layout.tensor} GPUs a product" if layout.tensor > 1 else ""
    return (mode if group is None else f"{mode} in groups of {group}") + parts


def load_parallel(
    directory: Path,
    config: PretrainedConfig,
    train: Train,
    seed: int,
    world: World,
    device: torch.device,
    *,
    adapter: Path | None = None,
    stage_layers: tuple[int, ...] | None = None,
    timeout: timedelta | None = None,
) -> ParallelModel:
    """Load a model from its files and share it among the processes.

    Arguments and errors as of `load_model` and `make_parallel`.

    Rank 0 reads the weights for all processes where it can. Weights to be split are loaded in host memory, since no GPU
    may hold all of them.
    """
    layout = train.layout(world.size)
    divided = train.sharding_on(world.size) in SPLIT_WEIGHTS or layout.tensor > 1 or layout.pipeline > 1
    loaded_on = torch.device("cpu") if divided else device
    if world.is_first or train.method in READ_BY_EVERY_PROCESS:
        model = load_model(directory, config, train, loaded_on, seed, adapter)
    else:
        model = uninitialized_model(config, train, loaded_on)
    return make_parallel(model, train, world, device, stage_layers=stage_layers, timeout=timeout)


def make_parallel(
    model: nn.Module,
    train: Train,
    world: World,
    device: torch.device,
    *,
    stage_layers: tuple[int, ...] | None = None,
    timeout: timedelta | None = None,
) -> ParallelModel:
    """Share a loaded model among the processes, as `train` says.

    Args:
        model: it has the same shapes in every process, and the weights of rank 0 count. It is on `device`, or in host
            memory if weights are sharded.
        train: names the mode of sharding and the sizes of the mesh's dimensions.
        world: the processes of the run.
        device: of this process.
        stage_layers: number of layers of each stage of a pipeline.
        timeout: of collectives in a group that is a subset of all processes; None = PyTorch's default.

    Raises:
        UserError: the processes cannot share the model so.
    """
    if world.size == 1 and train.offload != "parameters":
        return ParallelModel(model)
    layout = train.layout(world.size)
    if layout.pipeline > 1:
        if stage_layers is None or len(stage_layers) != world.size:
            raise UserError(
                "data/estimate/verdict.json: must say how train.pipeline_stages divides the layers; got "
                f"{stage_layers} for {world.size} stages; run `dvc repro estimate`"
            )
        return PipelineModel(model, world, device, layout, stage_layers, timeout)
    shards = _tensor_shards(model, world, layout, timeout) if layout.tensor > 1 else None
    share = _sharded if train.sharding_on(world.size) in SPLIT_WEIGHTS else _replicated
    parallel = share(model, train, world, device, shards, timeout)
    if shards is not None:
        parallel = TensorParallelModel(parallel, shards)
    parallel.exchange = make_exchange(layout, timeout)
    return parallel


def make_exchange(layout: ParallelLayout, timeout: timedelta | None) -> TokenExchange | None:
    """The exchange between the processes of dimension `context`; None where there is one. All processes call this."""
    return None if layout.context == 1 else HeadExchange(_group(layout, timeout, "context"))


def _replicated(
    model: nn.Module,
    train: Train,
    world: World,
    device: torch.device,
    shards: TensorShards | None,
    timeout: timedelta | None,
) -> ParallelModel:
    """The model, or this process's part of every matmul, with all of its weights on every process that shares it."""
    layout = train.layout(world.size)
    check_same_shapes(model, world, device)
    if shards is not None:
        for layer in layers_to_shard(model):
            shards.divide(broadcast_weights(layer, device))
    broadcast_weights(model, device)
    if shards is not None:
        shards.divide(model)
    if layout.sharing == 1:
        return ParallelModel(model, rank=world.rank, size=world.size, layout=layout)
    group = None if shards is None else _group(layout, timeout, "data", "context")
    return ReplicatedModel(model, world, device, owners=train.sharding == "zero1", layout=layout, group=group)


def _sharded(
    model: nn.Module,
    train: Train,
    world: World,
    device: torch.device,
    shards: TensorShards | None,
    timeout: timedelta | None,
) -> ParallelModel:
    """The model, with a shard of each of its weights on every process."""
    return ShardedModel(
        model,
        world,
        device,
        _mesh(train, world, device, timeout),
        layout=train.layout(world.size),
        reshard=train.sharding_on(world.size) != "zero2",
        shards=shards,
        offload_weights=train.offload == "parameters",
        # Full gradients of all weights would be the largest tensors of all; gradients of adapters are small.
        sum_every_micro_batch=all(parameter.requires_grad for parameter in model.parameters())
        or (train.adapted and (bool(train.lora.modules_to_save) or "full" in TOWER.modes(train).values())),
    )


def _tensor_shards(model: nn.Module, world: World, layout: ParallelLayout, timeout: timedelta | None) -> TensorShards:
    """This process's part of every matmul.

    Raises:
        UserError: tensor-parallel processes are not on one node, or the model cannot be sharded so.
    """
    if world.local_size % layout.tensor:
        raise UserError(
            f"train.tensor_parallel: must divide the GPUs of a node, whose links are fast; got {layout.tensor} with "
            f"{world.local_size} a node; lower it"
        )
    group, index = _group(layout, timeout, "tensor"), layout.coordinates(world.rank).tensor
    return TensorShards(model, group, index, layout.tensor)


def _group(layout: ParallelLayout, timeout: timedelta | None, *dimensions: Dimension) -> dist.ProcessGroup:
    """The processes that differ from this one only in these dimensions of the mesh; all processes call this."""
    with unset_fake_temporarily():
        group, _ = dist.new_subgroups_by_enumeration(layout.groups(*dimensions), timeout=timeout)
    return group


def _mesh(train: Train, world: World, device: torch.device, timeout: timedelta | None) -> DeviceMesh:
    """One group of all processes, or several groups that each have all weights."""
    layout = train.layout(world.size)
    if train.sharding_on(world.size) != "hsdp":
        with unset_fake_temporarily():  # DeviceMesh reads the values of its rank table.
            if layout.tensor > 1:
                sharing = _group(layout, timeout, "data", "context")
                return DeviceMesh.from_group(sharing, device.type, mesh_dim_names=(SHARD,))
            return init_device_mesh(device.type, (world.size,), mesh_dim_names=(SHARD,))
    group = world.local_size if train.shard_group_gpus is None else train.shard_group_gpus
    if world.size % group or not 1 < group < world.size:
        raise UserError(
            f"train.shard_group_gpus: must be a divisor of the GPUs, above 1 and below all; got {group} of "
            f"{world.size}; set it, or use train.sharding=zero3 (one group of all) or ddp (groups of one)"
        )
    with unset_fake_temporarily():
        ranks = torch.arange(world.size).view(-1, group)
        # init_device_mesh would give its groups PyTorch's default timeout of 10 to 30 minutes.
        replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
        shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
        return DeviceMesh.from_group([replicate, shard], device.type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))
