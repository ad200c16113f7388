"""Send the weights that rank 0 has read to all processes, a layer at a time: each byte is read once and stored once."""

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lean_finetune.distributed.processes import World, wait_for_all
from lean_finetune.model.quantize import quantisation_tensors

DIVIDED = "has_part_of_weights"
"""Attribute that marks a module whose weights this process has only in part."""


def check_same_shapes(model: nn.Module, world: World, device: torch.device) -> None:
    """Compare the tensors that every process is about to send or receive.

    Raises:
        RuntimeError: models differ; they would be filled with each other's bytes.
    """
    wait_for_all()  # Rank 0 has read and quantised all weights, the others none.
    shapes = repr([(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(model)])
    sums = torch.zeros(world.size, dtype=torch.int64, device=device)
    sums[world.rank] = zlib.crc32(shapes.encode())
    dist.all_reduce(sums)
    if len(set(sums.tolist())) > 1:
        raise RuntimeError("the processes of this run have built models of different shapes")


def broadcast_weights(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device and fill what is not yet sharded with the values of rank 0; returns the module."""
    _move(module, device)
    for tensor in _tensors(module):
        dist.broadcast(tensor, src=0)
    return module


def send_weights(module: nn.Module, owner: int, world: World, device: torch.device) -> None:
    """Send a module from the first process to the one process that needs it, which moves it to a device."""
    if world.rank == owner:
        _move(module, device)
    for tensor in _tensors(module) if owner else ():
        if world.is_first:
            dist.send(tensor.to(device), owner)
        elif world.rank == owner:
            dist.recv(tensor, 0)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, with the scales of an uninitialized 4-bit layer, which belong to no parameter."""
    module.to(device)
    for part in _unsharded(module):
        state = getattr(part, "quant_state", None)
        if state is not None:
            state.to(device)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Weights, buffers and scales of 4-bit weights that are not yet sharded, each once."""
    seen = set()
    for part in _unsharded(module):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor.detach()
        if not list(part.children()):
            yield from quantisation_tensors(part)


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its descendants, except layers that are sharded already."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule) and not hasattr(child, DIVIDED):
            yield from _unsharded(child)
