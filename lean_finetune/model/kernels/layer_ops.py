"""The gated activation and the rotation of queries and keys as operations: one pass forward, one backward.

`torch.ops.lean_finetune` has them for CUDA, by Triton kernels, and for the shapes of a trace. A CPU has none.
Operations of `torch.library.Library` take the host less time than those of `torch.library.custom_op`.

Shape legend: B rows, H query heads, G key heads, T tokens, D head size.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_library = torch.library.Library("lean_finetune", "FRAGMENT")
_library.define("silu_mul(Tensor gate, Tensor up) -> Tensor")
_library.define("silu_mul_gradients(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
_library.define("silu_mul_gradients_(Tensor(a!) grad, Tensor gate, Tensor up) -> Tensor")
_library.define("rotate(Tensor query, Tensor key, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)")
Pair = tuple[torch.Tensor, torch.Tensor]


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, of contiguous tensors of one shape and type; without autograd."""
    product: torch.Tensor = torch.ops.lean_finetune.silu_mul.default(gate, up)
    return product


def silu_mul_gradients_(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gradient of up from that of the product, whose memory that of gate takes; contiguous tensors."""
    up_grad: torch.Tensor = torch.ops.lean_finetune.silu_mul_gradients_.default(grad, gate, up)
    return up_grad


class SiluMul(torch.autograd.Function):
    """silu(gate) · up; saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The product, in the inputs' type."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu_mul(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Pair:
        """Their gradients."""
        gate, up = ctx.saved_tensors
        gradients: Pair = torch.ops.lean_finetune.silu_mul_gradients.default(grad.contiguous(), gate, up)
        return gradients


class Rotate(torch.autograd.Function):
    """Rotary embedding of queries (B, H, T, D) and keys (B, G, T, D) by angles (1 or B, T, D); saves cos and sin."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        """Both in their own types; heads of a token lie next to each other, as a layer's product leaves them."""
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotate(query, key, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_grad: torch.Tensor, key_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of queries and keys."""
        return *_rotate(query_grad, key_grad, *ctx.saved_tensors, inverse=True), None, None


def _rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool) -> Pair:
    """Rotate by the operation, which takes heads whose values lie next to each other."""
    query, key = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key))
    rotated: Pair = torch.ops.lean_finetune.rotate.default(query, key, cos, sin, inverse)
    return rotated


def _like_heads(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor (B, H, T, D) in the order B, T, H, D."""
    B, H, T, D = x.shape
    return x.new_empty((B, T, H, D)).transpose(1, 2)


@cache
def _code() -> ModuleType:
    """The kernels; imports Triton."""
    from lean_finetune.model.kernels import layer_kernels

    return layer_kernels


def launch_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` by the kernel."""
    code, values, out = _code(), gate.numel(), torch.empty_like(gate)
    code.silu_mul_kernel[(-(-values // code.BLOCK),)](gate, up, out, values, BLOCK=code.BLOCK, num_warps=code.WARPS)
    return out


def launch_silu_mul_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """`silu_mul_gradients` by the kernel."""
    gate_grad = torch.empty_like(gate)
    return gate_grad, _launch_gradients(grad, gate, up, gate_grad)


def launch_silu_mul_gradients_(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu_mul_gradients_` by the kernel."""
    return _launch_gradients(grad, gate, up, grad)


def _launch_gradients(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gate_grad: torch.Tensor
) -> torch.Tensor:
    """The gradient of up; writes that of gate to `gate_grad`."""
    code, values, up_grad = _code(), gate.numel(), torch.empty_like(up)
    code.silu_mul_gradients_kernel[(-(-values // code.BLOCK),)](
        grad, gate, up, gate_grad, up_grad, values, BLOCK=code.BLOCK, num_warps=code.WARPS
    )
    return up_grad


def launch_rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> Pair:
    """`rotate` by the kernel."""
    code = _code()
    B, H, T, D = query.shape
    outs = _like_heads(query), _like_heads(key)
    width = 1 << (D // 2 - 1).bit_length()
    code.rotate_kernel[(B * T,)](
        query,
        key,
        *outs,
        cos,
        sin,
        T,
        *(query.stride(n) for n in (0, 2, 1)),
        *(key.stride(n) for n in (0, 2, 1)),
        0 if cos.shape[0] == 1 else cos.stride(0),
        INVERSE=inverse,
        QUERY_HEADS=H,
        KEY_HEADS=key.shape[1],
        HALF=D // 2,
        WIDTH=width,
        TILE=max(1, code.BLOCK // width),
        num_warps=code.WARPS,
    )
    return outs


LAUNCHES = {
    "silu_mul": launch_silu_mul,
    "silu_mul_gradients": launch_silu_mul_gradients,
    "silu_mul_gradients_": launch_silu_mul_gradients_,
    "rotate": launch_rotate,
}
"""By the names of the operations."""
for _name, _launch in LAUNCHES.items():
    _library.impl(_name, _launch, "CUDA")
_library.impl("silu_mul", lambda gate, up: torch.empty_like(gate), "Meta")
_library.impl("silu_mul_gradients", lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)), "Meta")
_library.impl("silu_mul_gradients_", lambda grad, gate, up: torch.empty_like(up), "Meta")
_library.impl("rotate", lambda query, key, *angles: (_like_heads(query), _like_heads(key)), "Meta")
