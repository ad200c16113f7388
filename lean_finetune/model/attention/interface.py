"""Attention as transformers calls it: rows in one sequence, windows, caps and sinks."""

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import sdpa_mask

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.kernels import (
    VARLEN_READY,
    Kernel,
    PackedRows,
    TokenExchange,
    attention_by_scores,
    current,
    fused_attention,
    gpu_capability,
    key_copies,
    takes_flash,
    varlen_attention,
)

# Attention with sinks (gpt-oss): each head has one more, learnt score, which takes part in the softmax with no value.
#
# PyTorch's fused kernels do not know sinks, so transformers computes all scores. But a fused kernel returns lse, the
# log of the sum of exponentials, and with it a sink is a factor: y = o × exp(lse - lse'), lse' = log(exp(lse) +
# exp(sink)). The kernel's own backward, given y and lse' for o and lse, returns the gradients of queries, keys and
# values with the sink: they depend on the softmax's sum through lse' alone. So no scores are stored; where rows are
# longer than a sliding window, its mask still is, as in other families.
#
# Shape legend: B rows, H query heads, T tokens, D head size.

aten = torch.ops.aten
IS_TENSOR = object()
"""Stands for a saved tensor."""
BIAS = "_bias_of_sinks"
"""Attribute of a mask: its bias."""
HIDDEN = -0.5
"""Bias of a hidden token, as a share of the type's largest value: the kernel multiplies it by log2(e)."""
BIAS_MULTIPLE = 16
"""The memory-efficient kernel reads its bias in whole tiles of this many tokens."""


class _SinkAttention(torch.autograd.Function):
    """A fused kernel whose result is scaled by the sinks; dropout is not supported."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float | None,
        kernel: str,
    ) -> torch.Tensor:
        causal = bias is None and query.shape[2] > 1
        out, lse, rest = _forward(kernel, query, key, value, bias, causal, scale)
        T = query.shape[2]
        with_sink = torch.logaddexp(lse, sinks_H.float()[None, :, None])
        out = out * torch.exp(lse - with_sink)[:, :, :T, None].to(out.dtype)
        # Random state and offsets: tensors, numbers, or None, by kernel.
        ctx.save_for_backward(query, key, value, sinks_H, bias, out, with_sink, *filter(torch.is_tensor, rest))
        ctx.rest = [IS_TENSOR if torch.is_tensor(one) else one for one in rest]
        ctx.causal, ctx.scale, ctx.kernel = causal, scale, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks_H, bias, out, with_sink, *tensors = ctx.saved_tensors
        left = iter(tensors)
        rest = [next(left) if one is IS_TENSOR else one for one in ctx.rest]
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            shares = torch.exp(sinks_H.float()[None, :, None] - with_sink[:, :, : out.shape[2]])
            grad_sinks = -(shares * (grad * out).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks_H.dtype)
        grads = _backward(ctx.kernel, grad, query, key, value, bias, out, with_sink, rest, ctx.causal, ctx.scale)
        return *grads, grad_sinks, None, None, None


def _forward(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Output (B, H, T, D), log-sum-exp (B, H, T or more) in fp32, and what else backward needs."""
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        return out, lse, []
    if kernel == "flash":
        out, lse, *rest, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return out, lse, rest
    out, lse, *rest = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    return out, lse, rest


def _backward(
    kernel: str,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    rest: list[Any],
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    inputs = (grad, query, key, value)
    if kernel == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return cast(Any, backward(*inputs, out, lse, 0.0, causal, attn_mask=bias, scale=scale))
    if kernel == "flash":
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        backward = aten._scaled_dot_product_flash_attention_backward
        ends = (cum_q, cum_k, max_q, max_k)
        return cast(Any, backward(*inputs, out, lse, *ends, 0.0, causal, seed, offset, scale=scale))
    seed, offset = rest
    backward = aten._scaled_dot_product_efficient_attention_backward
    needed = [True, True, True, False]
    return cast(Any, backward(*inputs, bias, out, lse, seed, offset, 0.0, needed, causal, scale=scale)[:3])


def _bias(mask: torch.Tensor, query: torch.Tensor, kernel: str) -> torch.Tensor:
    """The mask as a kernel takes it: 0, or a negative value that outweighs every score, in the queries' type.

    Not -inf: a padding token on the left attends to nothing, which must not give NaN.
    All layers of a step get the same mask, so the first one's bias stays with it, and backward saves it once.
    """
    bias: torch.Tensor | None = getattr(mask, BIAS, None)
    if bias is None or bias.dtype != query.dtype:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
            mask.logical_not(), HIDDEN * torch.finfo(query.dtype).max
        )
        length = bias.shape[-1]
        if kernel == "efficient" and length % BIAS_MULTIPLE:
            bias = F.pad(bias, (0, -length % BIAS_MULTIPLE))[..., :length]
        setattr(mask, BIAS, bias)
    return bias.expand(query.shape[0], query.shape[1], -1, -1) if kernel == "efficient" else bias


def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks_H: torch.Tensor,
    scale: float | None,
    *,
    kernel: str,
) -> torch.Tensor:
    """Causal attention with sinks, (B, H, T, D) → (B, T, H, D); as many key as query heads.

    Args:
        query: queries; key and value alike.
        key: keys.
        value: values.
        mask: bool (B, 1, T, T), True where a token may attend; None for plain causal attention.
        sinks_H: the sink of each head.
        scale: of the scores; None for D**-0.5.
        kernel: cpu, flash (takes no mask) or efficient.
    """
    bias = None if mask is None else _bias(mask, query, kernel)
    out = cast(torch.Tensor, _SinkAttention.apply(query, key, value, sinks_H, bias, scale, kernel))
    return out.transpose(1, 2).contiguous()


# Attention of the training step: causal, without a mask, with PyTorch's scaled-dot-product kernels.
#
# Rows are padded on the right and attention is causal, so no real token sees padding and no mask is needed. Without a
# mask the flash kernel is usable and no (batch, 1, length, length) tensor exists. Packed rows attend to themselves
# alone, also without a mask. The same functions run on real and on fake tensors; estimate replaces the kernel, so that
# a trace on the CPU uses the kernels of a GPU.
#
# Shape legend: B rows (1 where they are packed), H query heads, T tokens, D head size.

ATTENTION = "lean_sdpa"
CAPPED_ATTENTION = "lean_capped"
"""The same function as lean_sdpa. transformers refuses names with `sdpa` for models that sdpa cannot compute."""
EAGER_ATTENTION = "lean_eager"
"""Computes all length × length scores with plain matmuls."""
FLASH_ATTENTION = "lean_fa2"
"""As lean_sdpa, but restricted to FlashAttention-2."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer; shapes as in transformers' attention interface, which calls the sinks `s_aux`."""
    if current.rows_are_packed:
        current.got_rows.append(packed_rows is not None)
    if softcap is not None:
        assert packed_rows is None  # `refuse_packed_rows` refuses such models.
        return attention_by_scores(module, query, key, value, attention_mask, softcap=softcap, **kwargs), None
    if (padding := query.shape[-1] - value.shape[-1]) > 0:
        # Fused kernels need values of the query's size (DeepSeek's are shorter); without them all scores would exist.
        padded = F.pad(value, (0, padding))
        out, _ = _attention(module, query, key, padded, attention_mask, packed_rows=packed_rows, s_aux=s_aux, **kwargs)
        return out[..., :-padding], None
    if s_aux is not None:
        return _with_sinks(module, query, key, value, attention_mask, packed_rows, s_aux, kwargs), None
    capability = gpu_capability(query)
    flash = capability is not None and takes_flash(query, capability)
    if packed_rows is not None and flash and VARLEN_READY and not kwargs.get("dropout"):
        return varlen_attention(query, key, value, packed_rows, kwargs.get("scaling")), None
    if capability is not None and not flash:
        # In some versions the memory-efficient kernel cannot group heads and would fall back to computing all scores.
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = _LocalHeads(module, 1)  # With a mask transformers would repeat them again.
    if packed_rows is None:
        return fused_attention(module, query, key, value, attention_mask, **kwargs)
    rows = zip(*(tensor.split(packed_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([fused_attention(module, *row, None, **kwargs)[0] for row in rows], dim=1), None


def _with_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    packed_rows: PackedRows | None,
    sinks_H: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention with sinks, (B, H, T, D) → (B, T, H, D); packed rows one after the other."""
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
    lengths = (query.shape[2],) if packed_rows is None else packed_rows.lengths
    rows = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    scale = options.get("scaling")
    done = [sink_attention(q, k, v, mask, sinks_H, scale, kernel=kernel) for q, k, v in rows]
    return done[0] if packed_rows is None else torch.cat(done, dim=1)


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer with explicit scores; packed rows one after the other."""
    if current.rows_are_packed:
        current.got_rows.append(packed_rows is not None)
    if packed_rows is None:
        return attention_by_scores(module, query, key, value, attention_mask, **kwargs), None
    rows = zip(*(tensor.split(packed_rows.lengths, dim=2) for tensor in (query, key, value)), strict=True)
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
    """Wrap `attention`: under context parallelism it computes this process's heads of complete rows."""

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
    """None for plain causal attention, else transformers' mask; under context parallelism it covers complete rows.

    transformers would read tensor values to decide, which fake tensors do not have; deciding from the arguments gives
    real and fake tensors the same mask.
    """
    window = kwargs.get("local_size")
    if current.parts > 1:
        kv_length, kwargs["q_length"] = kv_length * current.parts, kwargs["q_length"] * current.parts
    if attention_mask is None and (current.rows_are_packed or window is None or kv_length < window):
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
