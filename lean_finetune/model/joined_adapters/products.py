"""The products of layers with LoRA adapters that read one input, as autograd functions in plain PyTorch.

y_i = x W_iᵀ + s_i (x A_iᵀ) B_iᵀ. One product computes x Aᵀ for all layers. That of B_i adds to the frozen layer's output in
place and multiplies by s_i, so no operation but a product touches a tensor of the layer's width. Saved for backward
are x and x Aᵀ, whose width is the rank. Adapters are copied to the type of the inputs for a forward or a backward
pass, all of a group in one operation.

Shape legend: M tokens, K width of the input, N_i width of layer i's output, r_i its rank, R the sum of the ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lean_finetune.core.optional_bitsandbytes import bnb

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Layers with adapters that read the same input."""

    bases: Sequence[nn.Linear]
    """The frozen layers."""
    A: Sequence[nn.Linear]
    B: Sequence[nn.Linear]
    scales: Sequence[float]
    ranks: Sequence[int]
    in_place: bool
    """Whether to add to the frozen layers' outputs in place."""

    def parameters(self) -> list[torch.Tensor]:
        """A of each layer, and then B of each; read anew in each pass, as a parameter may be replaced."""
        return [layer.weight for layer in (*self.A, *self.B)]


Activation = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
"""A function of a gate, and the gradient of the gate in the memory of that of the function's result."""


def _silu_backward(grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = aten.silu_backward.grad_input(grad, gate, grad_input=grad)
    return result


def _gelu_backward(approximate: str, grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = aten.gelu_backward.grad_input(grad, gate, approximate=approximate, grad_input=grad)
    return result


ACTIVATIONS: dict[str, Activation] = {
    "silu": (F.silu, _silu_backward),
    "gelu": (F.gelu, partial(_gelu_backward, "none")),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(_gelu_backward, "tanh")),
}


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a flat tensor in the shapes of others."""
    parts = flat.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _as_dtype(parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A of all layers below each other (R, K), and each B (N_i, r_i), in this type."""
    count, width = len(parameters) // 2, parameters[0].shape[1]
    if parameters[0].dtype == dtype:
        A = parameters[:count]
        return A[0] if count == 1 else torch.cat(A), list(parameters[count:])
    flat = parameters[0].new_empty(sum(one.numel() for one in parameters), dtype=dtype)
    parts = _split(flat, parameters)
    torch._foreach_copy_(parts, list(parameters))
    rows = sum(one.shape[0] for one in parameters[:count])
    return flat[: rows * width].view(rows, width), parts[count:]


def _forward(
    group: Group, x: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x Aᵀ (M, R) and the layers' outputs (..., N_i) of inputs (..., K)."""
    A, Bs = _as_dtype(parameters, x.dtype)
    h = x.reshape(-1, x.shape[-1]) @ A.t()
    ys = []
    for base, B, h_i, scale in zip(group.bases, Bs, h.split(group.ranks, 1), group.scales, strict=True):
        y = base(x)
        rows = y.view(-1, y.shape[-1])
        if group.in_place:
            rows.addmm_(h_i, B.t(), alpha=scale)
        else:
            y = aten._unsafe_view(torch.addmm(rows, h_i, B.t(), alpha=scale), y.shape)
        ys.append(y)
    return h, ys


def _weight(base: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The frozen weight (N_i, K); of a 4-bit layer unpacked now."""
    if isinstance(base, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(base.weight.data.view(-1, 1), base.weight.quant_state).to(dtype)
    return base.weight.to(dtype)


def _of_adapters(
    group: Group,
    x: torch.Tensor,
    h: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The gradient of x Aᵀ (M, R), A (R, K), and the parameters' gradients, from those of the outputs (M, N_i)."""
    A, Bs = _as_dtype(parameters, x.dtype)
    grad_h = torch.empty_like(h)
    for grad, B, part, scale in zip(grads, Bs, grad_h.split(group.ranks, 1), group.scales, strict=True):
        torch.addmm(part, grad, B, beta=0, alpha=scale, out=part)
    # One tensor for all gradients, so that one operation converts them.
    flat = x.new_empty(sum(one.numel() for one in parameters))
    rows, width = A.shape
    torch.mm(grad_h.t(), x, out=flat[: rows * width].view(rows, width))
    of_B = _split(flat, parameters)[len(grads) :]
    for grad, h_i, part, scale in zip(grads, h.split(group.ranks, 1), of_B, group.scales, strict=True):
        torch.addmm(part, grad.t(), h_i, beta=0, alpha=scale, out=part)
    return grad_h, A, _split(flat.to(parameters[0].dtype), parameters)


def _of_input(group: Group, grad_h: torch.Tensor, A: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """The gradient of the input (M, K). Empties `grads`, so that each is freed after its product."""
    grad_x = grad_h @ A
    for base in group.bases:
        grad_x.addmm_(grads.pop(0), _weight(base, A.dtype))
    return grad_x


class Joined(torch.autograd.Function):
    """Outputs (..., N_i) of a group for inputs (..., K)."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: torch.Tensor, *parameters: torch.Tensor) -> Any:
        """Save x and x Aᵀ."""
        h, ys = _forward(group, x, parameters)
        ctx.group = group
        ctx.save_for_backward(x, h, *parameters)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of x and the adapters."""
        x, h, *parameters = ctx.saved_tensors
        rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        del grads
        grad_h, A, of_adapters = _of_adapters(ctx.group, x.reshape(-1, x.shape[-1]), h, parameters, rows)
        grad_x = _of_input(ctx.group, grad_h, A, rows).view(x.shape) if ctx.needs_input_grad[1] else None
        return None, grad_x, *of_adapters


class JoinedMlp(torch.autograd.Function):
    """down(f(gate(x)) · up(x)) for inputs (..., K); backward computes the product again from gate and up."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: Group, down: Group, activation: Activation, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Save x, gate, up and the rank-wide products."""
        h, (gate, up) = _forward(gate_up, x, parameters[:4])
        product = activation[0](gate).mul_(up)
        h_down, (y,) = _forward(down, product, parameters[4:])
        ctx.gate_up, ctx.down, ctx.activation = gate_up, down, activation
        ctx.save_for_backward(x, h, gate, up, h_down, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradients of x and the adapters."""
        x, h, gate, up, h_down, *parameters = ctx.saved_tensors
        gate, up, grad = (one.reshape(-1, one.shape[-1]) for one in (gate, up, grad))
        function, derivative = ctx.activation
        activated = function(gate)
        product = activated * up
        grad_h, A, of_down = _of_adapters(ctx.down, product, h_down, parameters[4:], [grad])
        del product
        grad_product = _of_input(ctx.down, grad_h, A, [grad])
        grad_up = activated.mul_(grad_product)
        grad_gate = derivative(grad_product.mul_(up), gate)
        del activated, grad_product
        rows = [grad_gate, grad_up]
        del grad_gate, grad_up
        grad_h, A, of_gate_up = _of_adapters(ctx.gate_up, x.reshape(-1, x.shape[-1]), h, parameters[:4], rows)
        grad_x = _of_input(ctx.gate_up, grad_h, A, rows).view(x.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, grad_x, *of_gate_up, *of_down
