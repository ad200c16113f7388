"""Mixtures of experts: the same numbers as transformers and peft, in memory that the routing does not change."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from benchmarks.estimate_cpu import SMALL as SIZES
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.experts.expert_adapters import GroupedAdapter
from lean_finetune.model.experts.experts_forward import expert_modules
from lean_finetune.model.experts.packed_weights import packing_of, unpack_expert
from lean_finetune.model.load_model import load_base, load_model
from tests.small_model import CPU, spec_of

MIXTURES: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2
    ),
}
TOKENS = torch.arange(24).view(2, 12) % 60


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes small mixtures of experts, each once."""
    root = tmp_path_factory.mktemp("mixtures")

    def directory_of(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(MIXTURES[family]).save_pretrained(directory)
        return directory

    return directory_of


def changed_adapters(model: Any) -> Any:
    """The model with adapters that change its logits."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe"])
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
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("experts", ["none", "all"])
def test_a_saved_adapter_loads_in_peft_with_equal_logits(family, experts, saved, tmp_path):
    """Adapters that peft reads in another layout, or adds to other layers than we trained."""
    spec = spec_of(method="lora", lora_experts=experts, lora_expert_rank=4, lora_rank=8)
    ours: Any = changed_adapters(load_model(saved(family), spec, CPU))
    save_adapter(ours, tmp_path, "base")
    base = AutoModelForCausalLM.from_pretrained(saved(family))
    before = base(input_ids=TOKENS).logits
    theirs = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    logits = ours(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(theirs(input_ids=TOKENS).logits, logits, rtol=1e-4, atol=1e-5)
    assert (logits - before).abs().max() > 1e-3
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert not any("gate.weight" in name or "router" in name for name in trained)
    assert any("experts" in name for name in trained) == (experts == "all")
    again: Any = load_adapter(load_base(saved(family), spec, CPU), tmp_path, spec).eval()
    torch.testing.assert_close(again(input_ids=TOKENS, use_cache=False).logits, logits)


@pytest.mark.parametrize("method", ["qlora", "int8_lora"])
def test_packed_experts_compute_with_the_weights_they_hold(method, saved):
    """A block of scales of another expert, or a transposed weight."""
    spec = spec_of(method=method, lora_experts="all", lora_expert_rank=2)
    packed: Any = changed_adapters(load_model(saved("qwen3_moe"), spec, CPU))
    plain: Any = changed_adapters(
        load_model(saved("qwen3_moe"), spec_of(method="lora", lora_experts="all", lora_expert_rank=2), CPU)
    )
    experts = dict(expert_modules(plain))
    for name, module in expert_modules(packed):
        for projection in ("gate_up_proj", "down_proj"):
            packing, weight = packing_of(module, projection), getattr(experts[name], projection)
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
    one, other = (next(m for m in model.modules() if type(m) is GroupedAdapter) for model in (packed, plain))
    results = [module(hidden, chosen, weights) for module in (one, other)]
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(result.square().sum(), hidden)[0] for result in results]
    torch.testing.assert_close(*grads)


def test_a_target_that_peft_takes_for_experts_is_refused(saved):
    """In DeepSeek-V3 peft loads an adapter of the shared expert's gate_proj as one of all experts."""
    with pytest.raises(UserError, match=r"train\.lora\.targets: peft takes gate_proj of deepseek_v3 for its experts"):
        load_model(saved("deepseek_v3"), spec_of(method="lora", lora_targets=("gate_proj",)), CPU)


def test_adapters_of_experts_need_experts(small_llama):
    """A switch without effect."""
    with pytest.raises(UserError, match=r"train\.lora\.experts: llama has no experts"):
        load_model(small_llama, spec_of(method="lora", lora_experts="all"), CPU)
