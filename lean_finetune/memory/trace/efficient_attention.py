"""PyTorch's memory-efficient attention on CUDA, and the memory that its backward kernel allocates.

Shape legend: B rows, H heads, T query tokens, N key tokens, D head size.
Sources: PyTorch's aten/src/ATen/native/transformers/cuda: attention_backward.cu, and of mem_eff_attention
kernel_backward.h and kernels/cutlassB.h. The sizes in fp32 equal those of a recording (python -m benchmarks.cuda_ops).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import repeat_kv

aten = torch.ops.aten

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
