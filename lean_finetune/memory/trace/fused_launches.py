"""Trace Liger-Kernel's autograd functions: its Python code allocates every tensor, and its kernels are left out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from lean_finetune.config.field_types import FusedKernels


@contextmanager
def without_launches(choice: FusedKernels, multiprocessors: int) -> Iterator[None]:
    """A context in which Triton launches no kernels, and Liger allocates as on a GPU of so many multiprocessors."""
    if choice == "none":
        yield
        return
    from liger_kernel.ops import rms_norm
    from triton.runtime.jit import KernelInterface

    backward = rms_norm.rms_norm_backward

    def backward_on_gpu(*args: Any, **kwargs: Any) -> Any:
        with _RowPerMultiprocessor(multiprocessors):
            return backward(*args, **kwargs)

    with (
        patch.object(KernelInterface, "__getitem__", lambda kernel, grid: lambda *args, **kwargs: None),
        patch.object(rms_norm, "rms_norm_backward", backward_on_gpu),
    ):
        yield


class _RowPerMultiprocessor(TorchFunctionMode):
    """Allocates the partial sums of a norm's weight gradient as on a GPU; without one, Liger allocates a single row."""

    def __init__(self, rows: int):
        super().__init__()
        self._rows = rows

    def __torch_function__(
        self, function: Callable, types: Any, args: Sequence = (), kwargs: Mapping | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        if function is torch.empty:
            args = ((self._rows, *args[0][1:]), *args[1:])
        return function(*args, **(kwargs or {}))
