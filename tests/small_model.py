"""A small random Llama and the settings tests vary."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lean_finetune.config.schema import Train
from lean_finetune.model.adapters import save_adapter
from lean_finetune.train.save_model import Base
from tests.kit.estimate_cpu import SMALL
from tests.kit.loaded import load_model
from tests.kit.specs import train_of

CPU = torch.device("cpu")
VOCABULARY: int = SMALL["vocab_size"]


def save_small_llama(directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """Write a random two-layer Llama, by default with tied embeddings, as safetensors."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "tie_word_embeddings": True, **changes}))
    model.to(dtype=dtype)  # type: ignore[call-arg]
    model.save_pretrained(directory)
    return directory


def spec_of(**changes: Any) -> Train:
    """Section train: fp32, no checkpointing, rank 4 on all linear layers, but for the changes (see `changed`)."""
    values: dict[str, Any] = {"method": "lora", "precision": "fp32", "grad_ckpt": False, "lr": 1e-2}
    return train_of(**{**values, "rank": 4, **changes})


def base_of(directory: Path, *tokenizer_files: str) -> Base:
    """A model directory as the base of a fine-tuned one."""
    return Base(address="base", revision=None, directory=directory, tokenizer_files=tokenizer_files, chat_template=None)


def moved_adapter(model_directory: Path, out: Path, spec: Train) -> Path:
    """An adapter whose effect is not zero."""
    model: Any = load_model(model_directory, spec, CPU)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.02)
    out.mkdir(exist_ok=True)
    save_adapter(model, out, str(model_directory))
    return out
