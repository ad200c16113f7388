"""The products of layers with LoRA adapters that read one input, as autograd functions in plain PyTorch.

y_i = x W_iᵀ + s_i (x A_iᵀ) B_iᵀ. One product computes x Aᵀ for all layers. That of B_i adds to the frozen layer's
output in place and multiplies by s_i, so no operation but a product touches a tensor of the layer's width. Saved for
backward are x and x Aᵀ, whose width is the rank. Adapters are copied to the type of the inputs for a forward or a
backward pass, all of a function in one operation.

Shape legend: M tokens, K width of the input, N_i width of layer i's output, r_i its rank, R the sum of the ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.model.kernels.fuse_layers import runs_kernels
from lean_finetune.model.kernels.layer_ops import silu_mul, silu_mul_gradients_

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


class Activation(NamedTuple):
    """A function of a gate."""

    function: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The gradient of the gate, in the memory of that of the function's result."""
    kernels: bool = False
    """Whether this project's kernels compute the function and its product with another tensor, where they run."""


def _silu_backward(grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = aten.silu_backward.grad_input(grad, gate, grad_input=grad)
    return result


def _gelu_backward(approximate: str, grad: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = aten.gelu_backward.grad_input(grad, gate, approximate=approximate, grad_input=grad)
    return result


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(F.silu, _silu_backward),
    "gelu": Activation(F.gelu, partial(_gelu_backward, "none")),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), partial(_gelu_backward, "tanh")),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Matrices:
    """The adapters of a group, or their gradients."""

    A: torch.Tensor
    """Those of all layers below each other (R, K)."""
    B: Sequence[torch.Tensor]
    """(N_i, r_i) of each layer."""


def _parts(flat: torch.Tensor, groups: Sequence[Group]) -> list[_Matrices]:
    """The matrices of several groups in one flat tensor, in the order of their parameters."""
    found, start = [], 0
    for group in groups:
        rows, width = sum(group.ranks), group.bases[0].in_features
        A = flat[start : start + rows * width].view(rows, width)
        start += rows * width
        B = []
        for base, rank in zip(group.bases, group.ranks, strict=True):
            values = base.out_features * rank
            B.append(flat[start : start + values].view(base.out_features, rank))
            start += values
        found.append(_Matrices(A=A, B=B))
    return found


def _in_type(parameters: Sequence[torch.Tensor], groups: Sequence[Group], dtype: torch.dtype) -> list[_Matrices]:
    """The matrices of several groups in this type; what is copied is copied by one operation."""
    if parameters[0].dtype == dtype:
        found, start = [], 0
        for group in groups:
            count = len(group.bases)
            A, B = parameters[start : start + count], parameters[start + count : start + 2 * count]
            found.append(_Matrices(A=A[0] if count == 1 else torch.cat(list(A)), B=B))
            start += 2 * count
        return found
    flat = parameters[0].new_empty(sum(one.numel() for one in parameters), dtype=dtype)
    torch._foreach_copy_(_split(flat, parameters), list(parameters))
    return _parts(flat, groups)


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a flat tensor in the shapes of others."""
    parts = flat.split([one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _new_gradients(
    parameters: Sequence[torch.Tensor], groups: Sequence[Group], dtype: torch.dtype
) -> tuple[torch.Tensor, list[_Matrices]]:
    """A flat tensor for the gradients of all parameters, so that one operation converts them; and its parts."""
    flat = parameters[0].new_empty(sum(one.numel() for one in parameters), dtype=dtype)
    return flat, _parts(flat, groups)


def _forward(group: Group, x: torch.Tensor, matrices: _Matrices) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The product x Aᵀ (M, R) and the layers' outputs (..., N_i) of inputs (..., K)."""
    h = x.reshape(-1, x.shape[-1]) @ matrices.A.t()
    ys = []
    for base, B, h_i, scale in zip(group.bases, matrices.B, h.split(group.ranks, 1), group.scales, strict=True):
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
    weight: Any = base.weight
    if isinstance(base, bnb.nn.Linear4bit):
        state = getattr(weight, "quant_state", None)  # FSDP2's gathered weight has none, and the layer has.
        weight = bnb.functional.dequantize_4bit(weight.data.view(-1, 1), base.quant_state if state is None else state)
    converted: torch.Tensor = weight.to(dtype)
    return converted


def _of_adapters(
    group: Group,
    x: torch.Tensor,
    h: torch.Tensor,
    matrices: _Matrices,
    grads: Sequence[torch.Tensor],
    into: _Matrices,
) -> torch.Tensor:
    """The gradient of x Aᵀ (M, R), from those of the outputs (M, N_i); writes those of the adapters."""
    grad_h = torch.empty_like(h)
    for grad, B, part, scale in zip(grads, matrices.B, grad_h.split(group.ranks, 1), group.scales, strict=True):
        torch.addmm(part, grad, B, beta=0, alpha=scale, out=part)
    torch.mm(grad_h.t(), x, out=into.A)
    for grad, h_i, part, scale in zip(grads, h.split(group.ranks, 1), into.B, group.scales, strict=True):
        torch.addmm(part, grad.t(), h_i, beta=0, alpha=scale, out=part)
    return grad_h


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
        h, ys = _forward(group, x, *_in_type(parameters, [group], x.dtype))
        ctx.group = group
        ctx.save_for_backward(x, h, *parameters)
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of x and the adapters."""
        x, h, *parameters = ctx.saved_tensors
        group, rows = ctx.group, [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        del grads
        (matrices,) = _in_type(parameters, [group], x.dtype)
        flat, (into,) = _new_gradients(parameters, [group], x.dtype)
        grad_h = _of_adapters(group, x.reshape(-1, x.shape[-1]), h, matrices, rows, into)
        grad_x = _of_input(group, grad_h, matrices.A, rows).view(x.shape) if ctx.needs_input_grad[1] else None
        return None, grad_x, *_split(flat.to(parameters[0].dtype), parameters)


class JoinedMlp(torch.autograd.Function):
    """down(f(gate(x)) · up(x)) for inputs (..., K); backward computes the product again from gate and up."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: Group, down: Group, activation: Activation, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        """Save x, gate, up and the rank-wide products."""
        of_gate_up, of_down = _in_type(parameters, [gate_up, down], x.dtype)
        h, (gate, up) = _forward(gate_up, x, of_gate_up)
        ctx.kernels = activation.kernels and runs_kernels(gate)
        product = silu_mul(gate, up) if ctx.kernels else activation.function(gate).mul_(up)
        h_down, (y,) = _forward(down, product, of_down)
        ctx.gate_up, ctx.down, ctx.activation = gate_up, down, activation
        ctx.save_for_backward(x, h, gate, up, h_down, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradients of x and the adapters."""
        x, h, gate, up, h_down, *parameters = ctx.saved_tensors
        gate, up, grad = (one.reshape(-1, one.shape[-1]) for one in (gate, up, grad))
        groups = ctx.gate_up, ctx.down
        of_gate_up, of_down = _in_type(parameters, groups, x.dtype)
        flat, (into_gate_up, into_down) = _new_gradients(parameters, groups, x.dtype)
        activated = None if ctx.kernels else ctx.activation.function(gate)
        product = silu_mul(gate, up) if activated is None else activated * up
        grad_h = _of_adapters(ctx.down, product, h_down, of_down, [grad], into_down)
        del product
        grad_product = _of_input(ctx.down, grad_h, of_down.A, [grad])
        if activated is None:
            grad_up, grad_gate = silu_mul_gradients_(grad_product, gate, up), grad_product
        else:
            grad_up = activated.mul_(grad_product)
            grad_gate = ctx.activation.derivative(grad_product.mul_(up), gate)
        del activated, grad_product
        rows = [grad_gate, grad_up]
        del grad_gate, grad_up
        grad_h = _of_adapters(ctx.gate_up, x.reshape(-1, x.shape[-1]), h, of_gate_up, rows, into_gate_up)
        grad_x = _of_input(ctx.gate_up, grad_h, of_gate_up.A, rows).view(x.shape) if ctx.needs_input_grad[3] else None
        return None, None, None, grad_x, *_split(flat.to(parameters[0].dtype), parameters)
