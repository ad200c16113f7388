"""Other micro-batches of a model that was traced before: one trace of a few layers gives what a trace of all does."""

from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
)

from lean_finetune.memory.predict import known_steps, peak
from lean_finetune.memory.predict.layer_repetition import with_some_layers
from lean_finetune.memory.predict.peak import predict, predict_with_events
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.gradients_alone import first_before
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from tests.memory.common import CPU_TARGET, SMALL, gpu_target, joined, setting_of, shape

H100 = gpu_target("H100")
FIRST: TracedSteps = ((shape(2, 128, 100),),)
OTHERS: tuple[TracedSteps, ...] = (((shape(1, 576, 500),),), ((shape(5, 64, 320),),))
"""Longer rows and more of them than in the first step."""
QLORA = {"method": "qlora", "precision": "bf16", "grad_ckpt": True}


def llama(layers: int = 14) -> PretrainedConfig:
    return LlamaConfig(num_hidden_layers=layers, **SMALL)


def gemma(layers: int) -> PretrainedConfig:
    """Five layers with a window to one without; the rotary embedding of the latter lives until its lowest layer."""
    return Gemma3TextConfig(num_hidden_layers=layers, sliding_window=32, head_dim=16, **SMALL)


def gpt_oss() -> PretrainedConfig:
    return GptOssConfig(
        num_hidden_layers=20, num_local_experts=4, num_experts_per_tok=2, sliding_window=32, head_dim=16, **SMALL
    )


def deepseek() -> PretrainedConfig:
    """The first layer has no experts."""
    experts: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    latent: dict[str, Any] = {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    return DeepseekV2Config(
        num_hidden_layers=14,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
        v_head_dim=16,
        **experts,
        **latent,
        **{**SMALL, "num_key_value_heads": 4},
    )


def nemotron() -> PretrainedConfig:
    """State spaces, attention and projections without a period."""
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    return NemotronHConfig(
        layers_block_type=[kinds[kind] for kind in "M-M-M-M*-M-M-M*-M-M-M-"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        head_dim=16,
        **SMALL,
    )


CASES: dict[str, Any] = {
    "depths, qlora, recomputed": (llama, H100, QLORA),
    "depths, all trained": (llama, H100, {"method": "full", "optimizer": "adamw_8bit"}),
    "depths, updates in backward": (llama, H100, {"method": "full", "optimizer_in_backward": True}),
    "depths, CPU": (llama, CPU_TARGET, {"method": "lora"}),
    "windows, 6 k + 2": (lambda: gemma(26), H100, QLORA),
    "windows, 6 k + 5, kept": (lambda: gemma(17), H100, {"method": "lora", "precision": "bf16"}),
    "windows, all trained": (lambda: gemma(24), H100, {"method": "full", "precision": "bf16", "grad_ckpt": True}),
    "windows and experts": (gpt_oss, H100, QLORA),
    "experts but in the first layer": (deepseek, H100, QLORA),
    "state spaces": (nemotron, H100, QLORA),
    "state spaces, kept": (nemotron, H100, {"method": "lora", "precision": "bf16"}),
}
FAST = ("depths, qlora, recomputed", "windows, 6 k + 5, kept", "state spaces")


def layers_traced(monkeypatch, module: Any = known_steps) -> list[int]:
    """The numbers of layers that a module traces, as they are traced: of known models, if not said otherwise."""
    found: list[int] = []

    def counted(kind: Any, model: TracedModel, steps: TracedSteps, **options: Any) -> Any:
        found.append(model.config.get_text_config().num_hidden_layers)
        return trace_steps(kind, model, steps, **options)

    monkeypatch.setattr(module, "trace_steps", counted)
    return found


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_peaks_of_other_micro_batches_equal_those_of_all_layers_to_the_byte(case, monkeypatch):
    """A peak at another instant than in the first micro-batch, or in another kind of layer."""
    make, target, changes = CASES[case]
    config, setting = make(), setting_of(**changes)
    model, traced = TracedModel(config, setting, target), layers_traced(monkeypatch)
    predict(model, FIRST)
    for steps in OTHERS:
        found = predict(model, steps)
        complete, _ = trace_steps(MemoryTrace, model, steps)
        assert found.by_phase == complete.peaks() and found.steps_of_peak == steps
    assert traced and sum(traced) < config.num_hidden_layers


def test_a_step_that_adds_to_gradients_follows_from_one_with_two_full_micro_batches(monkeypatch):
    """The first answer of `fit` has two full micro-batches, its searches a small one and a full one."""
    model, traced = TracedModel(llama(), setting_of(**QLORA), H100), layers_traced(monkeypatch)
    predict_with_events(model, ((shape(2, 128, 100),) * 2,))
    full = shape(3, 256, 700)
    steps = ((first_before(full), full),)
    assert predict(model, steps).by_phase == trace_steps(MemoryTrace, model, steps)[0].peaks()
    assert traced == [3]


@pytest.mark.slow
def test_another_device_follows_too(monkeypatch):
    """The smallest GPU for a run is searched among those without FlashAttention, too."""
    setting = setting_of(method="lora", precision="fp16")
    model, traced = TracedModel(gemma(26), setting, H100), layers_traced(monkeypatch)
    predict(model, FIRST)
    other = TracedModel(gemma(26), setting, gpu_target("T4"))
    assert predict(other, FIRST).by_phase == trace_steps(MemoryTrace, other, FIRST)[0].peaks()
    assert len(traced) == 2


@pytest.mark.slow
def test_a_micro_batch_with_other_operations_follows_too(monkeypatch):
    """Rows of one shape take a mask, packed ones take none."""
    model, traced = TracedModel(gemma(26), setting_of(**QLORA), CPU_TARGET), layers_traced(monkeypatch)
    predict(model, FIRST)
    packed = ((joined((100, 60, 40), 150),),)
    assert predict(model, packed).by_phase == trace_steps(MemoryTrace, model, packed)[0].peaks()
    assert len(traced) == 2


def test_a_model_is_not_replaced_by_layers_that_are_not_alike(monkeypatch):
    """The layers that stand for the others must be layers of the model."""

    def other(config: PretrainedConfig, numbers: Any) -> PretrainedConfig:
        shallow = with_some_layers(config, numbers)
        shallow.intermediate_size += 32
        return shallow

    monkeypatch.setattr(known_steps, "with_some_layers", other)
    model = TracedModel(nemotron(), setting_of(**QLORA), H100)
    predict(model, FIRST)
    assert predict(model, OTHERS[0]).by_phase == trace_steps(MemoryTrace, model, OTHERS[0])[0].peaks()


def test_what_a_search_found_is_not_traced_again(monkeypatch):
    """`plan` predicts a run among others, and then asks what the one that it chose reserves."""
    traced = layers_traced(monkeypatch, peak)
    models = [TracedModel(llama(2), setting_of(**QLORA), gpu_target(name)) for name in ("H100", "A100-80GB")]
    found = [predict(model, FIRST) for model in models]
    again, events = predict_with_events(TracedModel(llama(2), setting_of(**QLORA), gpu_target("H100")), FIRST)
    assert traced == [2, 2] and again == found[0] != found[1]
    assert events is not None and len(events) > 0
