"""Adapters of other tools, as PEFT saves them: loaded and merged they compute what PEFT computes."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config

from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import load_adapter
from lean_finetune.model.merge_adapters import write_merged
from tests.kit.loaded import load_base
from tests.model.test_adapters import logits, plain_peft
from tests.small_model import CPU, save_small_llama, spec_of
from tests.step.common import slow

UNSLOTH = (
    r"(?:.*?(?:language|text|model).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:qkv_proj|q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
MS_SWIFT = r"^(model(?=\.).*\.(up_proj|down_proj|v_proj))$"
LLAMA_FACTORY = r"^(?!.*(?:vision_tower|lm_head)).*(?:q_proj|up_proj).*"
AXOLOTL = r"model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
FORMS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "mlp.up_proj", "model.layers.1.self_attn.v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "Unsloth": {"target_modules": UNSLOTH},
    "ms-swift": {"target_modules": MS_SWIFT},
    "LLaMA-Factory": {"target_modules": LLAMA_FACTORY},
    "Axolotl": {"target_modules": AXOLOTL, "exclude_modules": r".*\.0\..*|lm_head"},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "layers of no list": {"target_modules": ["q_proj"], "layers_to_transform": 0, "exclude_modules": ["o_proj"]},
    "ranks": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"^model.layers.0.self_attn.k_proj": 3, r"layers\.\d+\.self_attn.*": 2, "up_proj": 6},
        "alpha_pattern": {r".*mlp.*": 1, "^model.layers.0.self_attn.q_proj": 64, "k_proj": 0.5},
        "use_rslora": True,
    },
    "biases": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "biases of adapters": {"target_modules": ["q_proj"], "lora_bias": True},
    "eva": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"model.layers.0.self_attn.q_proj": 7}},
}
FAST = ("Unsloth", "LLaMA-Factory", "ranks", "biases", "embedding", "GPT-2 with DoRA")
GPT2 = ("GPT-2", "GPT-2 with DoRA")
SOME = [form if form in FAST else slow(form) for form in (*FORMS, *GPT2)]
NOT_MERGED = {"embedding": "lora_embedding", "biases of adapters": "lora_B.bias"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in fp32 with biases and a head of its own."""
    directory = tmp_path_factory.mktemp("base")
    return save_small_llama(directory, dtype=torch.float32, attention_bias=True, tie_word_embeddings=False)


def save_foreign(base: Path, directory: Path, values: dict[str, Any]) -> None:
    """Save an adapter that changes the answers, as PEFT does."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **values)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About how these kinds are saved.
        model.save_pretrained(directory)
    path = directory / "adapter_config.json"
    saved = {**json.loads(path.read_text()), "base_model_name_or_path": str(base)}
    if isinstance(values["target_modules"], str):  # PEFT writes the names that it found; its users write patterns.
        saved["target_modules"] = values["target_modules"]
    path.write_text(json.dumps(saved))


def gpt2(directory: Path) -> Path:
    """A small GPT-2, whose weights are transposed."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=256, n_positions=128, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's, see adapters.py
@pytest.mark.parametrize("form", SOME)
def test_it_loads_and_merges_as_in_peft(base: Path, tmp_path: Path, form: str):
    """A scale of another layer, layers that are left out, or an honest pattern that is refused."""
    adapter, spec, out = tmp_path / "adapter", spec_of(method="lora"), tmp_path / "out"
    values = FORMS.get(
        form, {"target_modules": ["c_attn", "c_proj"], "use_dora": "DoRA" in form, "fan_in_fan_out": True}
    )
    if form not in FORMS:
        base = gpt2(tmp_path / "gpt2")
    save_foreign(base, adapter, values)
    expected = logits(plain_peft(base, adapter, spec))
    moved = (logits(load_base(base, spec, CPU)) - expected).abs().max().item()
    loaded = logits(load_adapter(load_base(base, spec, CPU, "sdpa"), adapter, spec))
    assert moved > 1e-3 and (loaded - expected).abs().max().item() < 1e-6
    out.mkdir()
    files = [path.name for path in base.iterdir()]
    if form in NOT_MERGED:
        with pytest.raises(UserError, match=NOT_MERGED[form]):
            write_merged(base, files, adapter, spec, out)
        return
    write_merged(base, files, adapter, spec, out)
    merged = logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    assert (merged - expected).abs().max().item() < 2e-5
