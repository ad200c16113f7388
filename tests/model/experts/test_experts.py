"""Mixtures of experts: the same numbers as transformers and peft, in memory that the routing does not change."""

import copy
import re
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import save_adapter
from lean_finetune.model.experts.expert_adapters import GroupedAdapter
from lean_finetune.model.experts.experts_forward import (
    counting_rows,
    expert_load,
    expert_modules,
    forget_rows,
    router_parameters,
)
from lean_finetune.model.experts.grouped_matmul import packing_of, unpack_expert
from lean_finetune.model.files.safetensors_files import model_tensors
from lean_finetune.model.load_model import uninitialized_model
from lean_finetune.model.merge_adapters import MERGED, refuse_merge, write_merged
from lean_finetune.pinning.model_files import WEIGHTS
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import TokenLoss
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.save_model import save_tuned
from tests.kit.estimate_cpu import EXPERTS, FAMILIES, SMALL
from tests.kit.loaded import load_base, load_model
from tests.kit.specs import padded, random_batch
from tests.kit.tiny_config import tiny_config
from tests.model.reload import TOKENS, changed_adapters, reload_adapter
from tests.small_model import CPU, base_of, spec_of
from tests.small_vision import vision_model

LLAMA_4 = "llama4_text"
"""Its router weighs the inputs of experts, and its own code runs all of them."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes small mixtures of experts, each once."""
    root = tmp_path_factory.mktemp("mixtures")

    def directory_of(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            torch.manual_seed(0)
            config = FAMILIES.get(family) or tiny_config(family)
            AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        return directory

    return directory_of


@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", "Qwen2-MoE", LLAMA_4])
def test_experts_compute_what_transformers_computes_one_by_one(family, saved):
    """Logits and gradients of all weights, against transformers' loop over experts."""
    ours: Any = load_model(saved(family), spec_of(method="full", router="trained"), CPU)
    theirs: Any = AutoModelForCausalLM.from_pretrained(saved(family), experts_implementation="eager")
    for model in (ours, theirs):
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", pytest.param(LLAMA_4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("experts", ["none", "all"])
def test_a_saved_adapter_loads_in_peft_with_equal_logits(family, experts, saved, tmp_path):
    """Adapters that peft reads in another layout, or adds to other layers than we trained."""
    spec = spec_of(method="lora", lora_experts=experts, lora_expert_rank=4, lora_rank=8)
    ours = reload_adapter(saved(family), spec, tmp_path)
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert not any("gate.weight" in name or "router" in name for name in trained)
    assert any("experts" in name for name in trained) == (experts == "all")


@pytest.mark.parametrize("method", ["qlora", pytest.param("int8_lora", marks=pytest.mark.slow)])
def test_packed_experts_of_another_family_inside_a_model_of_images_compute(method, tmp_path):
    """InternVL with Qwen3-MoE: transformers' own code of experts fails at packed weights."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    directory = vision_model(tmp_path, "internvl", model_type="qwen3_moe", **sizes)
    packed, plain = (load_model(directory, spec_of(method=one), CPU) for one in (method, "lora"))
    found, exact = (model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss for model in (packed, plain))
    assert len(list(expert_modules(packed))) > 1
    assert found.item() == pytest.approx(exact.item(), rel=0.01)
    found.backward()


@pytest.mark.parametrize("method", ["qlora", "int8_lora"])
def test_packed_experts_compute_with_the_weights_they_hold(method, saved):
    """A block of scales of another expert, or a transposed weight."""
    spec = spec_of(method=method, lora_experts="all", lora_expert_rank=2)
    packed: Any = changed_adapters(load_model(saved("Qwen3-MoE"), spec, CPU))
    plain: Any = changed_adapters(
        load_model(saved("Qwen3-MoE"), spec_of(method="lora", lora_experts="all", lora_expert_rank=2), CPU)
    )
    experts = dict(expert_modules(plain))
    for name, module in expert_modules(packed):
        for projection in ("gate_up_proj", "down_proj"):
            packing: Any = packing_of(module, projection)
            weight = getattr(experts[name], projection)
            values = module.get_parameter(projection)
            assert values.numel() * values.element_size() == weight.numel() // (2 if method == "qlora" else 1)
            for number in range(module.num_experts):
                exact = weight[number].clone()
                weight.data[number] = unpack_expert(
                    values, packing.state, number, list(packing.shape), packing.quant_type, torch.float32
                )
                if method == "qlora":
                    one, state = bnb.functional.quantize_4bit(exact, compress_statistics=True, quant_type="nf4")
                    assert weight[number].equal(bnb.functional.dequantize_4bit(one, state))
                else:
                    assert (weight[number] - exact).abs().max() < 0.01 * exact.abs().max()
    hidden = torch.randn(10, 64, requires_grad=True)
    chosen, weights = torch.randint(8, (10, 2)), torch.rand(10, 2)
    pair: Any = [next(m for m in model.modules() if type(m) is GroupedAdapter) for model in (packed, plain)]
    results = [module(hidden, chosen, weights) for module in pair]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(result.square().sum(), hidden)[0] for result in results]
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    ("family", "targets", "experts"),
    [
        ("DeepSeek-V3", ("o_proj", "shared_experts.gate_proj"), "none"),
        ("Qwen2-MoE", ("gate_proj", "up_proj", "down_proj"), "all"),
    ],
)
def test_layers_that_peft_takes_for_experts_get_adapters(family, targets, experts, saved, tmp_path):
    """By these names peft adapts all experts; so a saved adapter names the weights of layers, and merges as others."""
    base = saved(family)
    spec = spec_of(method="lora", lora_targets=targets, lora_experts=experts, lora_expert_rank=2)
    ours = reload_adapter(base, spec, tmp_path / "adapter")
    adapted = {name.split(".lora_")[0] for name, _ in ours.named_parameters() if ".lora_" in name}
    layers = {path for path in adapted if "mlp.experts" not in path}
    assert all(any(path.endswith(f".{target}") for path in layers) for target in targets)
    assert all(path.endswith(targets) for path in layers) and (adapted == layers) == (experts == "none")
    assert_merged(ours, base, spec, tmp_path, 2e-5)


def test_layers_that_peft_takes_for_experts_have_no_dropout(saved):
    """An adapter that plain PEFT refuses to load."""
    spec = spec_of(method="lora", lora_targets=("gate_proj",), lora_dropout=0.1)
    with pytest.raises(UserError, match=r"train\.lora\.targets: peft cannot load adapters of gate_proj of deepseek_v3"):
        load_model(saved("DeepSeek-V3"), spec, CPU)


def test_experts_named_as_layers_are_refused_with_the_switch_that_adapts_them(saved):
    """`gate_proj` of a model whose only gate projections are in experts."""
    with pytest.raises(UserError, match=r"got \['gate_proj'\]; .*; train\.lora\.experts=all adapts the experts$"):
        load_model(saved("Qwen3-MoE"), spec_of(method="lora", lora_targets=("q_proj", "gate_proj")), CPU)


def test_adapters_of_experts_need_experts(small_llama):
    """A switch without effect."""
    with pytest.raises(UserError, match=r"train\.lora\.experts: llama has no experts"):
        load_model(small_llama, spec_of(method="lora", lora_experts="all"), CPU)


def test_the_balancing_loss_is_that_of_transformers(saved):
    """Another scale, or a loss that does not reach the routers."""
    ours: Any = load_model(saved("Qwen3-MoE"), spec_of(method="full", router="trained"), CPU)
    batch = random_batch(padded(2, 12, 20), 60)
    both, plain = (summed_loss(ours, batch, TokenLoss(None), router_aux_loss=weight) for weight in (0.1, 0.0))
    theirs: Any = AutoModelForCausalLM.from_pretrained(saved("Qwen3-MoE"))
    expected = 0.1 * 20 * theirs(input_ids=batch.input_ids_BT, output_router_logits=True).aux_loss
    torch.testing.assert_close(both - plain, expected, rtol=1e-4, atol=1e-4)
    (both - plain).backward()
    routers: Any = router_parameters(ours).values()
    assert all(parameter.grad.abs().sum() > 0 for parameter in routers)


def test_a_balancing_loss_needs_a_family_that_has_one(small_llama):
    """A switch without effect."""
    with pytest.raises(UserError, match=r"train\.router_aux_loss: transformers has none for llama"):
        summed_loss(
            load_model(small_llama, spec_of(), CPU),
            random_batch(padded(1, 8, 4), 60),
            TokenLoss(None),
            router_aux_loss=0.1,
        )


ROUTERS = {"Qwen3-MoE": {"weight"}, "GPT-OSS": {"weight", "bias"}, "hunyuan_v1_moe": {"wg.weight"}}
"""Names of the parameters of a family's router."""


def test_routers_need_experts(small_llama):
    """A parameter without effect, accepted."""
    with pytest.raises(UserError, match=r"train\.router: llama has no experts; got trained; set train\.router=frozen"):
        load_model(small_llama, spec_of(method="full", router="trained"), CPU)


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_are_trained_only_where_it_is_asked_for(family):
    """A router that fine-tuning on few rows would change, also one that is a linear layer inside of a module."""
    config = FAMILIES.get(family) or tiny_config(family)
    names: dict[str, set[str]] = {}
    for form in ({"method": "full"}, {"method": "full", "router": "trained"}, {"method": "lora"}):
        model = uninitialized_model(copy.deepcopy(config), spec_of(**form), CPU)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        found = (re.search(r"[.](?:gate|router)[.](.*)", name) for name in trained)
        names[str(form)] = {match[1] for match in found if match}
    frozen, full, lora = names.values()
    assert (frozen, full, lora) == (set(), ROUTERS[family], set())


MERGED_FORMS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "lora_experts": "all", "lora_expert_rank": 2},
    "qlora": {"method": "qlora", "lora_experts": "all", "lora_expert_rank": 2},
    "qlora, experts without adapters": {"method": "qlora"},
    "int8_lora": {"method": "int8_lora", "lora_experts": "all", "lora_expert_rank": 2},
}
INT8_ROUNDED = 0.05
"""The 8-bit product of linear layers rounds its inputs too."""


@pytest.mark.parametrize("form", MERGED_FORMS)
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", "GPT-OSS", pytest.param(LLAMA_4, marks=pytest.mark.slow)])
def test_merged_experts_are_the_adapted_ones(family, form, saved, tmp_path):
    """An adapter of another expert or projection, a transposed change, or experts without their rounding in training.

    Files have a tensor for each expert and half of a projection (Qwen3-MoE, Mixtral), or stacks (GPT-OSS, Llama 4).
    """
    base, spec = saved(family), spec_of(**MERGED_FORMS[form])
    model: Any = changed_adapters(load_model(base, spec, CPU))
    assert_merged(model, base, spec, tmp_path, INT8_ROUNDED if form == "int8_lora" else 2e-5)


def assert_merged(model: Any, base: Path, spec: Train, directory: Path, tolerated: float) -> None:
    """The merged model has the logits of the adapted one."""
    files = [path.name for path in base.iterdir()]
    refuse_merge(base, spec, experts=spec.lora.experts == "all")
    save_tuned(ParallelModel(model), base_of(base), directory / "tuned", spec, files)
    merged: Any = load_base(directory / "tuned" / MERGED, spec_of(method="full"), CPU)
    plain: Any = load_base(base, spec_of(method="full"), CPU)
    expected, found, before = (m(input_ids=TOKENS, use_cache=False).logits for m in (model, merged, plain))
    assert (found - expected).abs().max() < tolerated < (before - expected).abs().max()


def test_experts_in_an_unknown_form_are_not_merged(saved, tmp_path):
    """A merged model with experts of the base, found out after training."""
    base = saved("Mixtral")
    tensors = {key.replace("w1", "w1_packed"): one.read() for key, one in model_tensors(base).items()}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"^train\.merge: the files of mixtral have .*gate_up_proj in a form"):
        refuse_merge(tmp_path, spec_of(method="qlora"), experts=False)
    refuse_merge(tmp_path, spec_of(method="lora"), experts=False)


def test_the_load_of_experts(saved):
    """Shares of a known routing; recomputed layers, evaluation and earlier steps must not count."""
    model: Any = load_model(saved("Qwen3-MoE"), spec_of(grad_ckpt=True), CPU)
    experts = [module for _, module in expert_modules(model)]
    chosen = torch.tensor([[0, 1]] * 6 + [[0, 2]] * 2)
    for idle in (False, True, False):
        with counting_rows(idle=idle):
            for module in experts:
                module(torch.randn(8, 64), chosen, torch.rand(8, 2))
    module(torch.randn(8, 64), chosen, torch.rand(8, 2))
    load: Any = expert_load(model.modules(), lambda rows: rows)
    assert load.tolist() == [8 * 16 / 32, 5 / 8]
    assert expert_load(model.modules(), lambda rows: rows) is None
    with counting_rows(idle=False):
        loss = summed_loss(model, random_batch(padded(2, 12, 20), 60), TokenLoss(None))
    loss.backward()
    rows = [module._rows_by_expert for module in experts]
    assert [one.sum().item() for one in rows] == [2 * 12 * 2] * len(experts)
    forget_rows(model.modules())
    assert expert_load(model.modules(), lambda rows: rows) is None


def test_merging_experts_needs_memory_for_one_expert(tmp_path):
    """The experts of a layer in fp32, or adapters of all experts multiplied out."""
    experts = 64
    config: Any = Qwen3MoeConfig(**{**SMALL, **EXPERTS, "head_dim": 16}, num_experts=experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    spec = spec_of(method="lora", lora_experts="all", lora_expert_rank=1)
    save_adapter(load_model(tmp_path / "base", spec, CPU), tmp_path / "tuned", "base")  # type: ignore[arg-type]
    (tmp_path / MERGED).mkdir()
    largest = max(stored.bytes for stored in model_tensors(tmp_path / "base").values())
    adapters = (tmp_path / "tuned/adapter_model.safetensors").stat().st_size
    meter = make_meter(CPU)
    with meter.window("merge"), meter.phase("merge"):
        write_merged(tmp_path / "base", ["config.json", WEIGHTS], tmp_path / "tuned", spec, tmp_path / MERGED)
    one_expert = 4 * 64 * 64
    assert meter.result().peak_bytes_by_phase["merge"] < adapters + largest + 5 * one_expert < experts * one_expert


@pytest.mark.parametrize(
    ("family", "precision"), [("DeepSeek-V3", "bf16"), ("ernie4_5_moe", "bf16"), ("GPT-OSS", "fp16")]
)
def test_tensors_that_a_family_keeps_in_fp32_are_traced_so(family, precision, tmp_path):
    """The correction bias of DeepSeek's routers: 2 bytes an expert and layer were missing in the trace."""
    config = FAMILIES.get(family) or tiny_config(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = spec_of(method="qlora", precision=precision)
    loaded, traced = load_model(tmp_path, spec, CPU), uninitialized_model(copy.deepcopy(config), spec, CPU)
    types = [{name: tensor.dtype for name, tensor in model.state_dict().items()} for model in (loaded, traced)]
    assert types[0] == types[1]
    assert torch.float32 in {dtype for name, dtype in types[0].items() if "lora" not in name}
