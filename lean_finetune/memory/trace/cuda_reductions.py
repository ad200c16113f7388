"""Buffers of CUDA's reductions (sum, mean, norm, maximum) that several blocks of threads share.

A reduction over a dimension that is not the fastest in memory, such as the gradient of a norm's weight (summed over
tokens), is divided among blocks if each thread would otherwise read many values. Every thread of a block then writes
its partial results to global memory. The buffer can be several times as large as the input.

Source: `setReduceConfig` and `global_memory_size` in PyTorch's aten/src/ATen/native/cuda/Reduce.cuh. The sizes equal
those of a recording made on an H100 (`python -m benchmarks.cuda_ops`).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten

BLOCK_THREADS = 512
WARP_THREADS = 32
VECTOR_VALUES = 4
MIN_VALUES, MAX_VALUES = 16, 256
"""Values that a thread reads: at least so many where blocks divide a reduction, at most so many where they can."""
FP32_BYTES, VALUE_AND_INDEX_BYTES, COUNTER_BYTES = 4, 16, 4
FEWER_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Threads that run at once on a multiprocessor, by compute capability (CUDA programming guide)."""
USUAL_THREADS = 2048


def reduction_workspaces(capability: tuple[int, int], multiprocessors: int) -> dict[Any, Callable[..., Sequence[int]]]:
    """Buffers of each reduction on such a GPU, from the operation's arguments."""
    threads = multiprocessors * FEWER_THREADS.get(capability, USUAL_THREADS)
    buffers = partial(reduction_bytes, gpu_threads=threads)
    return {
        aten.sum.dim_IntList: lambda x, dims, *rest, **kwargs: buffers(x, dims),
        aten.mean.dim: lambda x, dims, *rest, **kwargs: buffers(x, dims),
        aten.amax.default: lambda x, dims=(), *rest, **kwargs: buffers(x, dims),
        aten.linalg_vector_norm.default: lambda x, order=2, dims=None, *rest, **kwargs: buffers(x, dims),
        aten.max.dim: lambda x, dim, *rest, **kwargs: buffers(x, [dim], partial_bytes=VALUE_AND_INDEX_BYTES),
    }


def reduction_bytes(
    x: torch.Tensor, dims: Sequence[int] | None, *, gpu_threads: int, partial_bytes: int = FP32_BYTES
) -> tuple[int, ...]:
    """Bytes of partial results and of counters of a reduction of `x` over `dims`; empty if one block does it all.

    A reduction over the fastest dimension has one partial result per block, some KiB, which are left out.

    `gpu_threads`: threads that the GPU runs at once.
    """
    over = {dim % x.ndim for dim in dims} if dims else set(range(x.ndim))
    reduced = [(x.shape[dim], x.stride(dim)) for dim in over if x.shape[dim] > 1]
    kept = [(x.shape[dim], x.stride(dim)) for dim in range(x.ndim) if dim not in over and x.shape[dim] > 1]
    fastest = min((stride for _, stride in kept), default=0)
    if not kept or not reduced or min(stride for _, stride in reduced) < fastest:
        return ()
    inputs, outputs = (math.prod(size for size, _ in dimensions) for dimensions in (reduced, kept))
    vector = VECTOR_VALUES if fastest == 1 else 1
    while vector > 1 and any(value % vector for value in (outputs, *(stride for _, stride in reduced))):
        vector //= 2
    block = BLOCK_THREADS // vector
    columns, rows = _power_of_two(min(outputs // vector, block)), _power_of_two(min(inputs, block))
    width = min(columns, WARP_THREADS)
    height = min(rows, block // width)
    width = min(columns, block // height)
    values, blocks = -(-inputs // height), -(-(outputs // vector) // width)
    possible_blocks = gpu_threads // (width * height)
    if inputs < min(height * MIN_VALUES, MAX_VALUES) or values < MAX_VALUES or blocks > possible_blocks:
        return ()
    parts = max(min(-(-possible_blocks // blocks), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    return () if parts == 1 else (partial_bytes * outputs * parts * width * vector, COUNTER_BYTES * blocks)


def _power_of_two(count: int) -> int:
    """The largest power of two up to `count`, which is positive."""
    return int(1 << (count.bit_length() - 1))
