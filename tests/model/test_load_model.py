"""Real and fake models have the same tensors; models that would silently train wrongly are refused."""

import json
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.load_model import fake_model, uninitialized_model
from lean_finetune.model.model_config import read_config, refuse_long_rows
from lean_finetune.model.quantize import quantisation_tensors
from tests.kit.loaded import load_base, load_model
from tests.small_model import CPU, spec_of
from tests.step.common import slow

FORMS: list[dict[str, Any]] = [
    {"method": "full"},
    {"method": "lora"},
    {"method": "lora", "lora_dora": True},
    {"method": "qlora", "lora_dora": True},
    {"method": "lora", "lora_init": "pissa", "lora_rslora": True},
    {"method": "qlora"},
    {"method": "qlora", "quant_type": "fp4", "lora_init": "loftq"},
    {"method": "qlora", "quant_double": False},
    {"method": "int8_lora"},
]
"""Every kind of frozen weight and of adapter."""


def tensors_of(model: torch.nn.Module) -> list[tuple[tuple[int, ...], str, bool]]:
    """Shape, type and trainability of every parameter, buffer and quantisation tensor."""
    tensors = [*model.parameters(), *model.buffers(), *quantisation_tensors(model)]
    return sorted((tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors)


@pytest.mark.parametrize("precision", ["bf16", *map(slow, ("fp32", "fp16", "pure_bf16"))])
@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_fake_model_has_the_tensors_of_the_real_one(small_llama: Path, changes: dict[str, Any], precision: str):
    """A difference here would be an error of the prediction."""
    spec = spec_of(**changes, precision=precision)
    real = tensors_of(load_model(small_llama, spec, CPU))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = tensors_of(fake_model(read_config(small_llama), spec, CPU))
    assert fake == real


def test_fake_model_keeps_the_tie_of_embedding_and_head(small_llama: Path):
    """A missed tie would count the embedding twice."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(read_config(small_llama), spec_of(method="full"), CPU)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]


def test_an_evaluation_leaves_4_bit_weights_trainable(small_llama: Path):
    """Bitsandbytes repacks 4-bit weights in a no-grad forward on AVX512-BF16 CPUs; adapters then learn garbage."""
    model = load_model(small_llama, spec_of(method="qlora"), CPU)
    input_ids = torch.arange(32)[None]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(input_ids=input_ids, use_cache=False)
    model.train()
    after = gradients()
    assert before and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    layers = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_adapter_comes_back_bit_equal_and_in_equal_bytes(small_llama: Path, tmp_path: Path):
    """Peft stores targets in a set: unsorted, equal adapters would differ in bytes and rerun evaluate."""
    spec = spec_of(method="lora")
    model = load_model(small_llama, spec, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    save_adapter(model, tmp_path / "a", "base")  # type: ignore[arg-type]
    back = load_adapter(load_base(small_llama, spec, CPU), tmp_path / "a", spec)
    save_adapter(back, tmp_path / "b", "base")
    saved = load_file(tmp_path / "a/adapter_model.safetensors")
    for name, value in load_file(tmp_path / "b/adapter_model.safetensors").items():
        assert torch.equal(saved[name], value)
    targets = json.loads((tmp_path / "a/adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)


def test_weights_are_not_left_in_the_mapped_file(small_llama: Path):
    """Memory that the allocator does not count would make the measured peak too low."""
    model = load_base(small_llama, spec_of(method="full", precision="bf16"), CPU)
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    assert model is not None and str(small_llama / "model.safetensors") not in mapped


def test_missing_weights_are_refused(small_llama: Path, tmp_path: Path):
    """Transformers would fill them with random numbers and only warn."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((small_llama / name).read_bytes())
    weights = load_file(small_llama / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing keys.*layers\.1\.mlp\.up_proj"):
        load_base(tmp_path, spec_of(method="full"), CPU)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("qproj",), r"got \['qproj'\]; known: .*q_proj"),
        (("q_proj", "vproj"), r"got \['vproj'\]; known: .*v_proj"),  # peft silently ignores the unknown one.
        (("mlp",), r"got \['mlp'\]; known: "),
        (("input_layernorm",), r"got \['input_layernorm'\]; known: "),
        (("embed_tokens",), r"got \['embed_tokens'\]; known: "),
        (("q_proj", "lm_head"), r"lm_head shares its weight with the embedding"),
    ],
)
@pytest.mark.parametrize("fake", [False, True], ids=["train", "estimate"])
def test_targets_that_are_no_linear_layers_are_told(small_llama: Path, targets: tuple, message: str, fake: bool):
    """A misspelt name next to a valid one would train half of the layers, with a normal-looking loss."""
    spec = spec_of(method="lora", lora_targets=targets)
    with pytest.raises(UserError, match=rf"^train\.lora\.targets: .*{message}") as caught:
        if fake:
            uninitialized_model(read_config(small_llama), spec, CPU)
        else:
            load_model(small_llama, spec, CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "causal language model"),
        ({"model_type": "no_such_model"}, "config.json"),
    ],
)
def test_unsupported_configs_are_refused_in_one_line(small_llama: Path, tmp_path: Path, change: dict, message: str):
    config = {**json.loads((small_llama / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


def test_dynamic_positions_name_their_key_and_change_nothing_for_short_rows(small_llama: Path, tmp_path: Path):
    """`reads values of tensors (modeling_llama.py:389…)`, from which nobody finds `rope_scaling` in config.json."""
    content = json.loads((small_llama / "config.json").read_text())
    for rope, remedy in (
        ({"rope_type": "dynamic", "factor": 2.0}, "remove rope_scaling there: rows of up to"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "choose another model"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**content, "rope_parameters": {**rope, "rope_theta": 1e4}}))
        with pytest.raises(UserError, match="config.json: rope_scaling must not be dynamic") as caught:
            read_config(tmp_path)
        assert remedy in str(caught.value)
    ids = torch.arange(200)[None] % 256
    usual, dynamic = (
        LlamaForCausalLM.from_pretrained(small_llama, rope_parameters={**kind, "rope_theta": 1e4})(input_ids=ids).logits
        for kind in ({"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0})
    )
    assert torch.equal(usual, dynamic)


def test_rows_past_the_models_positions_are_refused(small_llama: Path):
    """A table of positions would be read past its end, which on a GPU is an assertion without a name."""
    config = read_config(small_llama)
    refuse_long_rows(config, 256)
    with pytest.raises(UserError, match=r"data\.max_length: .*256 positions.*264"):
        refuse_long_rows(config, 264)
