"""Weights that one process has read, handed out to all, a layer at a time: each byte is read once, and held once."""

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lean_finetune.distributed.processes import World
from lean_finetune.distributed.progress_barrier import wait_for_all
from lean_finetune.model.quantize import quantisation_tensors


def check_same_form(model: nn.Module, world: World, device: torch.device) -> None:
    """Compare what every process is about to send and receive.

    Raises:
        RuntimeError: models differ; they would be filled with each other's bytes.
    """
    wait_for_all()  # The first process has read and packed all weights, the others none.
    form = repr([(tuple(tensor.shape), tensor.dtype) for tensor in _tensors(model)])
    sums = torch.zeros(world.size, dtype=torch.int64, device=device)
    sums[world.rank] = zlib.crc32(form.encode())
    dist.all_reduce(sums)
    if len(set(sums.tolist())) > 1:
        raise RuntimeError("the processes of this run have made models of different form")


def handed_out(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on a device, with the first process's values in all that is not yet cut."""
    module.to(device)
    for part in _uncut(module):  # A hollow 4-bit layer's scales belong to no parameter, and stay behind.
        state = getattr(part, "quant_state", None)
        if state is not None:
            state.to(device)
    for tensor in _tensors(module):
        dist.broadcast(tensor, src=0)
    return module


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Weights, buffers and scales of 4-bit weights, of all that is not yet cut, each once."""
    seen = set()
    for part in _uncut(module):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor.detach()
        if not list(part.children()):
            yield from quantisation_tensors(part)


def _uncut(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those in it, but for layers that are cut."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _uncut(child)
