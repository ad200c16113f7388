"""Norms and MLPs as one kernel each, as Unsloth and Liger write them: what they save and allocate."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

GATED = ("gate_proj", "up_proj", "down_proj")


class _FusedNorm(torch.autograd.Function):
    """Saves the input and one fp32 value a token; the gradient takes the memory of the incoming one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scales)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return gradient, torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _FusedProduct(torch.autograd.Function):
    """silu(gate) × up: saves both, and writes their gradients into them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return saved


def fuse_layers(model: nn.Module, *, mlps: bool) -> None:
    """Let every RMS norm of a model run as one kernel; with `mlps` also the product inside its gated MLPs."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        elif mlps and all(hasattr(module, name) for name in GATED):
            module.forward = partial(_mlp, module)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _FusedNorm.apply(x, module.weight)
    return result


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.down_proj(_FusedProduct.apply(module.gate_proj(x), module.up_proj(x)))
    return result
