"""Norms as one kernel, as Unsloth and Liger write them: what they save and allocate."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


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


def fuse_norms(model: nn.Module) -> None:
    """Let every RMS norm of a model run as one kernel."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_forward, module)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _FusedNorm.apply(x, module.weight)
    return result
