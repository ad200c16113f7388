"""Memory behaviour of a CPU's kernels that fake tensors do not show, and that of this project's operations.

Sources: PyTorch's aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, aten/src/ATen/native/ConvolutionMM2d.cpp and
aten/src/ATen/native/layer_norm.cpp, bitsandbytes' backends/{cpu,default}/ops.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lean_finetune.core.optional_bitsandbytes import bnb, operations
from lean_finetune.memory.trace.cuda_ops import int8_expansions
from lean_finetune.memory.trace.memory_trace import OpRules, Workspace
from lean_finetune.model.experts import grouped_matmul  # noqa: F401 (registers the operation named below)
from lean_finetune.model.experts.grouped_matmul import unpacked_bytes
from lean_finetune.step.offload.activation_offload import chunk_bytes

aten = torch.ops.aten

CPU_QUERY_TILES = ((768, 256), (192, 64), (0, 32))
"""(shortest query in tokens, rows of a tile) of the CPU's flash attention."""
CPU_KEY_TILE = 512


def packed_grouped_bytes(
    rows_SK: torch.Tensor,
    packed: torch.Tensor,
    state: list[torch.Tensor],
    ends_E: torch.Tensor,
    shape: list[int],
    quant_type: str,
    *rest: Any,
) -> int:
    """The unpacked weight of one expert, and its fp32 block scales."""
    return unpacked_bytes(state, shape, quant_type, rows_SK.dtype)


PROJECT_WORKSPACES: dict[Any, Workspace] = {
    torch.ops.lean_finetune.packed_grouped_mm.default: packed_grouped_bytes,
    torch.ops.lean_finetune.compress.default: chunk_bytes,
    torch.ops.lean_finetune.decompress.default: chunk_bytes,
}
"""Temporary bytes of this project's operations, on every device."""


def cpu_rules() -> OpRules:
    """What operations allocate on a CPU in addition to their results."""
    workspaces: dict[Any, Workspace] = {
        aten._scaled_dot_product_flash_attention_for_cpu.default: flash_cpu_bytes,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_backward_cpu_bytes,
        **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), mixed_cpu_bytes),
        **dict.fromkeys((aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor), mixed_in_place_bytes),
        aten.convolution_backward.default: lambda grad, x, weight, biases, stride, *rest: columns_bytes(
            x, weight, stride
        ),
        **PROJECT_WORKSPACES,
    }
    first: dict[Any, Workspace] = {aten.convolution.default: embedding_cpu_bytes}
    return OpRules(expansions=_cpu_expansions(), workspaces=workspaces, workspaces_first=first)


def _cpu_expansions() -> dict[Any, Callable[..., Any]]:
    """Layer norms, and bitsandbytes' CPU kernels that are written in torch operations."""
    cpu, default = bnb.backends.cpu.ops, bnb.backends.default.ops
    expansions = {
        "optimizer_update_8bit_blockwise": getattr(cpu, "_optimizer_update_8bit_blockwise_cpu", None),
        "optimizer_update_32bit": getattr(cpu, "_optimizer_update_32bit_cpu", None),
        "gemm_4bit": getattr(default, "_gemm_4bit_default_impl", None),
    }
    known = {op: function for name, function in expansions.items() if function for op in operations(name)}
    return {**known, **int8_expansions(cuda=False), aten.native_layer_norm.default: _layer_norm}


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the means and the deviations, which have the weight's type; fake tensors give them the input's."""
    kept = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
    dtype = x.dtype if weight is None else weight.dtype
    return x.new_empty(x.shape), x.new_empty(kept, dtype=dtype), x.new_empty(kept, dtype=dtype)


def flash_cpu_bytes(query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """One tile of fp32 scores, its row maxima and sums, and its output, per thread (cpu_flash_attention)."""
    rows, columns = _flash_tile(query, key)
    half = 0 if query.dtype == torch.float32 else rows * columns * query.element_size()
    return torch.get_num_threads() * (rows * (columns + 2 + query.shape[-1]) * 4 + half)


def flash_backward_cpu_bytes(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any
) -> list[int]:
    """A copy of the gradient if tokens are not before heads; per thread, tiles of scores and of their gradients.

    The tiles are in fp32, and in 16 bits too (cpu_flash_attention_backward). The fp32 sums of a tile's rows, at most
    1 KiB a thread, are counted once: PyTorch's count has those of the main thread alone.
    """
    rows, columns = _flash_tile(query, key)
    halves = 0 if query.dtype == torch.float32 else query.element_size()
    tiles = torch.get_num_threads() * 2 * rows * columns * (4 + halves)
    return [0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes, tiles + rows * 4]


def _flash_tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the scores that a thread of the CPU's flash attention computes at a time."""
    T = query.shape[-2]
    rows = next(tile for shortest, tile in CPU_QUERY_TILES if T >= shortest)
    return min(rows, T), min(CPU_KEY_TILE, key.shape[-2])


def embedding_cpu_bytes(x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Sequence[int], *rest: Any) -> int:
    """What the embedding of a tower's patches needs: the weight in oneDNN's order, or `columns_bytes`."""
    if torch.backends.mkldnn.enabled:
        return weight.nbytes if _is_of_patches(weight, stride) else 0
    return columns_bytes(x, weight, stride)


def columns_bytes(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int]) -> int:
    """The pixels of all patches as the matrix that PyTorch's own kernels multiply (`columns` of ConvolutionMM2d.cpp).

    In backward, oneDNN's kernels need scratch memory instead, which no trace can see.
    """
    if torch.backends.mkldnn.enabled or not _is_of_patches(weight, stride):
        return 0
    patches = math.prod(size // edge for size, edge in zip(x.shape[2:], stride, strict=True))
    return len(x) * patches * math.prod(weight.shape[1:]) * x.element_size()


def _is_of_patches(weight: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether a convolution sees every pixel once: those of state-space layers overlap."""
    return tuple(weight.shape[2:]) == tuple(stride)


def mixed_cpu_bytes(first: torch.Tensor, second: Any, **kwargs: Any) -> int:
    """Copies of operands converted to the common type (TensorIterator; CUDA kernels convert without a copy)."""
    common = torch.result_type(first, second)
    tensors = [each for each in (first, second) if isinstance(each, torch.Tensor) and each.dtype != common]
    return sum(each.numel() * common.itemsize for each in tensors)


def mixed_in_place_bytes(first: torch.Tensor, second: Any, **kwargs: Any) -> int:
    """As `mixed_cpu_bytes`, and the result in the common type, from which it is converted back."""
    common = torch.result_type(first, second)
    result = 0 if first.dtype == common else first.numel() * common.itemsize
    return mixed_cpu_bytes(first, second) + result
