"""What backward does in place with plain tensors, and with fake ones not: autograd never writes to a subclass so.

- Its engine sums two gradients of one tensor into the one that came first, where nobody else holds that one nor its
  storage (torch/csrc/autograd/input_buffer.cpp).
- The gradient of a choice of rows is written into the zeros it was made of (torch/csrc/autograd/FunctionsManual.cpp).

A trace that did neither would hold one tensor more at each of them. The parts of PyTorch that are not public are all in
this file.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""Operations that may be meant, and those that run."""
WRITERS = {
    aten.index_add.default: "IndexSelectBackward0",
    aten.index_put.default: "IndexBackward0",
    aten.scatter_add.default: "GatherBackward0",
}
"""Whose formula writes into zeros of its own."""


def meant_in_place(operation: Any, args: Sequence[Any]) -> Any:
    """The operation that runs with plain tensors: one of `IN_PLACE`, or the same.

    To be called by the dispatch mode itself: what tells the engine and the formulas of C++ from others is that no code
    in Python runs between them and the mode.
    """
    if torch.is_grad_enabled() or sys._getframe(2).f_code is not _engine_run_backward.__code__:
        return operation
    node = WRITERS.get(operation)
    in_place = _sums_up(args) if node is None else type(torch._C._current_autograd_node()).__name__ == node
    return IN_PLACE[operation] if in_place else operation


def _sums_up(args: Sequence[Any]) -> bool:
    """Whether an addition is a sum of gradients for which the engine takes the memory of the first."""
    if len(args) != 2 or not all(type(each) is FakeTensor for each in args):
        return False
    first, second = args
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    return alike and _uses(first) == lone_uses() and _dense(first)


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def lone_uses() -> tuple[int, int]:
    """References to a gradient that nobody but the engine holds: its own, and those of the call that asks.

    PyTorch is asked, since it may hold more in another version; for the first time where nothing is traced.
    """
    found: list[tuple[int, int]] = []

    class Probe(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Sequence = (), kwargs: Mapping | None = None) -> Any:
            if func is aten.add.Tensor and not torch.is_grad_enabled():
                found.append(_uses(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.enable_grad():
        weight = torch.ones(2, requires_grad=True)
        total = (weight * 2 + weight * 3).sum()
        with Probe():
            total.backward()
    (uses,) = found  # The sum of its two gradients.
    return uses


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values fill its part of the memory, each in a place of its own."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
