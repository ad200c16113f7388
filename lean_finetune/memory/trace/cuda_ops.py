"""Workspaces and temporary tensors of single CUDA operations, which their fake versions do not allocate."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import repeat_kv

from lean_finetune.core.optional_bitsandbytes import bnb, operations

# Buffers of CUDA's reductions (sum, mean, norm, maximum) that several blocks of threads share.
#
# A reduction is divided among blocks if each thread would otherwise read many values. Over a dimension that is not the
# fastest in memory, such as the gradient of a norm's weight (summed over tokens), every thread of a block then writes
# its partial results to global memory. The buffer can be several times as large as the input.
#
# Source: `setReduceConfig` and `global_memory_size` in PyTorch's aten/src/ATen/native/cuda/Reduce.cuh. The sizes equal
# those of a recording made on an H100 (`python -m benchmarks.cuda_ops`).

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

    `gpu_threads`: threads that the GPU runs at once.
    """
    over = {dim % x.ndim for dim in dims} if dims else set(range(x.ndim))
    reduced = [(x.shape[dim], x.stride(dim)) for dim in over if x.shape[dim] > 1]
    kept = [(x.shape[dim], x.stride(dim)) for dim in range(x.ndim) if dim not in over and x.shape[dim] > 1]
    if not kept or not reduced:
        return ()
    fastest = min(stride for _, stride in kept)
    inputs, outputs = (math.prod(size for size, _ in dimensions) for dimensions in (reduced, kept))
    if min(stride for _, stride in reduced) < fastest:
        return _fastest_reduction_bytes(inputs, outputs, gpu_threads, partial_bytes)
    vector = VECTOR_VALUES if fastest == 1 else 1
    while vector > 1 and any(value % vector for value in (outputs, *(stride for _, stride in reduced))):
        vector //= 2
    width, height = _block(outputs // vector, inputs, BLOCK_THREADS // vector)
    blocks = -(-(outputs // vector) // width)
    if inputs < min(height * MIN_VALUES, MAX_VALUES):
        return ()
    parts = _parts(-(-inputs // height), blocks, gpu_threads // (width * height))
    return () if parts == 1 else (partial_bytes * outputs * parts * width * vector, COUNTER_BYTES * blocks)


def _fastest_reduction_bytes(inputs: int, outputs: int, gpu_threads: int, partial_bytes: int) -> tuple[int, ...]:
    """`reduction_bytes` over the fastest dimension, such as the largest logit of a token: one result per block."""
    width, height = _block(inputs, outputs, BLOCK_THREADS)
    if -(-inputs // width) < min(height * MIN_VALUES, MAX_VALUES):
        return ()
    parts = _parts(-(-inputs // (width * height)), outputs, gpu_threads // (width * height))
    return () if parts == 1 else (partial_bytes * outputs * parts, COUNTER_BYTES * outputs)


def _block(columns: int, rows: int, threads: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    columns, rows = _power_of_two(min(columns, threads)), _power_of_two(min(rows, threads))
    height = min(rows, threads // min(columns, WARP_THREADS))
    return min(columns, threads // height), height


def _parts(values: int, blocks: int, possible_blocks: int) -> int:
    """Blocks among which each of `blocks` is divided, whose threads would read so many `values`; 1 if it is not."""
    if values < MAX_VALUES or blocks > possible_blocks:
        return 1
    return max(min(-(-possible_blocks // blocks), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))


def _power_of_two(count: int) -> int:
    """The largest power of two up to `count`, which is positive."""
    return int(1 << (count.bit_length() - 1))


# Buffers of CUDA operations that sort indices: the backward of `x[index]` and of embeddings.
#
# Sources: PyTorch's aten/src/ATen/native/cuda/{Indexing,Embedding,EmbeddingBackwardKernel}.cu, and CUB's
# device/dispatch/dispatch_radix_sort.cuh. The sizes equal those of recordings of 512, 2,048 and 4,096
# indices (`python -m benchmarks.cuda_ops`).

INDEX_BYTES = 8
SORTED_AT_ONCE = 2304
"""Pairs of 8-byte keys and values that one block sorts without a buffer: 256 threads × 9."""
DIGIT_BITS, DIGITS_BYTES = 8, 1024
"""Bits that one pass sorts by, and a 4-byte count for each of their values."""
TILE_PAIRS = 1024
"""Pairs between two sets of counts. GPUs differ; 4,096 pairs had four sets in the recording."""
ALIGNED_COUNTERS_BYTES = 256 + 255
EMBEDDING_SORT_TOKENS = 3072
"""From this many tokens on, the embedding's backward sorts them and sums in partial segments."""
TOKENS_OF_A_SEGMENT = 10
"""Most gradients of equal tokens that one partial segment sums (NROWS_PER_THREAD)."""


def index_put_bytes(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False, *rest: Any
) -> tuple[int, ...]:
    """What `index_put_with_sort_kernel` allocates if equal indices are summed; masks, whose count is unknown, nothing.

    Each index is wrapped, then multiplied by its stride. Values that are not contiguous are copied. Then come sorted
    keys, sorted positions, the positions before sorting, and the buffer of CUB's sort.
    """
    used = [dim for dim, index in enumerate(indices) if index is not None]
    known = [index for index in indices if index is not None]
    if not accumulate or any(index.dtype == torch.bool for index in known):
        return ()
    count = torch.broadcast_shapes(*(index.shape for index in known)).numel()
    copied = () if values.is_contiguous() else (values.numel() * values.element_size(),)
    sorting = radix_sort_bytes(count, largest_key=math.prod(x.shape[: used[-1] + 1]) - 1)
    return (*[count * INDEX_BYTES] * 2 * len(used), *copied, *[count * INDEX_BYTES] * 3, sorting)


def radix_sort_bytes(count: int, *, largest_key: int) -> int:
    """CUB's buffer for pairs of 8-byte keys and values: copies of both between passes, and counts of digits."""
    if count <= SORTED_AT_ONCE:
        return 1
    passes = -(-largest_key.bit_length() // DIGIT_BITS)
    copies = 2 * count * INDEX_BYTES if passes > 1 else 0
    return copies + DIGITS_BYTES * (passes + -(-count // TILE_PAIRS)) + ALIGNED_COUNTERS_BYTES


def embedding_backward_bytes(grad: torch.Tensor, indices: torch.Tensor, rows: int, *rest: Any) -> tuple[int, ...]:
    """What `embedding_backward_cuda_kernel` allocates to sort tokens and to sum their gradients in partial segments.

    Of each token: sorted tokens and positions, offsets of segments, their parts and the offsets of these. A number of
    segments. Then the offsets of the partial segments, and their sums in fp32. `rows` are those of the embedding. An
    H100 allocated the same blocks for 4,096 tokens.
    """
    tokens = indices.numel()
    if tokens <= EMBEDDING_SORT_TOKENS:
        return ()
    partial_segments = tokens // TOKENS_OF_A_SEGMENT + min(tokens, rows)
    columns = -(-grad.shape[-1] // WARP_THREADS) * WARP_THREADS
    sums = partial_segments * columns * FP32_BYTES
    return (*[tokens * INDEX_BYTES] * 3, INDEX_BYTES, *[tokens * INDEX_BYTES] * 2, partial_segments * INDEX_BYTES, sums)


# PyTorch's memory-efficient attention on CUDA, and the memory that its backward kernel allocates.
#
# Shape legend: B rows, H heads, T query tokens, N key tokens, D head size. Sources: PyTorch's
# aten/src/ATen/native/transformers/cuda: attention_backward.cu, and of mem_eff_attention kernel_backward.h and
# kernels/cutlassB.h. The sizes in fp32 equal those of a recording (python -m benchmarks.cuda_ops).


BIAS_MULTIPLE = 16
LARGE_SHARED_MEMORY = {(8, 0), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities whose multiprocessors have room for the largest kernels (163 KiB and more)."""
LOCK_BYTES = 16
"""Lock and counter of a tile of dQ, which several blocks add to."""
GROUPED_ACCUMULATORS = 200
"""At most so many blocks of keys, times rows and heads, have accumulators of dK and dV of their own."""


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
) -> torch.Tensor:
    """Memory-efficient attention: key/value heads repeated, and the mask as an additive bias padded to whole tiles."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    bias = mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        length = bias.shape[-1]
        if length % BIAS_MULTIPLE:
            bias = F.pad(bias, (0, -length % BIAS_MULTIPLE))[..., :length]
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout, causal, scale=scaling
    )[0]


def efficient_backward(capability: tuple[int, int]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """The backward kernel as tensors that it allocates, in its order, on GPUs of this compute capability."""

    def backward(
        grad_BHTD: torch.Tensor,
        query_BHTD: torch.Tensor,
        key_BHND: torch.Tensor,
        value_BHND: torch.Tensor,
        bias: torch.Tensor | None,
        out_BHTD: torch.Tensor,
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        gradients = [
            torch.empty_like(tensor.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
            for tensor in (query_BHTD, key_BHND, value_BHND)
        ]
        B, H, T, D = query_BHTD.shape
        half = query_BHTD.dtype != torch.float32
        _, _, in_registers = backward_tile(D, half=half, capability=capability)
        if half and (in_registers or capability != (7, 0)):
            sums_BHT = torch.empty((B, H, T))
        else:
            sums_BHT = (grad_BHTD.float() * out_BHTD.float()).sum(-1).clone()
        count = workspace_bytes(B, H, T, key_BHND.shape[2], D, half=half, capability=capability)
        workspace = torch.empty(count, dtype=torch.uint8)
        del sums_BHT
        del workspace
        return (*gradients, None)

    return backward


def workspace_bytes(B: int, H: int, T: int, N: int, D: int, *, half: bool, capability: tuple[int, int]) -> int:
    """Accumulators of dQ in tiles, and of dK and dV where they do not fit into registers."""
    queries, keys, in_registers = backward_tile(D, half=half, capability=capability)
    splits_keys = capability >= (7, 0)
    dq = -(-T // queries) * -(-D // keys) * (queries * keys * 4 + LOCK_BYTES) if splits_keys or half else 0
    if in_registers or not half:
        return B * H * dq
    splits = max(1, min(-(-N // keys), GROUPED_ACCUMULATORS // (B * H))) if splits_keys else 1
    return B * H * (dq + 2 * splits * keys * -(-D // queries) * queries * 4)


def backward_tile(D: int, *, half: bool, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """Query tokens and key tokens of a tile, and whether dK and dV stay in registers.

    The first kernel of PyTorch's list that takes the head size and fits into shared memory.
    """
    large = capability in LARGE_SHARED_MEMORY
    if D <= 64:
        return 64, 64, half
    if half and D <= 96 and capability in {(8, 6), (8, 9)}:
        return 128, 64, True
    if half and D <= 128 and large:
        return 128, 128, True
    if half and D <= 128 and capability == (7, 0):
        return 128, 64, True
    return (128 if large else 64), 64, False


# Traceable versions of bitsandbytes' LLM.int8() kernels, for CUDA and for the CPU.
#
# Outlier columns depend on the data, so none are assumed. The few there are (about 0.1 % of columns, arXiv 2208.07339,
# section 4) would add a copy of their values and weights.
#
# Shape legend: inputs are M × K, a weight N × K. Sources: bitsandbytes' backends/{default,cuda}/ops.py.

packed = torch.ops.bitsandbytes
LARGEST = 127.0
PER_PRODUCT = 1.0 / LARGEST**2

Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def int8_expansions(*, cuda: bool) -> dict[Any, Callable[..., Any]]:
    """Functions to trace instead of bitsandbytes' operations."""
    functions: dict[str, Callable[..., Any]] = {
        "int8_vectorwise_quant": _quantise_cuda if cuda else _quantise_cpu,
        "int8_mixed_scaled_mm": _mixed_product,
        "int8_scaled_mm": _product,
        "int8_mm_dequant": _dequantise_cuda if cuda else _dequantise_cpu,
    }
    return {operation: function for name, function in functions.items() for operation in operations(name)}


@contextmanager
def int8_training_as_on_cuda() -> Iterator[None]:
    """Multiply in 8 bits while training; for CPU tensors bitsandbytes would dequantise the weight instead."""
    functions = bnb.autograd._functions
    unpacking = functions.MatMul8bitFp
    functions.MatMul8bitFp = functions.MatMul8bitLt  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        functions.MatMul8bitFp = unpacking  # type: ignore[misc]


def _no_outliers(inputs_MK: torch.Tensor, threshold: float) -> torch.Tensor | None:
    """The search for outliers, which finds none."""
    if threshold <= 0.0:
        return None
    inputs_MK.abs() >= threshold  # noqa: B015 (for its memory)
    return inputs_MK.new_empty(0, dtype=torch.int64)


def _quantise_cuda(inputs_MK: torch.Tensor, threshold: float = 0.0) -> Quantised:
    """A single kernel."""
    scales_M = inputs_MK.new_empty(inputs_MK.numel() // inputs_MK.shape[-1], dtype=torch.float32)
    out_MK = inputs_MK.new_empty(inputs_MK.shape, dtype=torch.int8)
    return out_MK, scales_M, _no_outliers(inputs_MK, threshold)


def _quantise_cpu(inputs_MK: torch.Tensor, threshold: float = 0.0) -> Quantised:
    """Elementwise operations; the CPU casts a whole copy first."""
    outliers = _no_outliers(inputs_MK, threshold)
    scales_M = torch.max(inputs_MK.abs(), dim=1).values.float()
    out_MK = torch.round(inputs_MK.float() * (LARGEST / scales_M.unsqueeze(-1))).to(torch.int8)
    return out_MK, scales_M, outliers


def _mixed_product(
    inputs: torch.Tensor,
    A_MK: torch.Tensor,
    B_NK: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All columns are multiplied in 8 bits."""
    product = packed.int8_scaled_mm.default(A_MK, B_NK, scales_M, scales_N, bias=bias, dtype=inputs.dtype)
    return product, inputs.new_empty(0)


def _product(
    A_MK: torch.Tensor,
    B_NK: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Sums in int32, then scaled."""
    sums_MN = packed.int8_linear_matmul.default(A_MK, B_NK)
    return packed.int8_mm_dequant.default(sums_MN, scales_M, scales_N, dtype=dtype or torch.float16, bias=bias)


def _dequantise_cuda(
    sums_MN: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp16 first, then the requested type."""
    out_MN = torch.empty_like(sums_MN, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out_MN.add_(bias)
    return out_MN.to(dtype or torch.float16)


def _dequantise_cpu(
    sums_MN: torch.Tensor,
    scales_M: torch.Tensor,
    scales_N: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """In fp32, on a cast copy."""
    scales_MN = scales_M.reshape(-1, 1) * scales_N.reshape(1, -1)
    out_MN = sums_MN.view(-1, sums_MN.shape[-1]).float() * scales_MN
    del scales_MN
    out_MN = out_MN * PER_PRODUCT
    if bias is not None:
        out_MN += bias
    return out_MN.to(dtype or torch.float16)
