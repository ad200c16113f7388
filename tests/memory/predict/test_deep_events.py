"""Allocations and frees of a deep model from shallow ones: equal to those of a trace of all its layers."""

from typing import Any

import numpy as np
import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from lean_finetune.memory.predict.deep_events import NONE, StepEvents, deep_events, events_of, step_events
from lean_finetune.memory.predict.depth_extrapolation import NotRepeated
from lean_finetune.memory.predict.layer_repetition import Repetition, for_fewer_layers, with_layers
from lean_finetune.memory.predict.peak import predict_with_events
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from tests.memory.common import SMALL, gpu_target, joined, setting_of, shape

PADDED: TracedSteps = ((shape(2, 128, 100), shape(4, 64, 200)),)
JOINED: TracedSteps = ((joined((100, 60, 40), 150), joined((128, 72), 190)),)
H100 = gpu_target("H100")
SLOW = pytest.mark.slow


def llama() -> PretrainedConfig:
    return LlamaConfig(num_hidden_layers=14, **SMALL)


def gemma() -> PretrainedConfig:
    """Every other layer has a window, shorter than a row."""
    kinds = ["sliding_attention", "full_attention"] * 10
    return Gemma3TextConfig(num_hidden_layers=20, layer_types=kinds, sliding_window=64, head_dim=16, **SMALL)


CASES: dict[str, Any] = {
    "qlora, recomputed, clipped": (llama, PADDED, {"method": "qlora", "precision": "bf16", "grad_ckpt": True}),
    "full, packed, chunked loss": (llama, JOINED, {"method": "full", "precision": "bf16", "grad_ckpt": True}),
    "lora, two kinds of layers": (gemma, PADDED, {"method": "lora", "precision": "bf16"}),
    "lora, every other layer recomputed": (
        lambda: LlamaConfig(num_hidden_layers=20, **SMALL),
        PADDED,
        {"method": "lora", "grad_ckpt": True, "grad_ckpt_policy": "every_n"},
    ),
    "full, 8-bit, all logits": (llama, PADDED, {"method": "full", "optimizer": "adamw_8bit", "loss_chunk": None}),
    "full, updates in backward": (
        llama,
        ((shape(2, 128, 100),), (shape(4, 64, 200),)),
        {"method": "full", "optimizer_in_backward": True, "max_grad_norm": None},
    ),
    "dora": (llama, PADDED, {"method": "qlora", "precision": "bf16", "lora_dora": True}),
    "offloaded activations": (llama, PADDED, {"method": "lora", "grad_ckpt": True, "offload_activations": "cpu"}),
    "zero3": (llama, PADDED, {"method": "lora", "precision": "bf16", "sharding": "zero3", "gpus": 2}),
}
FAST = ("qlora, recomputed, clipped", "full, packed, chunked loss")


def model_of(case: str) -> tuple[TracedModel, TracedSteps]:
    config, steps, changes = CASES[case]
    return TracedModel(config(), setting_of(**changes), H100), steps


def as_lists(events: StepEvents) -> list[Any]:
    return [events.size_E.tolist(), events.target_E.tolist(), events.phases, events.micro_batches]


@pytest.mark.parametrize("case", [case if case in FAST else pytest.param(case, marks=SLOW) for case in CASES])
def test_the_events_are_those_of_a_trace_of_all_layers(case: str):
    """Reserved memory of other requests than the run makes: an event too many, of another size, or out of order."""
    model, steps = model_of(case)
    found, layers_traced = step_events(model, steps)
    assert layers_traced.startswith("models of "), layers_traced
    fewer = model.with_setting(for_fewer_layers(model.setting, model.config))
    assert as_lists(found) == as_lists(events_of(trace_steps(MemoryTrace, fewer, steps)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [3, 20])
@pytest.mark.parametrize("changes", [{}, {"offload": "parameters"}])
def test_the_events_where_the_first_layers_alone_are_recomputed(recomputed: int, changes: dict[str, Any]):
    """The larger part of the layers has fewer of them in traces, the other one has all."""
    first_n = {"grad_ckpt": True, "grad_ckpt_policy": "first_n", "grad_ckpt_layers": recomputed}
    setting = setting_of(method="qlora", precision="bf16", **first_n, **changes)
    model = TracedModel(LlamaConfig(num_hidden_layers=22, **SMALL), setting, H100)
    prediction, found = predict_with_events(model, PADDED)
    complete = trace_steps(MemoryTrace, model, PADDED)[0]
    assert prediction.layers_traced.startswith("models of ") and prediction.by_phase == complete.peaks()
    assert found is not None and as_lists(found) == as_lists(events_of(complete))


@pytest.fixture(scope="module")
def shallow() -> list[MemoryTrace]:
    model, steps = model_of("full, packed, chunked loss")
    return [trace_steps(MemoryTrace, model.with_config(with_layers(model.config, n)), steps)[0] for n in (3, 4, 5)]


def test_the_deepest_trace_follows_from_the_other_two(shallow: list[MemoryTrace]):
    """A line through the depths that the deepest one does not lie on."""
    found = deep_events(shallow, Repetition(layers=5, period=1))
    assert as_lists(found) == as_lists(events_of(shallow[-1]))


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_event_of_another_size_at_one_depth_is_noticed(shallow: list[MemoryTrace], depth: int, place: float):
    """A deep model made from shallow ones that are not alike."""
    sizes = list(shallow[depth].exact_bytes)
    sizes[int(place * len(sizes))] += 512
    changed = list(shallow)
    changed[depth] = _with(shallow[depth], exact_bytes=sizes)
    with pytest.raises(NotRepeated):
        deep_events(changed, Repetition(layers=14, period=1))


def test_frees_that_follow_each_other_may_have_any_order(shallow: list[MemoryTrace]):
    """Autocast forgets its copies in the order of a hash table, which differs from depth to depth."""
    trace = shallow[1]
    events = list(trace.events)
    starts = [k for k in range(1, len(events)) if events[k - 1][1] < 0 and events[k][1] < 0]
    cuts = events_of(trace).cuts
    place = next(k for k in starts if k not in cuts)
    events[place - 1], events[place] = events[place], events[place - 1]
    assert as_lists(events_of(_with(trace, _events=events))) == as_lists(events_of(trace))


def test_every_allocation_is_freed_at_most_once(shallow: list[MemoryTrace]):
    """The same block freed for two layers."""
    found = deep_events(shallow, Repetition(layers=80, period=1))
    frees = found.target_E[found.target_E != NONE]
    assert len(np.unique(frees)) == len(frees) and len(found) > 10 * len(shallow[0].events)
    assert found.phases[-1][1] <= len(found) and len(found.micro_batches) == 2


def test_layers_that_are_not_alike_are_all_traced():
    """Reserved memory of a model whose layers differ, from models that lack some of them."""
    model, steps = model_of("qlora, recomputed, clipped")
    shallow = model.with_config(with_layers(model.config, 4))
    found, layers_traced = step_events(shallow, steps)
    assert layers_traced == "all 4 layers: they are few"
    assert as_lists(found) == as_lists(events_of(trace_steps(MemoryTrace, shallow, steps)[0]))


def _with(trace: MemoryTrace, **values: Any) -> Any:
    """The same trace with other records."""
    copy = MemoryTrace.__new__(type(trace))
    vars(copy).update({**vars(trace), **values})
    return copy
