"""The predicted memory of objectives of preferences against PyTorch's own count of every allocation."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.estimate_cpu import LAYOUTS
from lean_finetune.objectives.registry import OBJECTIVES
from tests.memory.common import setting_of
from tests.memory.predict.test_measured import check

NAMES = [name for name, objective in OBJECTIVES.items() if objective is not None]
FAST: list[tuple[str, str, dict[str, Any]]] = [
    ("dpo", "padded", {"method": "lora", "grad_ckpt": True}),
    ("kto", "padded", {"method": "full", "loss_chunk": None}),
    ("kto", "joined", {"method": "qlora", "grad_ckpt": True}),
]
SLOW = [
    (name, layout, {"method": method, "grad_ckpt": grad_ckpt})
    for name in NAMES
    for method in ("full", "lora", "qlora", "int8_lora")
    for grad_ckpt, layout in ((False, "padded"), (True, "joined"))
]


@pytest.mark.parametrize(
    ("name", "layout", "changes"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_the_prediction_equals_what_the_allocator_counted(small_llama, name, layout, changes):
    """A step that is traced unlike it is trained: with references, or answers that pass without gradients."""
    objective = OBJECTIVES[name]
    assert objective is not None
    steps = tuple(tuple(replace(shape, kind=objective.kind) for shape in step) for step in LAYOUTS[layout])
    check(small_llama, setting_of(objective=name, **changes), steps)
