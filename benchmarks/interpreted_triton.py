"""Run Triton's kernels on a CPU: its interpreter, with what Liger-Kernel's kernels need beyond it (Triton 3.9)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """A context in which Liger's kernels compute on the CPU; Triton must have been imported with TRITON_INTERPRET=1.

    - A number is a tensor in a kernel; the interpreter passes Python's.
    - bf16 is computed in fp32 and rounded to the nearest; the interpreter computes with the bits, and truncates.
    - `rsqrt` of CUDA's library has no Python code.
    - Tensors are already on the host; the interpreter's copies of their storages would live on in cycles.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert, builder, executor = interpreter._implicit_cvt, interpreter.InterpreterBuilder, interpreter.GridExecutor
    compute, cast, handle = builder.binary_op, builder.cast_impl, interpreter.TensorHandle

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

    def arguments(self: Any, args: Sequence, kwargs: Mapping) -> tuple[list, Mapping]:
        return list(args), kwargs

    from liger_kernel.ops import rms_norm

    if not isinstance(rms_norm._rms_norm_forward_kernel, interpreter.InterpretedFunction):
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported")
    with (
        patch.object(interpreter, "_implicit_cvt", argument),
        patch.multiple(builder, cast_impl=cast_impl, binary_op=binary_op),
        patch.multiple(executor, _init_args_hst=arguments, _restore_args_dev=lambda *args: None),
        patch.object(rms_norm, "rsqrt", lambda value: tl.rsqrt(value)),
    ):
        yield
