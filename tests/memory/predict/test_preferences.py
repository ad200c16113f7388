"""The predicted memory of objectives of preferences against PyTorch's own count of every allocation."""

from dataclasses import replace
from typing import Any

import pytest

from lean_finetune.islands.objectives.registry import OBJECTIVES
from lean_finetune.memory.advice.full_rows import largest_steps
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from tests.kit.estimate_cpu import LAYOUTS
from tests.kit.specs import joined, padded
from tests.memory.common import gpu_target, llama, setting_of
from tests.memory.predict.test_measured import check

NAMES = [name for name, objective in OBJECTIVES.items() if objective.compares]
FAST: list[tuple[str, str, dict[str, Any]]] = [
    ("dpo", "padded", {"method": "lora", "grad_ckpt": True}),
    ("kto", "padded", {"method": "full", "loss_chunk": None}),
    ("kto", "joined", {"method": "qlora", "grad_ckpt": True}),
    ("reward", "padded", {"method": "lora", "precision": "bf16"}),
]
SLOW = [
    (name, layout, {"method": method, "grad_ckpt": grad_ckpt})
    for name in NAMES
    for method in ("full", "lora", "qlora", "int8_lora")
    for grad_ckpt, layout in ((False, "padded"), (True, "joined"))
]


def of_kind(name: str, steps: TracedSteps) -> TracedSteps:
    """Micro-batches of an objective's rows."""
    objective = OBJECTIVES[name]
    return tuple(tuple(replace(shape, kind=objective.kind) for shape in step) for step in steps)


@pytest.mark.parametrize(
    ("name", "layout", "changes"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_the_prediction_equals_what_the_allocator_counted(small_llama, name, layout, changes):
    """A step that is traced unlike it is trained: with references, or answers that pass without gradients."""
    check(small_llama, setting_of(objective=name, **changes), of_kind(name, LAYOUTS[layout]))


def deep_of(name: str, *, flat: bool) -> tuple[TracedModel, TracedSteps]:
    """A model of many layers, and a step of a small micro-batch and a large one."""
    objective = OBJECTIVES[name]
    shape = joined((96, 96, 40), 120) if flat else padded(2, 96, 120)
    setting = setting_of(objective=name, method="lora", grad_ckpt=True)
    steps = largest_steps(replace(shape, kind=objective.kind), several=True)
    return TracedModel(llama(num_hidden_layers=24), setting, gpu_target("H100")), steps


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_deep_model_is_predicted_from_few_layers(name):
    """`fit` of kto ended in an IndexError: mismatched answers were micro-batches that no shape stands for."""
    model, steps = deep_of(name, flat=False)
    found = predict(model, steps)
    assert not found.layers_traced.startswith("all") and found.steps_of_peak == steps


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("flat", [False, True])
def test_few_layers_give_the_peaks_of_all(name, flat):
    model, steps = deep_of(name, flat=flat)
    complete, _ = trace_steps(MemoryTrace, model, steps)
    found = {phase: peak.bytes for phase, peak in predict(model, steps).by_phase.items()}
    assert found == {phase: peak.bytes for phase, peak in complete.peaks().items()}
