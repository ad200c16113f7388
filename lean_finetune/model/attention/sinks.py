"""Attention with sinks (gpt-oss): each head has one more, learnt score, which joins the softmax with no value.

PyTorch's fused kernels do not know sinks, so transformers computes all scores. But a fused kernel returns lse, the
log of the sum of exponentials, and with it a sink is a factor: y = o × exp(lse - lse'), lse' = log(exp(lse) +
exp(sink)). The kernel's own backward, given y and lse' for o and lse, returns the gradients of queries, keys and
values with the sink: they depend on the softmax's sum through lse' alone. So no scores are stored; where rows are
longer than a sliding window, its mask still is, as in other families.

Shape legend: B rows, H query heads, T tokens, D head size.
"""

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

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
