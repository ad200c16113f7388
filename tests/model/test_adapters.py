"""Adapters and merged models compute the same after saving and loading, with our code and with plain peft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from ruamel.yaml import YAML
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from lean_finetune.config.adapter_starts import ADAPTER_STARTS, AdapterStart
from lean_finetune.config.load import parse_params
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapter_init import START_FUNCTIONS, Factors, FrozenLayer, adapted_layers
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.files.safetensors_files import model_tensors
from lean_finetune.model.load_model import uninitialized_model
from lean_finetune.model.merge_adapters import MERGED, write_merged
from lean_finetune.model.model_config import read_config
from lean_finetune.model.precision import base_dtype, resolved
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.save_model import save_tuned
from tests.conftest import ROOT
from tests.kit.loaded import load_base, load_model
from tests.small_model import CPU, VOCABULARY, base_of, spec_of
from tests.step.common import slow

IDS = torch.arange(3, 99)[None].remainder(VOCABULARY)
FORMS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "rslora": {"method": "lora", "lora_rslora": True},
    "dora": {"method": "lora", "lora_dora": True},
    "dora on nf4": {"method": "qlora", "lora_dora": True},
    "pissa": {"method": "lora", "lora_init": "pissa"},
    "pissa, rslora": {"method": "lora", "lora_init": "pissa", "lora_rslora": True},
    "pure_bf16": {"method": "lora", "precision": "pure_bf16"},
    "nf4": {"method": "qlora"},
    "fp4": {"method": "qlora", "quant_type": "fp4", "quant_double": False},
    "loftq": {"method": "qlora", "lora_init": "loftq"},
    "int8": {"method": "int8_lora"},
}
FAST = ("lora", "dora on nf4", "pissa, rslora", "pure_bf16", "loftq", "int8")
SOME = [form if form in FAST else slow(form) for form in FORMS]
"""Each kind of weight and each kind of adapter at least once."""
EXACT = 0.0
ROUNDED = {"pissa": 2e-5, "pissa, rslora": 2e-5}
"""Largest difference of a logit: PiSSA subtracts from an fp32 weight and adds the difference back."""
MERGED_ROUNDED = {name: 2e-5 for name in FORMS} | {"pure_bf16": 5e-2, "int8": 5e-2}
"""bf16 rounds the merged weight; the 8-bit product also rounds its inputs."""


def trained(directory: Path, spec: Train) -> PeftModel:
    """A model whose adapters have moved, as by training."""
    model: Any = load_model(directory, spec, CPU)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                step = torch.randn(parameter.shape, generator=draw) * 0.02
                parameter.add_(step.to(parameter.dtype))
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()


def plain_peft(directory: Path, adapter: Path, spec: Train) -> PeftModel:
    """As someone without this project loads base and adapter."""
    how = quantisation(spec)
    base = AutoModelForCausalLM.from_pretrained(
        directory, dtype=base_dtype(spec), **({} if how is None else {"quantization_config": how})
    )
    model = PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=spec.precision != "pure_bf16")
    keep_trainable_on_cpu(model)
    return model


@pytest.fixture
def fp32_llama(small_llama: Path, tmp_path: Path) -> Path:
    """The small Llama in fp32 and in several shards: a merge into bf16 files would round."""
    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base", max_shard_size="100KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    return tmp_path / "base"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's, see adapters.py
@pytest.mark.parametrize("form", SOME)
def test_an_adapter_reloads_in_plain_peft_and_in_evaluate(small_llama: Path, tmp_path: Path, form: str):
    """PiSSA changes the frozen weights: its adapter as trained would be another model on the base as it is."""
    spec = spec_of(**FORMS[form])
    model = trained(small_llama, spec)
    save_adapter(model, tmp_path, "base")
    expected, bound = logits(model), ROUNDED.get(form, EXACT)
    if not form.startswith("pissa"):
        saved = load_file(tmp_path / "adapter_model.safetensors")
        trained_tensors = {
            name.replace(".default", "").replace("vector.weight", "vector"): p
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        assert saved.keys() == trained_tensors.keys()
        assert all(torch.equal(saved[name], value) for name, value in trained_tensors.items())
    ours = load_adapter(load_base(small_llama, spec, CPU, "sdpa"), tmp_path, spec)
    theirs = plain_peft(small_llama, tmp_path, spec)
    moved = (logits(load_base(small_llama, spec, CPU)) - expected).abs().max().item()
    assert moved > 100 * max(bound, 1e-6), "an adapter that does nothing would pass any comparison"
    for loaded in (ours, theirs):
        assert (logits(loaded) - expected).abs().max().item() <= bound


@pytest.mark.parametrize("form", SOME)
def test_a_merged_model_is_the_adapted_one(fp32_llama: Path, tmp_path: Path, form: str):
    """A merge of 4-bit adapters into the original weights would correct an error that these do not have."""
    spec = spec_of(**FORMS[form])
    model = trained(fp32_llama, spec)
    files = [path.name for path in fp32_llama.iterdir()]
    save_tuned(ParallelModel(model), base_of(fp32_llama), tmp_path / "tuned", spec, files)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / MERGED, dtype=torch.float32)
    assert (logits(merged) - logits(model)).abs().max().item() < MERGED_ROUNDED[form]
    assert sorted(path.name for path in (tmp_path / "tuned" / MERGED).iterdir()) == sorted(files)


def test_a_merge_that_misses_an_adapted_weight_is_refused(fp32_llama: Path, tmp_path: Path):
    """A model written without one of its adapters looks complete."""
    spec = spec_of(method="lora")
    save_adapter(trained(fp32_llama, spec), tmp_path, "base")
    files = [path.name for path in fp32_llama.iterdir() if not path.name.startswith("model-00002")]
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"train\.merge: .* has no weight for model\.layers\."):
        write_merged(fp32_llama, files, tmp_path, spec, tmp_path / "out")


def test_pissa_starts_as_the_model_it_was(small_llama: Path):
    """What the adapters take must be missing in the frozen weights, and be the largest part of them."""
    spec = spec_of(method="lora", lora_init="pissa")
    before, start = logits(load_base(small_llama, spec, CPU)), load_model(small_llama, spec, CPU)
    assert (logits(start) - before).abs().max().item() < 2e-5
    stored = model_tensors(small_llama)
    for name, layer in adapted_layers(start):  # type: ignore[arg-type]
        values = torch.linalg.svdvals(stored[f"{name}.weight"].read().float())
        least = values[spec.lora.rank :].square().sum().sqrt().item()
        assert layer.get_base_layer().weight.norm().item() == pytest.approx(least, rel=5e-3)


def test_loftq_starts_closer_to_the_original_than_4_bits(small_llama: Path):
    """A start that does not reduce the quantisation error would be an ordinary one with noise."""
    whole = logits(load_base(small_llama, spec_of(method="full"), CPU))
    errors = [
        (logits(load_model(small_llama, spec_of(method="qlora", lora_init=init, lora_rank=32), CPU)) - whole).norm()
        for init in ("default", "loftq")
    ]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("form", ["pissa", "loftq"])
def test_starts_are_the_same_in_every_run(small_llama: Path, form: str):
    """A decomposition drawn at random must be drawn from the seed."""
    first, second = (load_model(small_llama, spec_of(**FORMS[form]), CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first if "lora_" in name)


def test_a_start_that_layers_cannot_have_is_refused_without_weights(small_llama: Path):
    """A run that was predicted, and refused after its model was loaded."""
    for config, rank, message in (
        (read_config(small_llama), 33, r"train\.lora\.rank: must be at most 32 with .*got 33"),
        (GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64), 4, r"train\.lora\.init: .*, a Conv1D; use default"),
    ):
        with pytest.raises(UserError, match=message):
            uninitialized_model(config, spec_of(method="lora", lora_init="pissa", lora_rank=rank), CPU)


def milora(layer: FrozenLayer) -> Factors:
    """The smallest singular vectors, taken out of the frozen weight (Wang et al. 2024, arXiv 2406.09044)."""
    U_NQ, S_Q, V_QK = torch.linalg.svd(layer.weight.float(), full_matrices=False)
    root_R = (S_Q[-layer.rank :] / layer.scale).sqrt()
    A_RK, B_NR = root_R[:, None] * V_QK[-layer.rank :], U_NQ[:, -layer.rank :] * root_R
    layer.weight.copy_(layer.weight.float() - layer.scale * (B_NR @ A_RK))
    return A_RK, B_NR


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's, see adapters.py
def test_a_start_is_added_by_an_entry_and_a_function(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The schema, the rule between init and method, loading and saving must take a new start from its entry."""
    entry = AdapterStart(
        methods=("lora",), reason="needs weights in 16 or 32 bits", changes_frozen_weights=True, fp32_copies=3
    )
    monkeypatch.setitem(ADAPTER_STARTS, "milora", entry)
    monkeypatch.setitem(START_FUNCTIONS, "milora", milora)
    values = YAML(typ="safe").load(ROOT / "params.yaml")
    values["train"]["lora"]["init"] = "milora"
    values["train"]["method"] = "qlora"
    with pytest.raises(UserError, match=r"train\.lora\.init: milora needs .*=qlora; use train\.method=lora"):
        parse_params(values)
    values["train"]["method"] = "lora"
    spec = resolved(parse_params(values), "fp32")
    before, start = logits(load_base(small_llama, spec, CPU)), load_model(small_llama, spec, CPU)
    assert (logits(start) - before).abs().max().item() < 2e-5
    model = trained(small_llama, spec)
    save_adapter(model, tmp_path, "base")
    assert (logits(plain_peft(small_llama, tmp_path, spec)) - logits(model)).abs().max().item() < 2e-5
