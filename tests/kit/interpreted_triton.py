"""Run Triton's kernels on a CPU: its interpreter, with what kernels of other packages need beyond it (Triton 3.9)."""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from lean_finetune.config.field_types import FusedKernels


@contextmanager
def interpreted_kernels(choice: FusedKernels = "none") -> Iterator[None]:
    """A context in which fused kernels compute on the CPU; Triton must have been imported with TRITON_INTERPRET=1.

    `choice` is the package whose kernels run besides those of this project.

    - A number is a tensor in a kernel, and so is the variable of a loop; the interpreter passes Python's.
    - A kernel with several configurations runs with the first: there is nothing to time.
    - bf16 is computed in fp32, also in products of matrices, and rounded to the nearest; the interpreter computes with
      the bits, and truncates.
    - `rsqrt` of CUDA's library has no Python code.
    - Tensors are already on the host; the interpreter's copies of their storages would live on in cycles.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert, builder, executor = interpreter._implicit_cvt, interpreter.InterpreterBuilder, interpreter.GridExecutor
    compute, cast, handle = builder.binary_op, builder.cast_impl, interpreter.TensorHandle
    dot = builder.create_dot

    def argument(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(handle(np.array([value], np.float32), tl.float32), tl.float32)

    def cast_impl(self: Any, value: Any, kind: Any) -> Any:
        kinds = (value.dtype.scalar, kind.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            return handle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(value.data).view(np.uint32)
            return handle(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), tl.bfloat16)
        return cast(self, value, kind)

    def binary_op(self: Any, left: Any, right: Any, operation: Callable) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return compute(self, left, right, operation)
        exact = (self.cast_impl(value, tl.float32) for value in (left, right))
        return self.cast_impl(compute(self, *exact, operation), tl.bfloat16)

    def create_dot(self: Any, left: Any, right: Any, *more: Any) -> Any:
        exact = (
            self.cast_impl(value, tl.float32) if value.dtype.scalar == tl.bfloat16 else value for value in (left, right)
        )
        return dot(self, *exact, *more)

    def arguments(self: Any, args: Sequence, kwargs: Mapping) -> tuple[list, Mapping]:
        return list(args), kwargs

    with (
        patch.object(interpreter, "_implicit_cvt", argument),
        patch.multiple(builder, cast_impl=cast_impl, binary_op=binary_op, create_dot=create_dot),
        patch.multiple(executor, _init_args_hst=arguments, _restore_args_dev=lambda *args: None),
        {"liger": _liger, "fla": lambda: _fla(argument)}.get(choice, nullcontext)(),
    ):
        yield


@contextmanager
def _liger() -> Iterator[None]:
    """What Liger-Kernel needs."""
    import triton.language as tl
    from liger_kernel.ops import rms_norm

    _check(rms_norm._rms_norm_forward_kernel)
    with patch.object(rms_norm, "rsqrt", lambda value: tl.rsqrt(value)):
        yield


@contextmanager
def _fla(tensor: Callable[[int], Any]) -> Iterator[None]:
    """What flash-linear-attention needs; `tensor` makes a number a tensor of a kernel."""
    from fla.ops.common import chunk_delta_h
    from fla.ops.utils.cache import CachedAutotuner
    from triton.runtime.autotuner import Autotuner

    def first(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    def loop(*bounds: Any) -> Iterator[Any]:
        return (tensor(number) for number in builtins.range(*map(int, bounds)))

    _check(chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64.fn.fn)
    with ExitStack() as stack:
        for kind in (Autotuner, CachedAutotuner):
            stack.enter_context(patch.object(kind, "run", first))
        stack.enter_context(patch.object(chunk_delta_h, "range", loop, create=True))
        yield


def _check(kernel: Any) -> None:
    """Raise if a kernel would be compiled."""
    from triton.runtime import interpreter

    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported")
