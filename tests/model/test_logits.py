"""Factors and caps of logits: ours are those of the family's own code."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from lean_finetune.config.model_families import family_of
from lean_finetune.core.errors import UserError
from lean_finetune.model.attention_choice import training_attention
from lean_finetune.step.head_loss import LOGIT_CAPS, LOGIT_DIVISORS, LOGIT_FACTORS, logit_cap, logit_factor
from lean_finetune.step.loss import check_head
from tests.kit.estimate_cpu import SMALL
from tests.kit.tiny_config import family_names, tiny_config
from tests.small_model import CPU

CHANGED: dict[str, Any] = {
    **dict.fromkeys(LOGIT_CAPS, 0.5),
    **dict.fromkeys(LOGIT_FACTORS, 1.5),
    **dict.fromkeys(LOGIT_DIVISORS, 2.0),
    "unpadded_vocab_size": 200,
}


def test_a_key_of_another_family_changes_no_logits():
    """A cap in the config.json of a Llama, whose code does not read it."""
    config = LlamaConfig(**SMALL, **CHANGED)
    assert logit_cap(config) is None and logit_factor(config) == 1.0
    check_head(AutoModelForCausalLM.from_config(config), CPU)


@pytest.mark.slow
def test_every_family_that_declares_a_factor_or_a_cap_applies_it():
    """A declared value that the family's code ignores, or applies in another way: refused when training starts."""
    tried, refused = 0, {}
    for family in family_names():
        kind = CONFIG_MAPPING[family]
        changed = {field.name for field in fields(kind)} & {*CHANGED}
        if (
            not any(hasattr(kind, name) for name in CHANGED)
            or family_of(family).unsupported
            or "text_config" in kind.sub_configs
        ):
            continue
        config = tiny_config(family, **{name: CHANGED[name] for name in changed})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=training_attention(config))
        try:
            check_head(model, CPU)
        except UserError as error:
            refused[family] = str(error)
        tried += 1
    assert not refused and tried >= 15
