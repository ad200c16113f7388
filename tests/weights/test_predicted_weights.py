"""The predicted memory of rows with weights against PyTorch's own count of every allocation."""

from dataclasses import replace
from typing import Any

import pytest

from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.model.model_config import read_config
from lean_finetune.weights.attachment import WeightShape
from tests.kit.estimate_cpu import LAYOUTS, count
from tests.memory.common import CPU_TARGET, setting_of
from tests.step.common import slow

CASES: list[Any] = [
    ({"method": "lora"}, "padded"),
    ({"method": "full", "loss_chunk": None}, "joined"),
    slow({"method": "full"}, "joined"),
    slow({"method": "full"}, "padded"),
    slow({"method": "lora", "loss_chunk": None}, "padded"),
]


def with_weights(steps: TracedSteps) -> TracedSteps:
    return tuple(tuple(replace(shape, attached=(WeightShape(),)) for shape in step) for step in steps)


@pytest.mark.parametrize(("changes", "layout"), CASES, ids=str)
def test_the_prediction_equals_what_the_allocator_counted(small_llama, changes, layout):
    """A trained head computes its logits again for weights, and no chunks keep the loss of every token."""
    setting, steps = setting_of(**changes), with_weights(LAYOUTS[layout])
    model = TracedModel(read_config(small_llama), setting, CPU_TARGET)
    predicted, measured = predict(model, steps).by_phase, count(small_llama, setting, steps).peak_bytes_by_phase
    for phase in ("forward", "backward"):
        assert predicted[phase].bytes == measured[phase], phase
    assert predicted["forward"].bytes > predict(model, LAYOUTS[layout]).by_phase["forward"].bytes
