"""Kernels of attention: flash for joined rows, plain operations for all scores, and what a device supports.

Shape legend: B rows (1 where they are joined), H query heads, T tokens, D head size.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from lean_finetune.model.attention.rows import JoinedRows

FLASH_CAPABILITY = (8, 0)
FLASH_MAX_HEAD_SIZE = 256
FLASH_HEAD_SIZE_MULTIPLE = 8
CAUSAL_WINDOW = (-1, 0)
"""Argument of varlen_attn for causal attention."""
# Versions of torch without all of these arguments compute joined rows one after the other.
VARLEN_READY = {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
_kernel: Kernel = sdpa_attention_forward
_traced_capability: tuple[int, int] | None = None


def takes_flash(query: torch.Tensor, capability: tuple[int, int]) -> bool:
    """Whether the CUDA flash kernel supports this query (B, H, T, D): 16-bit, Ampere or later, head size."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and capability >= FLASH_CAPABILITY and query.shape[-1] <= FLASH_MAX_HEAD_SIZE


def gpu_capability(query: torch.Tensor) -> tuple[int, int] | None:
    """Compute capability of the GPU that a query is on or traced for; None on a CPU."""
    if query.device.type == "cuda":
        return torch.cuda.get_device_capability(query.device)
    return _traced_capability


@contextmanager
def attention_kernel(kernel: Kernel, capability: tuple[int, int]) -> Iterator[None]:
    """A context in which attention runs as on a GPU of this compute capability; used by estimate."""
    global _kernel, _traced_capability
    before = _kernel, _traced_capability
    _kernel, _traced_capability = kernel, capability
    try:
        yield
    finally:
        _kernel, _traced_capability = before


def fused_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer by transformers' sdpa, or by the kernel that `attention_kernel` sets."""
    return _kernel(*args, **kwargs)


def attention_by_scores(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention with explicit scores, capped to ±softcap if given (Gemma 2), which no fused kernel supports.

    (B, H, T, D) → (B, T, H, D). All length × length scores exist and are saved for backward. `attention_mask` is bool,
    True where a token may attend.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BHTT = torch.matmul(query * (scale / (softcap or 1.0)), key.transpose(2, 3))
    if softcap is not None:
        scores_BHTT = torch.tanh(scores_BHTT) * softcap
    if attention_mask is None:
        earlier = key.shape[2] - query.shape[2]  # Cached tokens, in generation.
        attention_mask = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=query.device).tril(earlier)
    # Not -inf: a padding token on the left attends to nothing, which must not give NaN.
    scores_BHTT = scores_BHTT.masked_fill(attention_mask.logical_not(), torch.finfo(scores_BHTT.dtype).min)
    if s_aux is not None:
        sinks_BHT1 = s_aux.to(scores_BHTT.dtype)[None, :, None, None].expand(*scores_BHTT.shape[:3], 1)
        scores_BHTT = torch.cat([scores_BHTT, sinks_BHT1], dim=-1)
    weights_BHTT = F.softmax(scores_BHTT, dim=-1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights_BHTT = weights_BHTT[..., :-1]
    weights_BHTT = F.dropout(weights_BHTT, p=dropout, training=module.training)
    return torch.matmul(weights_BHTT, value).transpose(1, 2).contiguous()


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, joined_rows: JoinedRows, scale: float | None
) -> torch.Tensor:
    """Causal attention of each row to itself by one flash kernel, (1, H, T, D) → (1, T, H, D)."""
    D, longest = query.shape[-1], max(joined_rows.lengths)
    # The kernel needs head sizes that are multiples of 8; the scale is still computed from the true head size.
    padding = -D % FLASH_HEAD_SIZE_MULTIPLE
    query_THD, key_THD, value_THD = (
        (F.pad(tensor, (0, padding)) if padding else tensor).transpose(1, 2)[0] for tensor in (query, key, value)
    )
    out_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        joined_rows.offsets,
        joined_rows.offsets,
        longest,
        longest,
        scale=D**-0.5 if scale is None else scale,
        window_size=CAUSAL_WINDOW,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_THD[None, :, :, :D]  # type: ignore[call-overload]
