"""Write large checkpoints in several files, tensor by tensor, so that none is in memory at once."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from transformers import initialization as init

from lean_finetune.model.files.safetensors_files import TensorSpec, write_tensors
from lean_finetune.pinning.model_files import INDEX

BLOCK_VALUES = 2**20
"""Random values that repeat in every weight: drawing them all would take longer than the test."""


def large_llama(layers: int, vocabulary: int = 32000) -> LlamaConfig:
    """Of TinyLlama's sizes: 22 layers are 1.1 billion weights, 2.05 GiB in 16 bits."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def write_checkpoint(config: PretrainedConfig, directory: Path, shards: int) -> list[Path]:
    """Write config.json, an index, and bf16 weights in `shards` files of similar size; returns the files."""
    config.save_pretrained(directory)
    with torch.device("meta"), init.no_init_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    files: list[dict[str, TensorSpec]] = [{} for _ in range(shards)]
    before = 0
    for name, parameter in parameters.items():
        files[before * shards // total][name] = TensorSpec(dtype=torch.bfloat16, shape=tuple(parameter.shape))
        before += parameter.numel()
    block = torch.randn(BLOCK_VALUES, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    paths = [directory / f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    for path, forms in zip(paths, files, strict=True):
        write_tensors(path, forms, lambda name, forms=forms: _filled(block, forms[name].shape))  # type: ignore[misc]
    where = {name: path.name for path, forms in zip(paths, files, strict=True) for name in forms}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return paths


def _filled(block: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of this shape with the block's values over and over."""
    filled = torch.empty(*shape, dtype=block.dtype)
    for part in filled.flatten().split(len(block)):
        part.copy_(block[: len(part)])
    return filled
