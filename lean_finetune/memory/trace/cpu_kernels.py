"""Memory behaviour of a CPU's kernels that fake tensors do not show, and that of this project's operations.

Sources: PyTorch's aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, bitsandbytes' backends/{cpu,default}/ops.py.
"""

from collections.abc import Callable
from typing import Any

import bitsandbytes.backends.cpu.ops as bnb_cpu
import bitsandbytes.backends.default.ops as bnb_default
import torch

from lean_finetune.memory.trace.cuda_ops import int8_expansions
from lean_finetune.memory.trace.memory_trace import OpRules, Workspace
from lean_finetune.model.experts import grouped_products  # noqa: F401 (registers the operation named below)
from lean_finetune.model.experts.grouped_products import unpacked_bytes
from lean_finetune.step.activation_offload import chunk_bytes

aten = torch.ops.aten
bnb = torch.ops.bitsandbytes

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
        **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor), mixed_cpu_bytes),
        **PROJECT_WORKSPACES,
    }
    return OpRules(expansions=_cpu_expansions(), workspaces=workspaces)


def _cpu_expansions() -> dict[Any, Callable[..., Any]]:
    """Bitsandbytes' CPU kernels that are written in torch operations."""
    expansions = {
        "optimizer_update_8bit_blockwise": getattr(bnb_cpu, "_optimizer_update_8bit_blockwise_cpu", None),
        "optimizer_update_32bit": getattr(bnb_cpu, "_optimizer_update_32bit_cpu", None),
        "gemm_4bit": getattr(bnb_default, "_gemm_4bit_default_impl", None),
    }
    known = {getattr(bnb, name).default: function for name, function in expansions.items() if function is not None}
    return {**known, **int8_expansions(cuda=False)}


def flash_cpu_bytes(query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    """One tile of fp32 scores, its row maxima and sums, and its output, per thread (cpu_flash_attention)."""
    T, D = query.shape[-2:]
    rows = next(tile for shortest, tile in CPU_QUERY_TILES if T >= shortest)
    rows, columns = min(rows, T), min(CPU_KEY_TILE, key.shape[-2])
    half = 0 if query.dtype == torch.float32 else rows * columns * query.element_size()
    return torch.get_num_threads() * (rows * (columns + 2 + D) * 4 + half)


def mixed_cpu_bytes(first: torch.Tensor, second: Any, **kwargs: Any) -> int:
    """Copies of operands converted to the common type (TensorIterator; CUDA kernels convert without a copy)."""
    common = torch.result_type(first, second)
    tensors = [each for each in (first, second) if isinstance(each, torch.Tensor) and each.dtype != common]
    return sum(each.numel() * common.itemsize for each in tensors)
