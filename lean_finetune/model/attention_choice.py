"""Choose the attention kernel for a model and a device (train.attention), with a reason."""

from typing import Literal

import torch
from transformers import PretrainedConfig

from lean_finetune.config.field_types import AttentionName
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.attention.kernels import (
    ATTENTION,
    CAPPED_ATTENTION,
    EAGER_ATTENTION,
    FLASH_ATTENTION,
    FLASH_CAPABILITY,
    FLASH_MAX_HEAD_SIZE,
)
from lean_finetune.model.beside.whole_config import masks_rows
from lean_finetune.model.model_config import (
    caps_scores,
    computes_own_attention,
    has_attention,
    has_sinks,
    largest_head_size,
)
from lean_finetune.model.precision import autocast_dtype, base_dtype

HALVES = (torch.bfloat16, torch.float16)


def choose_attention(
    config: PretrainedConfig,
    train: Train,
    *,
    kind: Literal["cpu", "cuda"],
    capability: tuple[int, int],
    masked: bool,
) -> tuple[str, str]:
    """The attention kernel in training, and the reason.

    Args:
        config: of the model.
        train: how it is trained, with the value of train.attention.
        kind: device type.
        capability: compute capability of a GPU.
        masked: rows are longer than the model's sliding window, so that attention has a mask.

    Raises:
        UserError: the chosen kernel cannot run.
    """
    choice, capped = train.attention, caps_scores(config)
    if choice == "flex":
        reason = "makes its kernels at run time, unseen by estimate"
        if kind == "cpu":
            reason = "has no backward pass on a CPU"
        raise UserError(f"train.attention: flex {reason}; got flex; use auto")
    if capped and choice in ("sdpa", "flash_attention_2"):
        raise UserError(
            f"train.attention: {config.model_type} caps its scores, which no fused kernel does; got {choice}; use auto"
        )
    if not has_attention(config):
        if choice != "auto":
            raise UserError(f"train.attention: {config.model_type} has no attention; got {choice}; use auto")
        return "none", "the model has no attention"
    if computes_own_attention(config):
        if choice not in ("auto", "eager"):
            raise UserError(f"train.attention: {config.model_type} computes its own attention; got {choice}; use auto")
        return "eager", "the family's own code computes all scores"
    no_flash = _no_flash(config, train, kind, capability, masked)
    if choice == "flash_attention_2" and no_flash:
        raise UserError(f"train.attention: flash_attention_2 {no_flash}; got flash_attention_2; use auto")
    if capped or choice == "eager":
        return "eager", "as set" if choice == "eager" else "the model caps its scores, which no fused kernel does"
    if kind == "cpu":
        return "sdpa", "PyTorch's flash kernel for CPUs"
    if no_flash:
        return "sdpa", f"PyTorch's memory-efficient kernel: flash {no_flash}"
    return "sdpa" if choice != "flash_attention_2" else choice, "FlashAttention-2, as PyTorch has it"


def _no_flash(
    config: PretrainedConfig, train: Train, kind: str, capability: tuple[int, int], masked: bool
) -> str | None:
    """Why FlashAttention-2 cannot run; None if it can."""
    head_size = largest_head_size(config)
    if kind == "cpu":
        return "needs a GPU"
    if capability < FLASH_CAPABILITY:
        return "needs compute capability 8.0 (Ampere) or later"
    if (autocast_dtype(train) or base_dtype(train)) not in HALVES:
        return f"needs 16 bits, not train.precision={train.precision}"
    if head_size > FLASH_MAX_HEAD_SIZE:
        return f"needs heads of at most {FLASH_MAX_HEAD_SIZE} values, not {head_size}"
    if masks_rows(config):
        return TOWER.masks
    return "takes no mask, which rows longer than the model's window need" if masked else None


def materializes_scores(config: PretrainedConfig, choice: AttentionName) -> bool:
    """Whether all length × length scores exist in training."""
    own = computes_own_attention(config) and has_attention(config)
    return choice == "eager" or caps_scores(config) or own


def of_parts(config: PretrainedConfig, attention: str) -> str | dict[str, str]:
    """The `attn_implementation` of a model. Audio towers, which are left out, support eager alone."""
    if getattr(config, "audio_config", None) is None:
        return attention
    return {"": attention, **dict.fromkeys(config.sub_configs, attention), "audio_config": "eager"}


def training_attention(config: PretrainedConfig, choice: AttentionName = "auto") -> str:
    """The registered name of a model's attention in training; `choice` is train.attention."""
    if caps_scores(config):
        return CAPPED_ATTENTION
    if computes_own_attention(config):
        return "eager"
    fused = CAPPED_ATTENTION if has_sinks(config) else ATTENTION
    return {"eager": EAGER_ATTENTION, "flash_attention_2": FLASH_ATTENTION}.get(choice, fused)


def generation_attention(config: PretrainedConfig) -> str:
    """The registered name of a model's attention in generation, which pads on the left and so uses a mask.

    It is transformers' sdpa, unless the model caps scores or has sinks, which sdpa ignores.
    """
    if computes_own_attention(config) and not caps_scores(config):
        return "eager"
    return CAPPED_ATTENTION if caps_scores(config) or has_sinks(config) else "sdpa"
