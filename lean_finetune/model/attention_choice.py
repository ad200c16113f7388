"""What train.attention means for a model on a device, and what cannot run there."""

from typing import Literal

import torch
from transformers import PretrainedConfig

from lean_finetune.core.errors import UserError
from lean_finetune.model.attention import FLASH_CAPABILITY, FLASH_MAX_HEAD_SIZE, caps_scores
from lean_finetune.model.model_config import largest_head_size
from lean_finetune.model.model_spec import ModelSpec

HALVES = (torch.bfloat16, torch.float16)


def choose_attention(
    config: PretrainedConfig,
    spec: ModelSpec,
    *,
    kind: Literal["cpu", "cuda"],
    capability: tuple[int, int],
    masked: bool,
) -> tuple[str, str]:
    """The kernels of attention in training, and why.

    Args:
        config: of the model.
        spec: how it is trained, and what was asked for.
        kind: of the device.
        capability: compute capability of a GPU.
        masked: rows reach beyond the model's sliding window, so that attention has a mask.

    Raises:
        UserError: what was asked for cannot run.
    """
    asked, capped = spec.attention, caps_scores(config)
    if asked == "flex":
        reason = "makes its kernels at run time, unseen by estimate"
        if kind == "cpu":
            reason = "has no backward pass on a CPU"
        raise UserError(f"train.attention: flex {reason}; got flex; use auto")
    if capped and asked in ("sdpa", "flash_attention_2"):
        raise UserError(
            f"train.attention: {config.model_type} caps its scores, which no fused kernel does; got {asked}; use auto"
        )
    no_flash = _no_flash(config, spec, kind, capability, masked)
    if asked == "flash_attention_2" and no_flash:
        raise UserError(f"train.attention: flash_attention_2 {no_flash}; got flash_attention_2; use auto")
    if capped or asked == "eager":
        return "eager", "as asked" if asked == "eager" else "the model caps its scores, which no fused kernel does"
    if kind == "cpu":
        return "sdpa", "PyTorch's flash kernel for CPUs"
    if no_flash:
        return "sdpa", f"PyTorch's memory-efficient kernel: flash {no_flash}"
    return "sdpa" if asked != "flash_attention_2" else asked, "FlashAttention-2, as PyTorch has it"


def _no_flash(
    config: PretrainedConfig, spec: ModelSpec, kind: str, capability: tuple[int, int], masked: bool
) -> str | None:
    """Why FlashAttention-2 cannot run; None where it can."""
    head_size = largest_head_size(config)
    if kind == "cpu":
        return "needs a GPU"
    if capability < FLASH_CAPABILITY:
        return "needs compute capability 8.0 (Ampere) or later"
    if (spec.autocast_dtype or spec.dtype) not in HALVES:
        return f"needs 16 bits, not train.precision={spec.precision}"
    if head_size > FLASH_MAX_HEAD_SIZE:
        return f"needs heads of at most {FLASH_MAX_HEAD_SIZE} values, not {head_size}"
    return "takes no mask, which rows longer than the model's window need" if masked else None
