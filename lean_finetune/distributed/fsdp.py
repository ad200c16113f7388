"""Every process holds a part of each weight (train.sharding zero2, zero3 and hsdp), by FSDP2 (fully_shard).

A decoder layer is made whole just before it computes. Optimizers see the local parts as plain tensors: they know
nothing of the others, so any that updates value by value works.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.forward_wrapper import Parts, Whole
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.weight_broadcast import check_same_form, handed_out
from lean_finetune.step.process_group import NamedParameters, Piece, Result, named_trained

SHARD, REPLICATE = "shard", "replicate"
"""Dimensions of the mesh."""


class Shards:
    """A team (lean_finetune.step.process_group) whose members hold a part of each weight."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        device: torch.device,
        mesh: DeviceMesh,
        *,
        reshard: bool,
        sum_every_turn: bool,
        offload_weights: bool = False,
    ):
        """Cut the weights of `model`, layer by layer: what is not yet cut may be in the host's memory.

        Args:
            model: of the same form in every process, with the weights of the first one.
            world: which process this is.
            device: where it computes; each layer is moved there before it is cut.
            mesh: the processes, with a dimension `SHARD`, and `REPLICATE` where groups of them hold the same.
            reshard: give a layer's other parts back after its forward, and gather them again for backward.
            sum_every_turn: keep no more than a part of the gradients between micro-batches, for a sum after each.
            offload_weights: keep the parts and their gradients in the host's memory, where they are updated: a layer's
                part is copied to the device whenever the layer is gathered.

        Raises:
            UserError: the model has no layers to cut it by: all weights would be whole at once.
        """
        self.rank, self.size, self.model = world.rank, world.size, model
        self._device, self._group = device, mesh.get_group(SHARD)
        self._place, self._places = mesh.get_local_rank(SHARD), mesh[SHARD].size()
        self._first_copy = REPLICATE not in (mesh.mesh_dim_names or ()) or mesh.get_local_rank(REPLICATE) == 0
        self._sum_every_turn = sum_every_turn
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise UserError(
                "train.sharding: cuts a model by its decoder layers, and this model's are of a kind that is not known; "
                "use ddp or zero1"
            )
        check_same_form(model, world, device)
        pinned = device.type == "cuda"
        policy = CPUOffloadPolicy(pin_memory=pinned) if offload_weights else OffloadPolicy()
        for layer in layers:
            fully_shard(handed_out(layer, device), mesh=mesh, reshard_after_forward=reshard, offload_policy=policy)
        # The root (embedding, last norm, head) stays whole from forward to backward, which begins with it.
        root = Whole(handed_out(model, device))
        self._whole = fully_shard(root, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
        modules = cast(nn.Module, self._whole).modules()
        self._sharded = [module for module in modules if isinstance(module, FSDPModule)]
        for module in self._sharded:  # A mean would divide what is divided by the step's tokens already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self._cut = [(name, parameter) for name, parameter in named_trained(model) if isinstance(parameter, DTensor)]
        self._parts = [(name, nn.Parameter(cast(DTensor, cut.detach()).to_local())) for name, cut in self._cut]
        # Of a tensor with fewer rows than there are members, some hold nothing.
        self.mine: nn.Module = Parts([part for _, part in self._parts if part.numel()])

    def run(self, compute: Callable[[nn.Module], Result]) -> Result:
        """See Team."""
        result = cast(nn.Module, self._whole)(compute)
        if not torch.is_grad_enabled():  # No backward will follow, after which weights would be given back.
            for module in self._sharded:
                module.reshard()
        return result

    def turn(self, *, last: bool) -> AbstractContextManager[object]:
        """See Team."""
        self._whole.set_requires_gradient_sync(last or self._sum_every_turn)
        self._whole.set_requires_all_reduce(last)
        return nullcontext()

    def trained(self) -> NamedParameters:
        """See Team: gradients are handed on to the parts, so that whoever is done with one frees it."""
        for (_, cut), (_, part) in zip(self._cut, self._parts, strict=True):
            if cut.grad is not None:
                assert isinstance(cut.grad, DTensor)
                part.grad, cut.grad = cut.grad.to_local(), None
        return self._parts

    def pieces(self) -> list[Piece]:
        """See Team: rows are dealt in equal stretches, of which the last ones may be short or empty."""
        found = []
        for (name, cut), (_, part) in zip(self._cut, self._parts, strict=True):
            stretch = -(-cut.shape[0] // self._places)
            first = min(self._place * stretch, cut.shape[0])
            if len(part) != min(stretch, cut.shape[0] - first):
                raise RuntimeError(f"{name} is cut in another way than in stretches of {stretch} rows")
            found.append(Piece(first=first, whole=tuple(cut.shape), kept_here=self._first_copy))
        return found

    def norm(self, gradients: Iterable[torch.Tensor], *, foreach: bool) -> torch.Tensor:
        """See Team."""
        squared = get_total_norm(list(gradients), foreach=foreach).to(self._device, torch.float32).square()
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt()

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See Team."""
        dist.all_reduce(values)
        return values

    def finish(self, *, updated: bool) -> None:
        """See Team: each part is updated where it is."""
        for _, part in self._parts:
            part.grad = None

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Team: each is gathered when it is asked for."""
        here = ((name, cast(DTensor, cut.detach().to(self._device))) for name, cut in self._cut)
        return ((name, cut.full_tensor()) for name, cut in here)
