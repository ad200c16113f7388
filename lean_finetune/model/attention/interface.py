"""Attention of the training step: causal, without a mask, with PyTorch's scaled-dot-product kernels.

Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed. Without a
mask the flash kernel is usable and no (batch, 1, length, length) tensor exists. Joined rows attend to themselves alone,
also without a mask. The same functions run on real and on fake tensors; estimate replaces the kernel, so that a trace
on the CPU uses the kernels of a GPU.

Shape legend: B rows (1 where they are joined), H query heads, T tokens, D head size.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.kernels import (
    VARLEN_READY,
    Kernel,
    attention_by_scores,
    fused_attention,
    gpu_capability,
    takes_flash,
    varlen_attention,
)
from lean_finetune.model.attention.rows import JoinedRows, TokenExchange, current, key_copies
from lean_finetune.model.attention.sinks import sink_attention

ATTENTION = "lean_sdpa"
CAPPED_ATTENTION = "lean_capped"
"""The same function as lean_sdpa. transformers refuses names with `sdpa` for models that sdpa cannot compute."""
EAGER_ATTENTION = "lean_eager"
"""Computes all length × length scores with plain matrix products."""
FLASH_ATTENTION = "lean_fa2"
"""As lean_sdpa, but restricted to FlashAttention-2."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    joined_rows: JoinedRows | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer; shapes as in transformers' attention interface, which calls the sinks `s_aux`."""
    if current.rows_are_joined:
        current.got_rows.append(joined_rows is not None)
    if softcap is not None:
        assert joined_rows is None  # `refuse_joined_rows` refuses such models.
        return attention_by_scores(module, query, key, value, attention_mask, softcap=softcap, **kwargs), None
    if (padding := query.shape[-1] - value.shape[-1]) > 0:
        # Fused kernels need values of the query's size (DeepSeek's are shorter); without them all scores would exist.
        padded = F.pad(value, (0, padding))
        out, _ = _attention(module, query, key, padded, attention_mask, joined_rows=joined_rows, s_aux=s_aux, **kwargs)
        return out[..., :-padding], None
    if s_aux is not None:
        return _with_sinks(module, query, key, value, attention_mask, joined_rows, s_aux, kwargs), None
    capability = gpu_capability(query)
    flash = capability is not None and takes_flash(query, capability)
    if joined_rows is not None and flash and VARLEN_READY and not kwargs.get("dropout"):
        return varlen_attention(query, key, value, joined_rows, kwargs.get("scaling")), None
    if capability is not None and not flash:
        # In some versions the memory-efficient kernel cannot group heads and would fall back to computing all scores.
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = _LocalHeads(module, 1)  # With a mask transformers would repeat them again.
    if joined_rows is None:
        return fused_attention(module, query, key, value, attention_mask, **kwargs)
    rows = zip(*(tensor.split(joined_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([fused_attention(module, *row, None, **kwargs)[0] for row in rows], dim=1), None


def _with_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    joined_rows: JoinedRows | None,
    sinks_H: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention with sinks, (B, H, T, D) → (B, T, H, D); joined rows one after the other."""
    cached = query.shape[2] != key.shape[2]
    if options.get("dropout") or (cached and not module.training):
        return attention_by_scores(module, query, key, value, mask, s_aux=sinks_H, **options)
    if torch.is_autocast_enabled(query.device.type):  # Autocast does not reach the kernels, which are called directly.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if cached:
        config: Any = module.config
        raise UserError(
            f"model.name: {config.model_type} attends to more than the tokens of a row, which is not supported "
            "yet; choose another model"
        )
    groups, capability = query.shape[1] // key.shape[1], gpu_capability(query)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    flash = capability is not None and mask is None and takes_flash(query, capability)
    kernel = "cpu" if capability is None else "flash" if flash else "efficient"
    lengths = (query.shape[2],) if joined_rows is None else joined_rows.lengths
    rows = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    scale = options.get("scaling")
    done = [sink_attention(q, k, v, mask, sinks_H, scale, kernel=kernel) for q, k, v in rows]
    return done[0] if joined_rows is None else torch.cat(done, dim=1)


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    joined_rows: JoinedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer with explicit scores; joined rows one after the other."""
    if current.rows_are_joined:
        current.got_rows.append(joined_rows is not None)
    if joined_rows is None:
        return attention_by_scores(module, query, key, value, attention_mask, **kwargs), None
    rows = zip(*(tensor.split(joined_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([attention_by_scores(module, q, k, v, None, **kwargs) for q, k, v in rows], dim=1), None


def _flash_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer by FlashAttention-2; raises where it cannot run."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _attention(*args, **kwargs)


class _LocalHeads:
    """An attention module whose query heads share keys and values in groups of another size."""

    def __init__(self, module: torch.nn.Module, groups: int):
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _exchanging(attention: Kernel) -> Kernel:
    """Wrap `attention`: where tokens are divided among processes, it computes this process's heads of complete rows."""

    def exchanged(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        exchange: TokenExchange | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if current.parts > 1:
            current.got_rows.append(exchange is not None)
        if exchange is None:
            return attention(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
        copies = key_copies(query.shape[1], key.shape[1], exchange.parts)
        if copies > 1:
            module = _LocalHeads(module, query.shape[1] // key.shape[1] // copies)
        query, key, value = (
            exchange.to_heads(heads) for heads in (query, repeat_kv(key, copies), repeat_kv(value, copies))
        )
        if s_aux is not None:
            s_aux = s_aux.chunk(exchange.parts)[exchange.index]
        out, _ = attention(module, query, key, value, attention_mask, s_aux=s_aux, **kwargs)
        return exchange.to_tokens(out), None

    return exchanged


def _mask(*, kv_length: int, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for plain causal attention, else transformers' mask; it covers complete rows if their tokens are divided.

    transformers would read tensor values to decide, which fake tensors do not have; deciding from the arguments gives
    real and fake tensors the same mask.
    """
    window = kwargs.get("local_size")
    if current.parts > 1:
        kv_length, kwargs["q_length"] = kv_length * current.parts, kwargs["q_length"] * current.parts
    if attention_mask is None and (current.rows_are_joined or window is None or kv_length < window):
        return None
    return sdpa_mask(kv_length=kv_length, attention_mask=attention_mask, **kwargs)


for name, function in {
    ATTENTION: _attention,
    CAPPED_ATTENTION: _attention,
    EAGER_ATTENTION: _eager_attention,
    FLASH_ATTENTION: _flash_attention,
}.items():
    AttentionInterface.register(name, _exchanging(function))
    AttentionMaskInterface.register(name, _mask)
