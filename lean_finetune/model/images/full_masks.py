"""Attention masks of vision towers."""

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.masking_utils import create_bidirectional_mask


def full_or_mask(
    config: PretrainedConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **more: Any
) -> Any:
    """Transformers' mask for attention in both directions; none where `attention_mask` (B, T) hides nothing.

    transformers looks at the mask's values too, but not in a trace, which would then count a mask that does not exist.
    """
    if attention_mask is not None and attention_mask.dim() == 2 and bool(attention_mask.all()):
        attention_mask = None
    return create_bidirectional_mask(config, inputs_embeds, attention_mask, **more)
