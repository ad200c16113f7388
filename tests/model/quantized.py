"""Tiny checkpoints whose weights are quantised already, as their publishers store them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

BLOCK = 128
FILE = "model.safetensors"
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN3 = Qwen3Config(**SIZES)
QWEN3_MOE = Qwen3MoeConfig(**SIZES, moe_intermediate_size=136, num_experts=4, num_experts_per_tok=2)
GPT_OSS = GptOssConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    sliding_window=256,
    num_experts_per_tok=2,
    vocab_size=256,
    max_position_embeddings=256,
    eos_token_id=2,
    pad_token_id=0,
)


def save_16_bit(config: PretrainedConfig, directory: Path) -> dict[str, torch.Tensor]:
    """Write a random model in bf16; its tensors by name."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return load_file(directory / FILE)


def save_mxfp4(directory: Path, config: PretrainedConfig = GPT_OSS) -> Path:
    """gpt-oss with random 4-bit experts."""
    tensors = save_16_bit(config, directory)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.randint(118, 123, blocks.shape[:-1], dtype=torch.uint8)
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _write(directory, tensors, how)


def save_fp8(directory: Path, block: tuple[int, int] | None = (BLOCK, BLOCK), config: PretrainedConfig = QWEN3) -> Path:
    """A model in FP8 with a scale for each block, or one for a weight; sizes of Qwen3 are no multiples of a block."""
    tensors = save_16_bit(config, directory)
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        grid = (-(-rows // height), -(-columns // width))
        scales = torch.rand(grid) * 0.01 + 0.001
        full = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
        tensors[name] = (weight / full).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales if block else scales.reshape(())
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    return _write(directory, tensors, how)


def save_fp8_experts(directory: Path) -> Path:
    """Qwen3-MoE in FP8: a tensor and its scales for each projection of each expert."""
    return save_fp8(directory, config=QWEN3_MOE)


def save_compressed_fp8(directory: Path) -> Path:
    """Qwen3 in FP8 with a scale for each row, as compressed-tensors stores it."""
    save_fp8(directory, (1, 1024))  # At least as wide as any weight.
    tensors = {name.replace("_scale_inv", "_scale"): one for name, one in load_file(directory / FILE).items()}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    how = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    return _write(directory, tensors, how)


NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}


def resized(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """A copy of a config with other sizes."""
    return type(config).from_dict({**config.to_dict(), **changes})


def save_bitsandbytes(directory: Path, config: PretrainedConfig = QWEN3, **options: Any) -> Path:
    """A model that transformers quantised with bitsandbytes and saved; the 16-bit model is in `16_bit` beside it."""
    save_16_bit(config, directory / "16_bit")
    how = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(directory / "16_bit", quantization_config=how, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def _write(directory: Path, tensors: dict[str, torch.Tensor], how: dict[str, Any]) -> Path:
    """Write tensors, and the quantisation into config.json."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / FILE, {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": how}))
    return directory
