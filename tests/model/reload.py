"""A saved adapter in plain PEFT."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lean_finetune.config.schema import Train
from lean_finetune.model.adapters import load_adapter, save_adapter
from tests.kit.loaded import load_base, load_model
from tests.small_model import CPU

TOKENS = torch.arange(24).view(2, 12) % 60


def changed_adapters(model: Any) -> Any:
    """The model with adapters that change its logits."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


def reload_adapter(base: Path, spec: Train, directory: Path) -> Any:
    """Our model with adapters, which plain PEFT and `load_adapter` read from a file with equal logits."""
    ours: Any = changed_adapters(load_model(base, spec, CPU))
    save_adapter(ours, directory, "base")
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    before = plain(input_ids=TOKENS).logits
    theirs = PeftModel.from_pretrained(plain, str(directory)).eval()
    logits = ours(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(theirs(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-5)
    assert (logits - before).abs().max() > 1e-3
    again: Any = load_adapter(load_base(base, spec, CPU), directory, spec).eval()
    torch.testing.assert_close(again(input_ids=TOKENS, use_cache=False).logits, logits)
    return ours
