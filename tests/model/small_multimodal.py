"""Small multimodal models with random weights: language model, vision and audio parts."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PretrainedConfig

from tests.kit.estimate_cpu import SMALL, WINDOW
from tests.kit.tiny_config import OTHER_SIZES, small_timm_models

TEXT: dict[str, Any] = {**SMALL, "head_dim": 16, "bos_token_id": 1}
M_ROPE: dict[str, Any] = {
    **TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "num_channels": 3,
}  # fmt: skip
QWEN_TOWER: dict[str, Any] = {
    "depth": 2, "embed_dim": 32, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2,
    "patch_size": 8,
}  # fmt: skip
IMAGE_TOKENS: dict[str, Any] = {
    "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
GEMMA_4: dict[str, Any] = {
    **TEXT, "num_hidden_layers": 4, "global_head_dim": 32, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 2,
}  # fmt: skip
GEMMA_4_TOWERS: dict[str, Any] = {
    "vision_config": {**TOWER, "head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 16},
    "audio_config": None,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**TEXT, "sliding_window": WINDOW}, "vision_config": TOWER, "mm_tokens_per_image": 4},
    "gemma3n": {
        "text_config": {
            **TEXT, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2, "sliding_window": WINDOW, "activation_sparsity_pattern": [0.5, 0.0] * 3,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "laurel_rank": 4,
        },
        "vision_config": {"hidden_size": 32, "vocab_offset": 256},
        **OTHER_SIZES["gemma3n"],
    },
    "gemma4": {
        "text_config": GEMMA_4, **GEMMA_4_TOWERS,
        "audio_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32,
            "subsampling_conv_channels": [4, 2],
        },
    },
    "gemma4_moe": {
        "model_type": "gemma4",
        "text_config": {
            **GEMMA_4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
            "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        **GEMMA_4_TOWERS,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 16},
        "spatial_merge_size": 2,
    },
    "qwen2_vl": {"text_config": M_ROPE, "vision_config": QWEN_TOWER, **IMAGE_TOKENS},
    "qwen2_5_vl": {
        "text_config": M_ROPE,
        "vision_config": {**QWEN_TOWER, "hidden_size": 32, "fullatt_block_indexes": [1]},
        **IMAGE_TOKENS,
    },
    "qwen3_vl": {
        "text_config": M_ROPE,
        "vision_config": {**QWEN_TOWER, "hidden_size": 32, "deepstack_visual_indexes": [0]},
        **IMAGE_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {**M_ROPE, **EXPERTS},
        "vision_config": {**QWEN_TOWER, "hidden_size": 32, "deepstack_visual_indexes": [0]},
        **IMAGE_TOKENS,
    },
    "qwen3_5": {
        "text_config": {
            **M_ROPE, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "vision_config": {**QWEN_TOWER, "hidden_size": 32},
        **IMAGE_TOKENS,
    },
    "llama4": {
        "text_config": {
            **TEXT, "intermediate_size_mlp": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW,
        },
        "vision_config": {**TOWER, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
    "phi4_multimodal": {
        **SMALL, "resid_pdrop": 0.0,
        "vision_config": {**TOWER, "image_size": 32, "crop_size": 32},
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 2, "input_size": 16,
            "ext_pw_out_channel": 32, "nemo_conv_channels": 32, "depthwise_separable_out_channel": 32,
        },
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER, "projection_dim": 32},
    },
    "internvl": {
        "text_config": {"model_type": "qwen3", **TEXT},
        "vision_config": {**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
    },
}  # fmt: skip
"""Sizes of each family (or of its variant of another name), beside the defaults of its configuration class."""


def multimodal_config(family: str, **text: Any) -> PretrainedConfig:
    """The config of a small model; `text` replaces values of its language model."""
    config = AutoConfig.for_model(**{"model_type": family, **CONFIGS[family]}, tie_word_embeddings=False)
    for name, value in text.items():
        setattr(config.get_text_config(), name, value)
    return config


def save_multimodal(config: PretrainedConfig, directory: Path) -> Path:
    """Save a complete small model with random weights."""
    torch.manual_seed(0)
    with small_timm_models():
        AutoModelForMultimodalLM.from_config(config).save_pretrained(directory)
    return directory
