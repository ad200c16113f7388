"""Saved tensors that move to host memory, as torchtune's OffloadActivations does it, on fake tensors."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 1024
"""Smaller tensors stay on the GPU."""
IN_FLIGHT = 5
"""The last saved tensors, of any size, whose copies to the host may be under way: they are still on the GPU."""


@dataclass(frozen=True, eq=False)
class _OnHost:
    """What is left of a tensor that moved."""

    shape: torch.Size
    dtype: torch.dtype


class Offloading(saved_tensors_hooks):
    """Drop saved tensors in forward, and allocate them again for the backward of the operation that saved them."""

    def __init__(self) -> None:
        self._saved = 0
        self._leaving: dict[int, tuple[_OnHost, torch.Tensor]] = {}
        self._returned: list[torch.Tensor] = []
        self._node: object = None
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _OnHost:
        self._saved += 1
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < LEAST_BYTES:
            return tensor
        moved = _OnHost(tensor.shape, tensor.dtype)
        for number in [number for number in self._leaving if number <= self._saved - IN_FLIGHT]:
            del self._leaving[number]
        self._leaving[self._saved] = moved, tensor
        return moved

    def _unpack(self, saved: torch.Tensor | _OnHost) -> torch.Tensor:
        node = torch._C._current_autograd_node()
        if self._node is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if node is not self._node:
            self._node = node
            self._returned.clear()
        if isinstance(saved, torch.Tensor):
            return saved
        for moved, tensor in self._leaving.values():
            if moved is saved:
                return tensor
        self._leaving.clear()
        self._returned.append(torch.empty(saved.shape, dtype=saved.dtype))
        return self._returned[-1]

    def _end(self) -> None:
        """Free what the end of backward frees."""
        self._node = None
        self._leaving.clear()
        self._returned.clear()
