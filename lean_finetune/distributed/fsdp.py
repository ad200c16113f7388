"""Sharded weights (train.sharding zero2, zero3 and hsdp), by FSDP2 (fully_shard).

FSDP2 gathers a decoder layer just before it computes. Optimizers see the local shards as plain tensors, so any
optimizer that updates value by value works.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.tensor_shards import TensorShards
from lean_finetune.distributed.weight_broadcast import broadcast_weights, check_same_shapes
from lean_finetune.islands.tower import TOWER
from lean_finetune.step.parallel_model import NamedParameters, ParallelModel, Result, ShardSlice, named_trained

SHARD, REPLICATE = "shard", "replicate"
"""Dimensions of the mesh."""


class _Root(nn.Module):
    """The root module of FSDP2, whose forward calls a function with the model.

    FSDP2 gathers weights when a module's call begins, and sums gradients when its backward ends. The loss reads the
    head's weight outside of the model's own forward (chunk by chunk, and again in backward), so one call must have all.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Result]) -> Result:
        return compute(self.model)


class _NoGradientsOfIntegers(TorchFunctionMode):
    """Makes shards of packed weights: torch 2.11 lets every shard require gradients before it asks the weight."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
        if func is torch.Tensor.requires_grad_ and not args[0].is_floating_point():
            return func(args[0], False)
        return func(*args, **(kwargs or {}))


def layers_to_shard(model: nn.Module) -> list[nn.Module]:
    """The layers that are sharded one by one.

    Raises:
        UserError: they are of a kind that is not known, or FSDP cannot shard them.
    """
    layers: list[nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    fault = None
    if not layers:
        fault = "are of a kind that is not known"
    owned = [id(parameter) for layer in layers for parameter in layer.parameters()]
    inside = {*owned}
    if len(owned) > len(inside):
        fault = "share weights"
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    for part in (*(layer.parameters() for layer in layers), outside):
        if len(types := {str(p.dtype).removeprefix("torch.") for p in part if p.requires_grad}) > 1:
            fault = f"train weights of several types ({', '.join(sorted(types))})"
    if fault is not None:
        raise UserError(
            f"train.sharding: shards a model by its decoder layers, and this model's {fault}; use ddp or zero1"
        )
    return layers


class ShardedModel(ParallelModel):
    """A `ParallelModel` whose processes each keep a shard of every weight."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        mesh: DeviceMesh,
        *,
        layout: ParallelLayout | None = None,
        reshard: bool,
        sum_every_micro_batch: bool,
        offload_weights: bool = False,
        shards: TensorShards | None = None,
    ):
        """Shard `model` layer by layer, so that layers still to come may be in host memory.

        Args (those that their types do not explain):
            model: of the same shapes in every process; the weights of the first process count.
            device: where it computes; each layer is moved there before it is sharded.
            mesh: the processes, with a dimension `SHARD`, and `REPLICATE` where groups of them have the same shards.
            reshard: free a gathered layer after its forward, and gather it again for backward.
            sum_every_micro_batch: reduce gradients after each micro-batch, so that only their shards are stored.
            offload_weights: store shards and their gradients in host memory and update them there; a layer's shard is
                copied to the device whenever the layer is gathered.
            shards: tensor parallelism, which replaces a layer's weights by this process's part before it is sharded.

        Raises:
            UserError: FSDP cannot shard the decoder layers one by one.
        """
        super().__init__(model, rank=world.rank, size=world.size, layout=layout)
        self._device, self._group = device, mesh.get_group(SHARD)
        self._shard_rank, self._shards = mesh.get_local_rank(SHARD), mesh[SHARD].size()
        self._first_replica = REPLICATE not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank(REPLICATE) == 0
        self._sum_every_micro_batch = sum_every_micro_batch
        # Torch loses a part's gradients where the step's last micro-batch does not reach it: rows of text.
        self._sum_between_groups_every_time = any(TOWER.is_beside(name) for name, _ in named_trained(model))
        layers = layers_to_shard(model)
        check_same_shapes(model, world, device)
        pinned = device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=pinned) if offload_weights else OffloadPolicy()

        def send(module: nn.Module) -> nn.Module:
            broadcast_weights(module, device)
            return module if shards is None else shards.divide(module)

        with _NoGradientsOfIntegers():
            for layer in layers:
                fully_shard(send(layer), mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
            # The root (embedding, last norm, head) stays gathered from forward to backward, which begins with it.
            root = _Root(send(model))
            self._root = fully_shard(root, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
        modules = cast(nn.Module, self._root).modules()
        self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:  # Sum, not mean: losses are divided by the step's tokens already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._dtensors = [(name, tensor) for name, tensor in named_trained(model) if isinstance(tensor, DTensor)]
        self._local = [(name, nn.Parameter(cast(DTensor, t.detach()).to_local())) for name, t in self._dtensors]
        self._whole = {shard: whole for (_, shard), (_, whole) in zip(self._local, self._dtensors, strict=True)}
        # A tensor with fewer rows than processes leaves some of them without any.
        self.local_shard = nn.ParameterList([shard for _, shard in self._local if shard.numel()])

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See ParallelModel."""
        result = cast(nn.Module, self._root)(compute)
        if not torch.is_grad_enabled():  # Without a backward, nothing else frees the gathered weights.
            for module in self._fsdp_modules:
                module.reshard()
        return result

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """See ParallelModel."""
        self._root.set_requires_gradient_sync(last or self._sum_every_micro_batch)
        # Groups with the same shards (hsdp) sum theirs once a step, at its end.
        self._root.set_requires_all_reduce(last or self._sum_between_groups_every_time)
        return nullcontext()

    def trained_parameters(self) -> NamedParameters:
        """See ParallelModel: gradients move to the local shards, so that clearing those frees them."""
        for (_, dtensor), (_, shard) in zip(self._dtensors, self._local, strict=True):
            if dtensor.grad is not None:
                assert isinstance(dtensor.grad, DTensor)
                shard.grad, dtensor.grad = dtensor.grad.to_local(), None
        return self._local

    def after_gradient(self, parameter: nn.Parameter, action: Callable[[], None]) -> RemovableHandle:
        """See ParallelModel: FSDP2 runs these hooks when it has reduced the gradient and copied it to the host."""
        dtensor = self._whole[parameter]

        def act(_: torch.Tensor) -> None:
            assert isinstance(dtensor.grad, DTensor)
            if self._device.type == "cuda":  # PyTorch before 2.13 does not wait for its copy to pinned memory.
                torch.cuda.synchronize(self._device)
            parameter.grad, dtensor.grad = dtensor.grad.to_local(), None
            action()

        return dtensor.register_post_accumulate_grad_hook(act)

    def slices(self) -> list[ShardSlice]:
        """See ParallelModel: shards have equal numbers of rows; the last ones may be short or empty."""
        found = []
        for (name, dtensor), (_, shard) in zip(self._dtensors, self._local, strict=True):
            rows = -(-dtensor.shape[0] // self._shards)
            first = min(self._shard_rank * rows, dtensor.shape[0])
            if len(shard) != min(rows, dtensor.shape[0] - first):
                raise RuntimeError(f"{name} is not sharded in blocks of {rows} rows")
            found.append(ShardSlice(first_row=first, full_shape=tuple(dtensor.shape), saved_here=self._first_replica))
        return found

    def gradient_norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See ParallelModel."""
        squared = get_total_norm(list(gradients), foreach=foreach).to(self._device, torch.float32).square()
        # Over one group of shards: the groups of hsdp all have the same gradients.
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt()

    def end_step(self, *, updated: bool) -> None:
        """See ParallelModel: shards are updated in place."""
        for _, shard in self._local:
            shard.grad = None

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ParallelModel."""
        for name, dtensor in self._dtensors:
            yield name, cast(DTensor, dtensor.detach().to(self._device)).full_tensor()
