"""Kernels of other packages instead of the model's code (train.fused_kernels). For those of this project: `kernels/`.

`fla`: flash-linear-attention's gated delta rule (`recurrent/fla_kernels.py`). `liger`: Liger-Kernel's rotary embedding,
RMSNorm and SwiGLU. The loss is ours.

Liger's operations save fewer tensors than those of transformers, and overwrite some: the rotary embedding its inputs,
RMSNorm the gradient of its output, SwiGLU its inputs in backward. Nothing else in a layer with Llama's code reads them
again, except selective checkpointing, which liger excludes.
"""

import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from types import MethodType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.field_types import FusedKernels
from lean_finetune.config.model_families import families_that, family_of
from lean_finetune.core.errors import UserError
from lean_finetune.core.versions import install_extra
from lean_finetune.model.recurrent import fla_kernels
from lean_finetune.model.recurrent.packed_layers import with_global
from lean_finetune.patches.of_models import OTHER_KERNELS

KEY = "train.fused_kernels"
ROTARY = "apply_rotary_pos_emb"
"""The function of the rotary embedding in a family's code."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """Where fused kernels come from."""

    title: str
    distribution: str
    """Its name for pip."""
    module: str
    """A module that can be imported where the kernels can run."""
    counted: str
    """Releases for which traced allocations equal those measured on a CPU."""


PACKAGES = {
    "fla": Package(
        title="flash-linear-attention", distribution="fla-core", module="fla.ops.gated_delta_rule", counted="0.6."
    ),
    "liger": Package(
        title="Liger-Kernel", distribution="liger-kernel", module="liger_kernel.ops.rms_norm", counted="0.8."
    ),
}
"""By the value of train.fused_kernels, which is also the name of the extra."""
EXTRAS = {"fla": install_extra("fla"), "liger": install_extra("liger")}
"""The command that installs each."""


def memory_note(choice: FusedKernels) -> str | None:
    """How the predicted peak of a run with fused kernels was checked; None for other runs."""
    if choice == "none":
        return None
    if choice == "auto":
        return (
            f"{KEY}: on GPUs from compute capability 8.0 on, rotary embedding and SwiGLU with Llama's code run in "
            "kernels of this project, whose tensors the peak counts; no GPU has measured it"
        )
    tuning = " and Triton's buffer of 256 MiB while it tunes a kernel" if choice == "fla" else ""
    return (
        f"{KEY}: the peak follows {PACKAGES[choice].title}'s allocations, equal to those counted on a CPU{tuning}; no "
        "GPU has measured it"
    )


def refuse_fused(choice: FusedKernels, device_type: str, config: PretrainedConfig, *, enforce: bool) -> None:
    """Raise UserError if fused kernels cannot run on a device, do not suit a model, or need unknown memory.

    Args:
        choice: train.fused_kernels.
        device_type: where training runs.
        config: of the model.
        enforce: estimate.enforce.
    """
    if choice in ("none", "auto"):
        return
    package = PACKAGES[choice]
    if device_type == "cpu":
        raise UserError(f"{KEY}: {package.title} needs a GPU; got {choice} where training runs on the CPU; use none")
    _refuse_family(choice, config)
    found = _version(choice)
    if choice == "fla":
        fla_kernels.refuse_triton(KEY)
    if not enforce:
        return
    unknown = f"and estimate.enforce=true starts only runs that are predicted to fit; got {choice}"
    if not found.startswith(package.counted):
        raise UserError(
            f"{KEY}: the memory of {package.distribution} {found} is not known, {unknown}; install "
            f"{package.distribution} {package.counted}*, or set estimate.enforce=false"
        )
    if choice == "fla" and (other := fla_kernels.uncounted_code()) is not None:
        raise UserError(
            f"{KEY}: the memory of {other}, which fla calls where it is installed, is not known, {unknown}; set the "
            "environment variable FLA_DISABLE_BACKEND_DISPATCH=1, or estimate.enforce=false"
        )


def _refuse_family(choice: FusedKernels, config: PretrainedConfig) -> None:
    """Raise UserError if a package's operations are not those of a model."""
    if choice == "fla":
        return fla_kernels.refuse_family(KEY, config)
    activation = getattr(config, "hidden_act", None)
    if not family_of(config.model_type).code_of_llama or activation != "silu":
        raise UserError(
            f"{KEY}: is for {', '.join(families_that('code_of_llama'))} with activation silu; got liger with "
            f"{config.model_type} and {activation}; use none"
        )


def _version(choice: FusedKernels) -> str:
    """The version of the installed package.

    Raises:
        UserError: it cannot be imported.
    """
    package = PACKAGES[choice]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Triton is not supported", UserWarning)  # On this machine; a trace runs.
            import_module(package.module)
        return version(package.distribution)
    except ImportError as error:
        raise UserError(
            f"{KEY}: needs the package {package.distribution} ({error}); got {choice}; run {EXTRAS[choice]}, or use "
            "none"
        ) from None


def fuse_kernels(model: PreTrainedModel, choice: FusedKernels) -> None:
    """Replace the forward methods of a model's layers; its tensors stay.

    Raises:
        UserError: the model is of another family, or the package is missing.
    """
    if choice in ("none", "auto"):
        return
    _refuse_family(choice, model.config)
    _version(choice)
    if choice == "fla":
        return fla_kernels.fuse_delta_rule(model)
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
            OTHER_KERNELS.give_method(module, MethodType(norm, module))
        elif kind.endswith("MLP"):
            OTHER_KERNELS.give_method(module, MethodType(mlp, module))
        elif kind.endswith("Attention"):
            OTHER_KERNELS.give_method(module, MethodType(with_global(type(module).forward, ROTARY, rotary), module))
