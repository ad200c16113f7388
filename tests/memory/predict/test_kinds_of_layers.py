"""Models whose layers are of several kinds, from a few layers of each: equal to a trace of all, or not predicted so."""

from typing import Any

import pytest
from transformers import Gemma3TextConfig, PretrainedConfig, Qwen3_5TextConfig

from lean_finetune.memory.predict import kinds_of_layers, peak
from lean_finetune.memory.predict.deep_events import StepEvents, events_of
from lean_finetune.memory.predict.depth_extrapolation import NotRepeated, WindowTrace
from lean_finetune.memory.predict.kinds_of_layers import Kinds, deep_steps, find_kinds
from lean_finetune.memory.predict.layer_repetition import find_repetition, with_some_layers
from lean_finetune.memory.predict.peak import predict, predict_with_events
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, only, trace_steps
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from tests.memory.common import CPU_TARGET, SMALL, gpu_target, joined, setting_of, shape

FEW: TracedSteps = ((shape(1, 128, 100),),)
PADDED: TracedSteps = ((shape(2, 128, 100), shape(4, 64, 200)),)
JOINED: TracedSteps = ((joined((100, 60, 40), 150), joined((128, 72), 190)),)
TWO_STEPS: TracedSteps = ((shape(2, 128, 100),), (shape(4, 64, 200),))
H100, T4 = gpu_target("H100"), gpu_target("T4")
QLORA: dict[str, Any] = {"method": "qlora", "precision": "bf16", "grad_ckpt": True}
LORA: dict[str, Any] = {"method": "lora", "precision": "bf16"}
FULL: dict[str, Any] = {"method": "full", "precision": "bf16", "optimizer": "adamw_8bit"}


def gemma(layers: int) -> PretrainedConfig:
    """Five layers with a window to one without; the rotary embedding of the latter lives until its lowest layer."""
    return Gemma3TextConfig(num_hidden_layers=layers, sliding_window=32, head_dim=16, **SMALL)


CASES: dict[str, Any] = {
    "6 k, qlora, recomputed": (30, FEW, H100, QLORA),
    "6 k + 1, lora, packed": (31, JOINED, H100, LORA),
    "6 k + 2, qlora, recomputed, two micro-batches": (32, PADDED, H100, QLORA),
    "6 k + 3, all trained": (33, PADDED, H100, {**FULL, "grad_ckpt": True}),
    "6 k + 4, all trained, kept": (34, PADDED, H100, FULL),
    "6 k + 5, two steps": (35, TWO_STEPS, H100, {**LORA, "grad_ckpt": True}),
    "updates in backward": (
        32,
        TWO_STEPS,
        H100,
        {"method": "full", "optimizer_in_backward": True, "max_grad_norm": None, "grad_ckpt": True},
    ),
    "products kept": (38, PADDED, H100, {**QLORA, "grad_ckpt_policy": "selective"}),
    "without FlashAttention": (32, PADDED, T4, {"method": "qlora", "precision": "fp16", "grad_ckpt": True}),
    "CPU": (32, PADDED, CPU_TARGET, {"method": "lora", "grad_ckpt": True}),
    "zero3": (32, PADDED, H100, {**LORA, "sharding": "zero3", "gpus": 2}),
    "all logits, DoRA": (32, PADDED, H100, {**QLORA, "loss_chunk": None, "lora_dora": True}),
}
FAST = ("6 k, qlora, recomputed",)


def as_lists(events: StepEvents) -> list[Any]:
    return [
        *(values.tolist() for values in (events.size_E, events.target_E, events.stream_E)),
        *(events.phases, events.micro_batches, events.workspaces),
    ]


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_peaks_and_events_are_those_of_all_layers(case: str):
    """A rotary embedding that is freed at another layer, or a layer that works like one of another kind."""
    layers, steps, target, changes = CASES[case]
    model = TracedModel(gemma(layers), setting_of(**changes), target)
    found, events = predict_with_events(model, steps)
    complete, position = trace_steps(MemoryTrace, model, steps)
    assert found.layers_traced.endswith("are of several kinds")
    assert found.by_phase == complete.peaks() and found.steps_of_peak == only(steps, *position)
    assert events is not None and as_lists(events) == as_lists(events_of(complete))


@pytest.mark.slow
def test_other_micro_batches_follow_from_the_first_layers_traced(monkeypatch):
    """A search that traces more than one model of a few layers for each question."""
    traced: list[int] = []

    def counted(kind: Any, model: TracedModel, steps: TracedSteps, **options: Any) -> Any:
        traced.append(model.config.get_text_config().num_hidden_layers)
        return trace_steps(kind, model, steps, **options)

    model = TracedModel(gemma(32), setting_of(**QLORA), H100)
    monkeypatch.setattr(kinds_of_layers, "trace_steps", counted)
    for steps in (FEW, ((shape(1, 576, 500),),), ((shape(5, 64, 300),),)):
        assert predict(model, steps).by_phase == trace_steps(MemoryTrace, model, steps)[0].peaks()
    assert traced == [6, 7, 9]


def kinds_of(config: PretrainedConfig, **changes: Any) -> Kinds | None:
    model = TracedModel(config, setting_of(**changes), H100)
    return find_kinds(model, find_repetition(config, model.setting.train)[0])


def test_each_kind_is_traced_at_its_lowest_and_highest_layer_and_between():
    found = kinds_of(gemma(62), **QLORA)
    assert found is not None and found.traced[0] == (0, 1, 5, 11, 59, 61)
    assert found.traced[1:] == ((0, 1, 2, 5, 11, 59, 61), (0, 1, 2, 5, 11, 12, 17, 59, 61))
    assert [found.positions[n] for n in (0, 4, 5, 6, 53, 59, 60, 61)] == [0, 1, 2, 1, 3, 4, 1, 5]


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (Gemma3TextConfig(num_hidden_layers=40, layer_types=["sliding_attention", "full_attention"] * 20, **SMALL), {}),
        (gemma(28), {}),  # They are few.
        (gemma(40), {**QLORA, "grad_ckpt_policy": "first_n", "grad_ckpt_layers": 20}),
        (gemma(40), {**QLORA, "grad_ckpt_policy": "every_n"}),
        (gemma(40), {**LORA, "lora_targets": ("layers.3.self_attn.q_proj",)}),
        (gemma(40), {**LORA, "grad_ckpt": True, "offload_activations": "cpu"}),
        (Qwen3_5TextConfig(num_hidden_layers=40, **SMALL), {}),  # Their parameters differ.
    ],
)
def test_other_ways_are_taken_where_layers_of_each_kind_do_not_do(config: PretrainedConfig, changes: dict[str, Any]):
    assert kinds_of(config, **changes) is None


@pytest.fixture(scope="module")
def shown() -> tuple[Kinds, list[WindowTrace]]:
    model = TracedModel(gemma(32), setting_of(**QLORA), H100)
    kinds = find_kinds(model, None)
    assert kinds is not None
    models = [model.with_config(with_some_layers(model.config, numbers)) for numbers in kinds.traced]
    return kinds, [trace_steps(WindowTrace, one, FEW)[0] for one in models]


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_event_of_another_size_in_one_trace_is_noticed(
    shown: tuple[Kinds, list[WindowTrace]], depth: int, place: float
):
    """Layers that stand for others, though they are not alike."""
    kinds, traces = shown
    sizes = list(traces[depth].exact_bytes)
    sizes[int(place * len(sizes))] += 512
    changed: list[Any] = list(traces)
    changed[depth] = WindowTrace.__new__(WindowTrace)
    vars(changed[depth]).update({**vars(traces[depth]), "exact_bytes": sizes})
    deep_steps(traces, kinds, 512)
    with pytest.raises(NotRepeated):
        deep_steps(changed, kinds, 512)


@pytest.mark.slow
def test_a_model_whose_layers_are_not_as_shown_is_traced_whole(monkeypatch):
    """A prediction from layers of another model."""

    def other(config: PretrainedConfig, numbers: Any) -> PretrainedConfig:
        shallow = with_some_layers(config, numbers)
        shallow.intermediate_size += 32 * (len(numbers) == 9)
        return shallow

    model = TracedModel(gemma(32), setting_of(method="lora"), CPU_TARGET)
    kinds = find_kinds(model, None)
    monkeypatch.setattr(kinds_of_layers, "with_some_layers", other)
    monkeypatch.setattr(peak, "find_kinds", lambda model, repetition: kinds)
    found = predict(model, PADDED)
    assert found.layers_traced.startswith("all 32 layers: ")
    assert found.by_phase == trace_steps(MemoryTrace, model, PADDED)[0].peaks()
