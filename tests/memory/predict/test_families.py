"""Any causal language model of transformers: predicted as it is counted, or refused in one line."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from packaging.version import parse
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    GPT2Config,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    LlamaConfig,
    PretrainedConfig,
    __version__,
)

from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.what_fits import sweep_switches
from lean_finetune.memory.devices import cpu_device
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.state_formulas import model_shapes, state_bytes, state_lines
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cached_fake_mode import UNREAD_LAYERDROP
from lean_finetune.memory.trace.memory_trace import ADAPTERS
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.load_model import uninitialized_model
from lean_finetune.model.model_config import largest_head_size, read_config, refuse_packed_rows
from tests.kit.estimate_cpu import FAMILIES, SMALL, Case, cases, compare, save_small, worst_share
from tests.kit.specs import changed
from tests.kit.tiny_config import tiny_config
from tests.memory.common import CPU_TARGET, joined, setting_of, shape
from tests.memory.workloads import workload
from tests.small_model import CPU, spec_of

TOLERATED_SHARE = 1e-3
QUICK = ("Llama", "Gemma 3", "Mistral, window", "Phi 3")
"""Those that differ most in attention, norms and projections."""
STEPS = ((shape(2, 32, 40),),)
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, **LAYERS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the small models, each once."""
    root = tmp_path_factory.mktemp("families")

    def directory_of(family: str) -> Path:
        directory = root / family
        return directory if directory.exists() else save_small(family, directory)

    return directory_of


def check(case: Case, directory: Path) -> None:
    if case.family == "OPT" and parse(__version__) < parse(UNREAD_LAYERDROP):
        with pytest.raises(UserError, match=f"reads values .*; install transformers {UNREAD_LAYERDROP} "):
            compare(case, directory)
        return
    pairs = compare(case, directory)
    assert worst_share(pairs) < TOLERATED_SHARE, pairs


FAST_CASES = [
    *(Case(family=family, method="qlora") for family in QUICK),
    # Backward writes in place, where fake tensors would make new ones: 6.7 and 0.6 % too much, at these peaks.
    Case(family="OPT", method="lora", optimizer="sgd"),
    Case(family="GPT-NeoX", method="full"),
    # Backward is highest inside attention.
    Case(family="GPT-NeoX", method="int8_lora", compress_activations="int8"),
]
COMPRESSED = [
    *(Case(family=family, method="int8_lora", compress_activations="int8") for family in FAMILIES),
    *(
        Case(family=family, method="full", compress_activations="fp8", layout="joined")
        for family in FAMILIES
        if family not in ("OPT", "BLOOM", "Gemma 2")  # Which take no packed rows.
    ),
]


@pytest.mark.parametrize(
    "case", [*FAST_CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in [*cases(), *COMPRESSED])], ids=str
)
def test_every_family_and_configuration_is_predicted_as_it_is_counted(case, saved):
    """A family whose attention, norms, biases or embeddings are traced unlike they run."""
    check(case, saved(case.family))


OLD_SIZES: dict[str, Any] = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT2 = GPT2Config(**OLD_SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
JAPANESE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_multiple_size": 2,
}


@pytest.mark.parametrize("method", ["lora", "qlora", pytest.param("int8_lora", marks=pytest.mark.slow)])
def test_layers_with_transposed_weights_get_adapters(method, tmp_path):
    """GPT-2's `Conv1D`, of which the closed form adapts and packs nothing."""
    AutoModelForCausalLM.from_config(GPT2).save_pretrained(tmp_path)
    check_adapters(read_config(tmp_path), setting_of(method=method))
    check(Case(family="GPT-2", method=method), tmp_path)


@pytest.mark.parametrize("changes", [{}, {"lora_dora": True}])
def test_an_adapter_of_the_head_alone_is_counted(changes):
    """The head is neither quantised nor part of all-linear, but targets can name it."""
    setting = setting_of(method="lora", lora_targets=("lm_head",), **changes)
    check_adapters(LlamaConfig(**SMALL, tie_word_embeddings=False), setting)


def check_adapters(config: PretrainedConfig, setting: Setting) -> None:
    """The adapters in the closed form are those that the trace counts."""
    lines = state_lines(model_shapes(config), setting, cuda=False)
    traced = predict(TracedModel(config, setting, CPU_TARGET), STEPS).peak.by_category[ADAPTERS]
    assert traced == state_bytes(lines, granularity_bytes=1)[ADAPTERS] > 0


def test_a_model_without_checkpointing_is_refused():
    """GPT-NeoX-Japanese, whose refusal would be a traceback."""
    config = GPTNeoXJapaneseConfig(**JAPANESE, num_hidden_layers=2)
    with pytest.raises(UserError, match=r"^train\.grad_ckpt: gpt_neox_japanese .*; set it to false"):
        predict(TracedModel(config, setting_of(method="full", grad_ckpt=True), CPU_TARGET), STEPS)


def test_a_switch_that_a_model_cannot_have_is_left_out_of_the_sweep():
    """A run without recomputed layers was refused, because advice tried them."""
    config = GPTNeoXJapaneseConfig(**JAPANESE, num_hidden_layers=1)
    run = replace(workload(config=config, method="full"), steps=STEPS, device=cpu_device(2**34))
    points = sweep_switches(run, run.predict())
    assert len(points) > 1 and not any("train.grad_ckpt=true" in flags for flags, _ in points)


@pytest.mark.parametrize("family", ["falcon", "gpt_neo", "nemotron", "stablelm"])
def test_rows_that_would_see_each_other_are_refused_by_the_prediction(family):
    """A run that was predicted, and refused after its model was loaded."""
    config = tiny_config(family)
    with pytest.raises(UserError, match=rf"^bucket\.mode: packed needs .* {family} .*; set bucket\.mode=bucketed"):
        refuse_packed_rows(config, 16)
        predict(TracedModel(config, setting_of(method="full"), CPU_TARGET), ((joined((16, 16), 30),),))


def test_experts_that_are_called_one_by_one_are_refused():
    """DBRX loops over the experts that have tokens, so the step depends on the routing and cannot be traced."""
    config = DbrxConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, ffn_config={"ffn_hidden_size": 32})
    with pytest.raises(UserError, match=r"^model\.name: .*dbrx.*") as caught:
        predict(TracedModel(config, setting_of(), CPU_TARGET), STEPS)
    assert "\n" not in str(caught.value)


FAST_MIXTURES = [("Qwen3-MoE", "lora"), ("GPT-OSS", "full"), ("GPT-OSS", "int8_lora")]
MIXTURES = product(("Qwen3-MoE", "GPT-OSS"), ("full", "lora", "int8_lora"))


@pytest.mark.parametrize(
    ("family", "method"),
    [case if case in FAST_MIXTURES else pytest.param(*case, marks=pytest.mark.slow) for case in MIXTURES],
)
def test_a_mixture_is_predicted_as_it_is_counted(family, method, saved):
    """Packed experts and adapters of all experts, whose routing must not matter."""
    if method == "full":
        return check(Case(family=family, method=method), saved(family))
    case = Case(family=family, method=method, experts="all")
    check(case, saved(family))


@dataclass(frozen=True, kw_only=True)
class Changed(Case):
    """A case with other parameters of the model."""

    changes: Mapping[str, Any]

    @property
    def setting(self) -> Setting:
        """See Case."""
        setting = super().setting
        return replace(setting, train=changed(setting.train, **self.changes))


@pytest.mark.parametrize("method", ["qlora", pytest.param("lora", marks=pytest.mark.slow)])
def test_products_of_experts_that_are_saved_are_counted(method, saved):
    """Selective checkpointing that multiplies by the experts again, or a product that the trace does not save."""
    selective = {"grad_ckpt": True, "grad_ckpt_policy": "selective"}
    case = Changed(family="Qwen3-MoE", method=method, experts="all", changes=selective)
    directory = saved(case.family)
    check(case, directory)
    recomputed = Case(family=case.family, method=case.method, experts=case.experts, grad_ckpt=True)
    saved_bytes, recomputed_bytes = (compare(one, directory)["backward"][1] for one in (case, recomputed))
    assert saved_bytes > recomputed_bytes


@pytest.mark.slow
@pytest.mark.parametrize("router", ["trained", "frozen"])
def test_weights_of_two_types_are_predicted_as_they_are_counted(router, tmp_path):
    """Routers in fp32 among weights in bf16."""
    AutoModelForCausalLM.from_config(tiny_config("ernie4_5_moe")).save_pretrained(tmp_path)
    case = Changed(family="ernie4_5_moe", method="full", precision="bf16", changes={"router": router})
    check(case, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "full"},
        {"method": "full", "router": "trained"},
        {"method": "lora", "lora_experts": "all", "lora_expert_rank": 2},
        {"method": "qlora", "lora_experts": "all"},
        {"method": "qlora", "quant_double": False},
        {"method": "int8_lora"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Qwen3-MoE", "GPT-OSS", "DeepSeek-V3"])
def test_the_closed_form_of_a_mixture_equals_the_trace(family, changes):
    """State of experts, of their adapters and of frozen routers."""
    setting = setting_of(**changes)
    lines = state_lines(model_shapes(FAMILIES[family]), setting, cuda=False)
    traced = predict(TracedModel(FAMILIES[family], setting, CPU_TARGET), STEPS).by_phase["optimizer"].by_category
    for category, size in state_bytes(lines, granularity_bytes=1).items():
        if category != "gradients":
            assert traced[category] == size, category


GEMMA_4: dict[str, Any] = {
    **SMALL, "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 48,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    **SMALL, "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16,
    "use_mamba_kernels": False,
}  # fmt: skip
del MAMBA["num_hidden_layers"]


UNUSUAL: dict[str, tuple[PretrainedConfig, Case]] = {
    # No dropout in the decoder, so checkpointing saves no state of the random generator: 0.6 % too much.
    "dropout of a classifier": (
        GPTNeoXConfig(**SMALL, classifier_dropout=0.1),
        Case(family="GPT-NeoX", method="full", grad_ckpt=True),
    ),
    # Its config has no single head size: a traceback.
    "heads of two sizes": (AutoConfig.for_model("gemma4_text", **GEMMA_4), Case(family="Gemma 4", method="lora")),
}


@pytest.mark.parametrize(("config", "case"), UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_model_is_predicted_as_it_is_counted(config, case, tmp_path):
    """Models that were once refused or predicted wrong."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check(case, tmp_path)


def test_the_largest_head_size_of_two():
    """Attention chosen for the smaller heads of Gemma 4."""
    assert largest_head_size(AutoConfig.for_model("gemma4_text", **GEMMA_4)) == 32


@pytest.mark.parametrize(
    ("family", "values", "method", "message"),
    [
        ("bert", {"is_decoder": True}, "full", r"^model\.name: bert has cls\.predictions\.transform\S* outside of"),
        ("modernbert-decoder", {"bos_token_id": 1}, "full", r"^model\.name: \S* has no decoder apart from its head"),
        ("ministral", {"head_dim": None}, "full", r"^model\.name: ministral cannot be built \(TypeError: .*; choose"),
    ],
    ids=["layers before the head", "decoder is the head", "no size"],
)  # fmt: skip
def test_refusals_of_other_libraries_are_one_line(family, values, method, message, capfd):
    """A traceback of transformers, of PEFT or in torch's log; or a loss that passes over the layers before the head."""
    config = AutoConfig.for_model(family, **{**SMALL, **values})
    with pytest.raises(UserError, match=message) as caught:
        predict(TracedModel(config, setting_of(method=method), CPU_TARGET), STEPS)
    assert "\n" not in str(caught.value) and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(("family", "layer"), [("falcon_h1", "out_proj"), ("jamba", "dt_proj")])
def test_layers_whose_weight_is_read_directly_get_no_adapters(family, layer):
    """Adapters without effect; or peft's refusal of all-linear."""
    config = tiny_config(family)
    model = uninitialized_model(config, spec_of(), CPU)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if ".lora_" in name}
    assert layer not in adapted and "in_proj" in adapted
    with pytest.raises(UserError, match=rf"^train\.lora\.targets: {family} reads the weight of {layer} without"):
        uninitialized_model(config, spec_of(lora_targets=("in_proj", layer)), CPU)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model_type": "thing", "auto_map": {"AutoConfig": "configuration_thing.ThingConfig"}},
            r"needs code of its own \(auto_map in config.json\), which is never executed",
        ),
        ({}, "cannot be read"),
        (
            {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2},
            "missing intermediate_size, num_attention_heads, vocab_size;",
        ),
        ({"model_type": "gpt2"}, "missing hidden_size, num_hidden_layers, num_attention_heads, vocab_size"),
        ({"model_type": "opt", "hidden_size": 64, **LAYERS}, "missing ffn_dim"),
        ({**LLAMA, "hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({**LLAMA, "num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({**LLAMA, "num_attention_heads": 0}, "cannot be read"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers must be at least 1; got 0"),
        ({**LLAMA, "vocab_size": -5}, "vocab_size must be at least 1; got -5"),
        ({**LLAMA, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads; got 4 and 3"),
        (
            {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256},
            "rwkv computes one token after the other, except by a kernel from the hub",
        ),
        (
            {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 256},
            "mpt has names of its own for the limit of rows",
        ),
        (
            {"model_type": "bert", "hidden_size": 64, **LAYERS},
            "must be a decoder; bert attends to later tokens as well",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "awq"}},
            "has weights quantised with awq, .*; give the 16-bit",
        ),
        ({**LLAMA, "hidden_act": "nosuch"}, "hidden_act must be an activation function of transformers; got 'nosuch'"),
        ({**LLAMA, "rope_parameters": {"rope_theta": None}}, "rope_theta must be a number; got None"),
        ({"model_type": "t5"}, "must be a causal language model; got model_type 't5'"),
    ],
)
def test_a_config_of_no_model_is_refused(content, message, tmp_path):
    """Remote code executed, a family's default sizes used silently, or a traceback."""
    write_json(tmp_path / "config.json", content)
    with pytest.raises(UserError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model.name: ")
