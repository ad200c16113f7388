"""RMSNorm in one kernel of PyTorch on a GPU (train.fused_norms).

Families that have Llama's norm compute it in eight operations, and save their input in fp32. PyTorch's kernel reads the
input once, computes in fp32, rounds once, and saves one value a token. Norms whose weight is trained keep the family's
code, and so does every norm on a CPU, where PyTorch has no such kernel.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lean_finetune.config.schema import Train
from lean_finetune.model.kernels.family_code import same_code
from lean_finetune.patches.of_models import FUSED_NORMS

aten = torch.ops.aten


def on_gpu(x: torch.Tensor) -> bool:
    """Whether the kernel can run on a tensor; a trace of a GPU says so of all."""
    return x.device.type == "cuda"


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed input, and 1 / its root mean square, fp32 (..., 1)."""
    normed, rstd = aten._fused_rms_norm(x, weight.shape, weight, eps)
    return normed, rstd


def norm_backward(grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the input."""
    of_input: torch.Tensor = aten._fused_rms_norm_backward(grad, x, weight.shape, rstd, weight, [True, False])[0]
    return of_input


class FrozenNorm(torch.autograd.Function):
    """RMSNorm with a weight that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Save the input and one value of each token."""
        normed, rstd = norm(x, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The gradient of the input."""
        x, rstd, weight = ctx.saved_tensors
        return norm_backward(grad, x, rstd, weight), None, None


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The kernel for backward; without it, the family's method, whose bits are those of stage evaluate."""
    fused = on_gpu(hidden_states) and hidden_states.dtype == self.weight.dtype and torch.is_grad_enabled()
    if not fused:
        own: torch.Tensor = type(self).forward(self, hidden_states)
        return own
    normed: torch.Tensor = FrozenNorm.apply(hidden_states, self.weight, self.variance_epsilon)
    return normed


def fuse_norms(model: nn.Module, train: Train) -> None:
    """Replace the forward methods of a model's frozen norms with Llama's code. Call before tiles wrap them."""
    if train.fused_norms == "none" or train.fused_kernels == "liger":
        return
    for module in model.modules():
        if (
            type(module).__name__.endswith("RMSNorm")
            and "forward" not in vars(module)
            and same_code(type(module).forward, LlamaRMSNorm.forward)
        ):
            weight: Any = module.weight
            if not weight.requires_grad:
                FUSED_NORMS.give_method(module, MethodType(_forward, module))
