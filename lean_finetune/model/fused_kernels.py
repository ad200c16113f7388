"""Liger-Kernel's rotary embedding, RMSNorm and SwiGLU instead of the model's (train.fused_kernels).

The loss is ours. Liger's operations save fewer tensors than those of transformers, and overwrite some: the rotary
embedding its inputs, RMSNorm the gradient of its output, SwiGLU its inputs in backward. Nothing else in a layer of the
`FAMILIES` reads them again, except selective checkpointing, which train.fused_kernels excludes.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.field_types import FusedKernels
from lean_finetune.core.errors import UserError
from lean_finetune.core.versions import install_extra

FAMILIES = ("llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types with the same code as Llama in layers, norms, MLP and rotary embedding."""
KEY = "train.fused_kernels"
ROTARY = "apply_rotary_pos_emb"
"""The function of the rotary embedding in a family's code."""
COUNTED = "0.8."
"""Releases of Liger-Kernel for which traced allocations equal those measured on a CPU."""


def memory_note(choice: FusedKernels) -> str | None:
    """How the predicted peak of a run with fused kernels was checked; None for other runs."""
    if choice == "none":
        return None
    return (
        f"{KEY}: the peak follows Liger-Kernel's allocations, equal to those counted on a CPU; no GPU has measured it"
    )


def refuse_fused(choice: FusedKernels, device_type: str, config: PretrainedConfig, *, enforce: bool) -> None:
    """Raise UserError if fused kernels cannot run on a device, do not suit a model, or need unknown memory.

    Args:
        choice: train.fused_kernels.
        device_type: where training runs.
        config: of the model.
        enforce: estimate.enforce.
    """
    if choice == "none":
        return
    if device_type == "cpu":
        raise UserError(f"{KEY}: Liger-Kernel needs a GPU; got {choice} where training runs on the CPU; use none")
    _refuse_family(config)
    found = _liger_version()
    if enforce and not found.startswith(COUNTED):
        raise UserError(
            f"{KEY}: the memory of liger-kernel {found} is not known, and estimate.enforce=true starts only runs that "
            f"are predicted to fit; got {choice}; install liger-kernel {COUNTED}*, or set estimate.enforce=false"
        )


def _refuse_family(config: PretrainedConfig) -> None:
    """Raise UserError if Liger's operations are not those of a model."""
    activation = getattr(config, "hidden_act", None)
    if config.model_type not in FAMILIES or activation != "silu":
        raise UserError(
            f"{KEY}: is for {', '.join(FAMILIES)} with activation silu; got liger with {config.model_type} and "
            f"{activation}; use none"
        )


def _liger_version() -> str:
    """The version of the installed Liger-Kernel.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        import_module("liger_kernel.ops.rms_norm")
        return version("liger-kernel")
    except ImportError as error:
        raise UserError(
            f"{KEY}: needs the package liger-kernel ({error}); got liger; run {install_extra('liger')}, or use none"
        ) from None


def fuse_kernels(model: PreTrainedModel, choice: FusedKernels) -> None:
    """Replace the forward methods of a model's norms, MLPs and attention layers; its tensors stay.

    Raises:
        UserError: the model is of another family, or Liger-Kernel is missing.
    """
    if choice == "none":
        return
    _refuse_family(model.config)
    _liger_version()
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = LigerRMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)
        return out

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
        return out

    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return LigerRopeFunction.apply(q, k, cos, sin)

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = MethodType(norm, module)
        elif kind.endswith("MLP"):
            module.forward = MethodType(mlp, module)
        elif kind.endswith("Attention"):
            module.forward = MethodType(_with_global(type(module).forward, ROTARY, rotary), module)


def _with_global(function: Any, name: str, value: Callable[..., Any]) -> FunctionType:
    """A copy of a function that sees another value for one global name of its module."""
    assert name in function.__code__.co_names
    copy = FunctionType(
        function.__code__, {**function.__globals__, name: value}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
