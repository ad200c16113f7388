"""Deep models from shallow ones: equal to a trace of all layers, and never used where layers are not alike."""

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from lean_finetune.memory.predict.layer_repetition import Repetition, find_repetition, with_layers
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, only, trace_steps
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import EXAMPLE_CONFIGS
from tests.memory.common import CPU_TARGET, SMALL, gpu_target, joined, setting_of, shape
from tests.small_model import spec_of

PADDED: TracedSteps = ((shape(2, 128, 100), shape(4, 64, 200)),)
JOINED: TracedSteps = ((joined((100, 60, 40), 150), joined((128, 72), 190)),)
WINDOWED: TracedSteps = ((shape(2, 128, 100),),)
H100 = gpu_target("H100")


def llama(layers: int = 14, **changes: Any) -> PretrainedConfig:
    return LlamaConfig(num_hidden_layers=layers, **{**SMALL, **changes})


def gemma(layers: int = 20) -> PretrainedConfig:
    """Every other layer has a window, shorter than a row."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return Gemma3TextConfig(num_hidden_layers=layers, layer_types=kinds, sliding_window=64, head_dim=16, **SMALL)


def qwen() -> PretrainedConfig:
    """The norms of clipping have a buffer that is larger than the list of norms in deeper models only."""
    return read_config(EXAMPLE_CONFIGS / "qwen2.5-0.5b")


FIRST_N: dict[str, Any] = {
    "method": "lora",
    "precision": "bf16",
    "grad_ckpt": True,
    "grad_ckpt_policy": "first_n",
}
CASES: dict[str, Any] = {
    "qlora of Qwen2.5-0.5B, rank 16": (
        qwen,
        WINDOWED,
        H100,
        {"method": "qlora", "precision": "bf16", "grad_ckpt": True, "lora_rank": 16},
    ),
    "qlora, recomputed, padded": (llama, PADDED, H100, {"method": "qlora", "precision": "bf16", "grad_ckpt": True}),
    "lora, every other layer recomputed": (
        lambda: llama(20),
        PADDED,
        H100,
        {"method": "lora", "grad_ckpt": True, "grad_ckpt_policy": "every_n"},
    ),
    "qlora, products kept": (
        llama,
        PADDED,
        H100,
        {"precision": "bf16", "method": "qlora", "grad_ckpt": True, "grad_ckpt_policy": "selective"},
    ),
    "lora, packed rows": (llama, JOINED, H100, {"method": "lora", "precision": "bf16"}),
    "full, 8-bit, all logits": (llama, PADDED, H100, {"method": "full", "optimizer": "adamw_8bit", "loss_chunk": None}),
    "full, CPU": (llama, WINDOWED, CPU_TARGET, {"method": "full", "grad_ckpt": True}),
    "two kinds of layers": (gemma, WINDOWED, H100, {"method": "lora", "precision": "bf16"}),
    "the first layers recomputed": (lambda: llama(32), PADDED, H100, {**FIRST_N, "grad_ckpt_layers": 20}),
    "one recomputed": (lambda: llama(26), WINDOWED, H100, {**FIRST_N, "method": "qlora", "grad_ckpt_layers": 1}),
    "one not recomputed": (lambda: llama(26), JOINED, H100, {**FIRST_N, "grad_ckpt_layers": 25}),
    "the first of two kinds": (lambda: gemma(70), WINDOWED, H100, {**FIRST_N, "grad_ckpt_layers": 31}),
    "the first, all trained": (
        lambda: llama(44),
        PADDED,
        H100,
        {**FIRST_N, "method": "full", "optimizer": "adamw_8bit", "grad_ckpt_layers": 12},
    ),
    "the first, CPU": (lambda: llama(34), WINDOWED, CPU_TARGET, {**FIRST_N, "grad_ckpt_layers": 17}),
}


FAST = (
    "qlora, recomputed, padded",
    "two kinds of layers",
    "qlora of Qwen2.5-0.5B, rank 16",
    "the first layers recomputed",
    "one not recomputed",
)


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_peaks_from_shallow_models_equal_those_of_all_layers_to_the_byte(case):
    """A peak that moves to another instant with depth, or a list of all layers whose size is rounded."""
    make, steps, target, changes = CASES[case]
    config, setting = make(), setting_of(**changes)
    found = predict(TracedModel(config, setting, target), steps)
    complete, position = trace_steps(MemoryTrace, TracedModel(config, setting, target), steps)
    assert found.layers_traced.startswith("models of ")
    assert found.by_phase == complete.peaks() and found.steps_of_peak == only(steps, *position)


def test_layers_that_differ_are_all_traced():
    """One layer with a sliding window treated like the others."""
    mixed = Qwen2Config(num_hidden_layers=14, use_sliding_window=True, sliding_window=64, max_window_layers=7, **SMALL)
    repetition, reason = find_repetition(mixed, spec_of())
    assert repetition is None and reason == "all 14 layers: they are not alike, or repeat too seldom"


def test_adapters_named_by_path_and_shallow_models_are_traced_whole():
    """Adapters on some layers spread over all of them."""
    some = find_repetition(llama(), spec_of(method="lora", lora_targets=("layers.3.self_attn.q_proj",)))
    assert some == (None, "all 14 layers: train.lora.targets names layers by path")
    assert find_repetition(llama(12), spec_of()) == (None, "all 12 layers: they are few")
    assert find_repetition(llama(13), spec_of())[0] == Repetition(layers=13, period=1)


def test_depths_end_as_the_model_does():
    """A last layer of another kind than in the traced models."""
    assert find_repetition(gemma(20), spec_of())[0] == Repetition(layers=20, period=2)
    assert Repetition(layers=20, period=2).depths == (4, 6, 8)
    assert Repetition(layers=21, period=2).depths == (5, 7, 9)
    assert Repetition(layers=40, period=1, recomputed=25).traced == ((3, 3), (4, 3), (3, 4), (5, 5))
    assert Repetition(layers=40, period=1, recomputed=2).traced == ((2, 3), (2, 4), (2, 5))
    assert Repetition(layers=60, period=2, recomputed=31).traced == ((5, 5), (7, 5), (5, 7), (9, 9))
    assert not Repetition(layers=10, period=1, recomputed=5).pays
    kinds = gemma(20).layer_types
    assert with_layers(gemma(20), 6).layer_types == kinds[:6]
    assert len(gemma(20).layer_types) == 20


@pytest.mark.slow
def test_traces_that_contradict_each_other_are_replaced_by_one_of_all_layers(monkeypatch):
    """A line drawn through peaks that do not lie on one."""
    real = with_layers

    def other(config: PretrainedConfig, count: int) -> PretrainedConfig:
        shallow = real(config, count)
        shallow.intermediate_size += 32 * (count == 4)
        return shallow

    monkeypatch.setattr("lean_finetune.memory.predict.layer_repetition.with_layers", other)
    model = TracedModel(llama(13), setting_of(), CPU_TARGET)
    found = predict(model, WINDOWED)
    assert found.layers_traced.startswith("all 13 layers: tensors of ")
    assert found.by_phase == trace_steps(MemoryTrace, model, WINDOWED)[0].peaks()
