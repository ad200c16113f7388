"""Emulate autograd's in-place gradient accumulation, which it skips for tensor subclasses such as fake tensors.

- The engine adds two gradients of one tensor into the first, if nothing else refers to it or its storage
  (torch/csrc/autograd/input_buffer.cpp).
- The gradient of an index operation, of a maximum along a dimension or of the largest values is written into the
  zeros it starts from (torch/csrc/autograd/FunctionsManual.cpp).

Without this a trace would count one tensor too many in each case. The module uses private PyTorch functions.
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
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}
"""Out-of-place operations, and the in-place ones that run for plain tensors."""
WRITERS = {
    aten.index_add.default: {"IndexSelectBackward0"},
    aten.index_put.default: {"IndexBackward0"},
    aten.scatter.src: {"MaxBackward0", "SortBackward0", "TopkBackward0"},
    aten.scatter_add.default: {"GatherBackward0"},
}
"""Autograd nodes that write these operations into new zeros."""


def in_place_version(operation: Any, args: Sequence[Any]) -> Any:
    """The operation that would run for plain tensors: one of `IN_PLACE`, or `operation` itself.

    Call it directly from `__torch_dispatch__`: calls from the C++ engine are recognised by the absence of Python frames
    between the engine and the mode.
    """
    if torch.is_grad_enabled() or sys._getframe(2).f_code is not _engine_run_backward.__code__:
        return operation
    nodes = WRITERS.get(operation)
    in_place = _accumulates(args) if nodes is None else type(torch._C._current_autograd_node()).__name__ in nodes
    return IN_PLACE[operation] if in_place else operation


def _accumulates(args: Sequence[Any]) -> bool:
    """Whether an addition sums gradients into the memory of the first."""
    if len(args) != 2 or not all(type(each) is FakeTensor for each in args):
        return False
    first, second = args
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    return alike and _uses(first) == sole_owner_uses() and _dense(first)


def _uses(tensor: torch.Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


@cache
def sole_owner_uses() -> tuple[int, int]:
    """References to a gradient that only the engine owns, including the references of the measuring call.

    Measured rather than stated, as the number may differ between PyTorch versions. Call first outside of any trace.
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
    """Whether a tensor's values are non-overlapping and dense in memory."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
