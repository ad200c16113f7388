"""A small model of any family of transformers: its config's defaults with small sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.timm_wrapper.modeling_timm_wrapper import TimmWrapperModel

from lean_finetune.model.model_config import layer_settings

SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 256, "pad_token_id": 0},
    **{"eos_token_id": 2, "bos_token_id": None, "rotary_dim": 8},
    # Experts.
    **{"moe_intermediate_size": 32, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8},
    **{"moe_num_experts": 8, "num_experts_per_tok": 2, "moe_k": 2, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "num_dense_layers": 1, "n_shared_experts": 1},
    **{"shared_expert_intermediate_size": 64, "shared_intermediate_size": 64},
    # Attention with compressed keys and values.
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    # Linear attention, Mamba and convolutions.
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"linear_num_heads": 4, "linear_head_dim": 16},
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2},
    **{"conv_dim": 64, "block_ff_dim": 128, "use_mamba_kernels": False},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
COUNTED = (
    *("afmoe", "bamba", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoehybrid", "hunyuan_v1_moe"),
    *("jamba", "lfm2", "lfm2_moe", "mimo_v2_flash", "minimax", "minimax_m2", "olmo_hybrid", "olmoe", "phimoe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "flex_olmo", "granitemoeshared", "solar_open"),
    *("olmo3", "smollm3", "cohere2", "glm4", "exaone4", "gpt2", "apertus", "seed_oss"),
    *("helium", "nanochat", "arcee", "stablelm", "persimmon", "ministral3", "internlm3", "hyperclovax"),
    *("falcon", "falcon_h1", "nemotron_h", "recurrent_gemma", "mamba", "mamba2", "falcon_mamba", "zamba", "zamba2"),
    *("xlstm", "gemma3n_text", "gemma4_text", "llama4_text"),
)
"""Families without a case in tests.kit.estimate_cpu."""
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), {"layer_types": ["linear_attention", "full_attention"] * 2}),
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"] * 2}),
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3n": {
        "audio_config": {
            **{"hidden_size": 32, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "vocab_offset": 384},
            **{"input_feat_size": 16, "sscp_conv_channel_size": [8, 4]},
        }
    },
    "gemma3n_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "sliding_window": 48},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "laurel_rank": 4},
        **{"activation_sparsity_pattern": [0.5, 0.0] * 2},
    },
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32, "sliding_window": 48},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8},
    **dict.fromkeys(("cwm", "emu3_text_model", "mllama_text_model", "modernbert-decoder"), {"bos_token_id": 1}),
    **dict.fromkeys(("zamba", "zamba2"), {"layers_block_type": ["linear_attention", "hybrid"] * 2}),
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**ROPE, "mrope_section": [4, 2, 2]}}},
    "longcat_flash": {"head_dim": 8},
    "xlstm": {"qk_dim_factor": 1.0},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {"ffn_hidden_size": 32}},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values that a family needs beside or in place of SIZES."""


def family_names() -> list[str]:
    """The families of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The config of a small model; of a model of several parts, with a small language model.

    `changes` replace values.
    """
    kind: Any = CONFIG_MAPPING[family]
    default = kind()
    if "text_config" in kind.sub_configs:
        text = tiny_config(default.get_text_config().model_type)
        return kind(text_config=text.to_dict(), **OTHER_SIZES.get(family, {}))
    known = {field.name for field in fields(default)} | {*default.attribute_map}
    values = {name: value for name, value in SIZES.items() if name in known}
    heads, groups = (layer_settings(default, name)[0] for name in ("num_attention_heads", "num_key_value_heads"))
    if heads is not None and heads == groups:
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
    return kind(**{**values, **OTHER_SIZES.get(family, {}), **changes})


@contextmanager
def small_timm_models() -> Iterator[None]:
    """A context in which one layer stands for each model of timm (Gemma 3n's vision part), which is not installed."""

    def small(model: Any, config: PretrainedConfig) -> None:
        PreTrainedModel.__init__(model, config)
        model.timm_model = torch.nn.Linear(4, 4)

    with patch.object(TimmWrapperModel, "__init__", small):
        yield
