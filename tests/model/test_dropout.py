"""Dropout of the model's config, which would change the log-probabilities that are compared with a reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, OPTConfig, PhiConfig, PretrainedConfig

from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.step.loss import causal_lm
from tests.kit.estimate_cpu import LAYOUTS, SMALL
from tests.kit.loaded import load_model
from tests.memory.common import setting_of
from tests.memory.predict.test_measured import check
from tests.small_model import CPU, spec_of
from tests.step.common import slow

RATE = 0.25
CONFIGS: dict[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**SMALL, attention_dropout=RATE),
    "Phi": PhiConfig(**SMALL, resid_pdrop=RATE, embd_pdrop=RATE, attention_dropout=RATE),
    "OPT": OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=64, dropout=RATE, attention_dropout=RATE),
    "GPT-NeoX": GPTNeoXConfig(**SMALL, hidden_dropout=RATE, attention_dropout=RATE),
}


def saved(family: str, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(directory)
    return directory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_dropout_is_off_where_log_probabilities_are_compared(family, tmp_path):
    """A first loss of dpo above ln 2, and rewards that are noise."""
    directory = saved(family, tmp_path)
    compared = load_model(directory, spec_of(method="lora", objective="dpo"), CPU)
    assert compared.training and torch.equal(logits(compared), logits(compared.eval()))
    for objective in ("sft", "simpo"):
        kept = load_model(directory, spec_of(method="lora", objective=objective), CPU)
        assert not torch.equal(logits(kept), logits(kept)), "the model's own dropout"
    names = [name for name, value in CONFIGS[family].to_dict().items() if value == RATE]
    assert all(getattr(causal_lm(compared).config, name) == RATE for name in names), "saved with a fully trained model"


@pytest.mark.parametrize(("method", "grad_ckpt"), [("full", True), slow("lora", True), slow("qlora", False)])
def test_memory_is_predicted_without_dropout(method, grad_ckpt, tmp_path):
    """Masks, and states of the random generator, that this step does not keep."""
    steps = tuple(tuple(replace(shape, kind=KINDS["pair"]) for shape in step) for step in LAYOUTS["padded"])
    check(saved("Phi", tmp_path), setting_of(method=method, grad_ckpt=grad_ckpt, objective="dpo"), steps)
