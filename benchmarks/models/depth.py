"""Small models of 12, 24 and 36 layers: peaks predicted from a few layers, and counted with all of them on a CPU."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Row
from lean_finetune.config.field_types import Method
from tests.kit.estimate_cpu import Case, compare_prediction, worst_share
from tests.kit.tiny_config import tiny_config

LAYERS = (12, 24, 36)
METHODS: tuple[Method, ...] = ("full", "lora")
WINDOWED = ("sliding_attention", "full_attention")
PATTERNS: Mapping[str, Sequence[str] | None] = {
    "llama": None,
    "qwen3": None,
    "gemma2": WINDOWED,
    "qwen3_moe": None,
    "gpt_oss": WINDOWED,
    "granitemoehybrid": ("mamba", "attention"),
    "lfm2": ("conv", "full_attention"),
    "qwen3_next": ("linear_attention", "full_attention"),
}
"""Families, and the kinds of layers that take turns."""


def depth_cases() -> dict[str, tuple[str, Method, int]]:
    """Family, method and layers, by name."""
    return {
        f"{family}, {method}, {n} layers": (family, method, n)
        for family, method, n in product(PATTERNS, METHODS, LAYERS)
    }


def compared(name: str) -> Row:
    """Bytes predicted and counted of a run, and the largest difference in a phase."""
    family, method, layers = depth_cases()[name]
    pattern = PATTERNS[family]
    kinds = {} if pattern is None else {"layer_types": [*pattern] * (layers // len(pattern))}
    torch.manual_seed(0)
    with TemporaryDirectory() as directory:
        config = tiny_config(family, num_hidden_layers=layers, **kinds)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        prediction, pairs = compare_prediction(
            Case(family=family, method=method, grad_ckpt=method == "lora"), Path(directory)
        )
    predicted, counted = pairs["run"]
    return {
        "case": name,
        "layers_traced": prediction.layers_traced,
        "predicted_bytes": predicted,
        "counted_bytes": counted,
        "worst_phase_percent": 100 * worst_share(pairs),
    }
