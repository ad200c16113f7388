"""Buffers of CUDA operations that sort indices: the backward of `x[index]` and of embeddings.

Sources: PyTorch's aten/src/ATen/native/cuda/{Indexing,Embedding,EmbeddingBackwardKernel}.cu, and CUB's
device/dispatch/dispatch_radix_sort.cuh. The sizes equal those of recordings of 512, 2,048 and 4,096
indices (`python -m benchmarks.cuda_ops`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

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


def embedding_backward_bytes(grad: torch.Tensor, indices: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """Sorted tokens and fp32 partial sums, at most one per token (embedding_backward_cuda_kernel)."""
    tokens = indices.numel()
    if tokens <= EMBEDDING_SORT_TOKENS:
        return 0
    return tokens * (4 * INDEX_BYTES + grad.shape[-1] * 4)
