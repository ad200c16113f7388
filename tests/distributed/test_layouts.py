"""Every way to divide a run among processes learns what one process learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.estimate_cpu import save_small
from lean_finetune.core.atomic_files import read_json, write_json
from tests.distributed.cases import Case
from tests.distributed.conftest import Single
from tests.distributed.group import Group
from tests.distributed.test_parity import IDLE, METHODS, check, plain_of, same_batches

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

EXACT = (1e-6, 1e-4)
"""Largest differences in fp32: of losses, and of weights as a share of what was learnt."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "cp": {"mode": "ddp", "context": 2},
    "cp x zero1": {"mode": "zero1", "context": 2},
    "cp x zero2": {"mode": "zero2", "context": 2},
    "cp x zero3": {"mode": "zero3", "context": 2},
}
"""Name and values of a case."""
BATCHES: dict[str, dict[str, Any]] = {
    "padded": {"sizes": IDLE, "chunk": 16},
    "packed": {"sizes": IDLE, "flat": True, "model": {"grad_ckpt": True}},
}


def layout_case(directory: Path, layout: str, method: str, batches: str) -> Case:
    given = dict(BATCHES[batches])
    model = {"method": method, **given.pop("model", {})}
    return Case(directory=str(directory), steps=8, model=model, **LAYOUTS[layout], **given)


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("processes", ["pair", "four"])
def test_a_layout_learns_what_one_process_learns(
    request, small_llama: Path, single: Single, processes, layout, method, batches
):
    group: Group = request.getfixturevalue(processes)
    case = layout_case(small_llama, layout, method, batches)
    check(group, single, case, plain_of(case), EXACT)


@pytest.mark.parametrize(
    "family", ["Mistral, window", "Gemma 2", "Gemma 3", "GPT-OSS", "OPT", "DeepSeek-V3", "GPT-NeoX", "Qwen3-MoE"]
)
def test_divided_rows_of_a_family_learn_the_same(tmp_path, four: Group, single: Single, family):
    """Windows and positions of a part instead of the row; sinks of other heads; two key heads for four processes."""
    config = read_json(save_small(family, tmp_path) / "config.json")
    write_json(tmp_path / "config.json", config | ({"sliding_window": 8} if config.get("sliding_window") else {}))
    case = Case(directory=str(tmp_path), mode="zero3", context=4, sizes=IDLE, chunk=16, steps=8)
    case = replace(case, model={"method": "full", "grad_ckpt": True})
    results = check(four, single, case, same_batches(case), EXACT)
    torch.testing.assert_close(results["found"]["expert_loads"], results["expected"]["expert_loads"], rtol=0, atol=1e-6)
