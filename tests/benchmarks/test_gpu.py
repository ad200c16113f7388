"""The GPU benchmarks, with the CPU as a stand-in device."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.estimate_cpu import without_onednn
from benchmarks.gpu import memory, run, speed
from benchmarks.gpu.cases import (
    BIG,
    LAYOUTS,
    LORA_4096,
    MODELS,
    QLORA_LEAST,
    SMALL_SPEED_CASES,
    SPEED_CASES,
    cases,
    small_cases,
)
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.run import Results, Suite, run_suite, suites
from lean_finetune.core.units import GIB
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.state_formulas import model_shapes
from tests.memory.common import gpu_target
from tests.processes import run_bounded
from tests.small_model import CPU

LORA_CASE = 1
"""Index of the small case with adapters and without bitsandbytes."""


@pytest.fixture(autouse=True)
def _without_onednn():
    """OneDNN's scratch memory inside bf16 products is seen by no trace, and no GPU has it."""
    with without_onednn():
        yield


def test_results_are_written_after_each_case_and_continued_for_the_same_commit(tmp_path):
    """Figures lost when the machine is taken away, measured twice, or mixed with those of another commit."""
    measured: list[str] = []
    small = list(small_cases())[:2]

    def measure(case: Any) -> dict[str, Any]:
        measured.append(case.name)
        return {"name": case.name, "tensors_error_percent": 1.0}

    suite = Suite(results_file="x.json", cases=small, measure=measure, summary=memory.summary)
    out = tmp_path / "x.json"
    assert run_suite(suite, out, "one", time.monotonic() - 1) and not measured, "no time left"
    for _ in range(2):
        assert run_suite(suite, out, "one", time.monotonic() + 60)
        assert measured == [case.name for case in small]
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == measured
    assert Results(out, suite, "one").rows and not Results(out, suite, "two").rows


def test_the_command_fails_where_a_bar_fails(tmp_path):
    out = tmp_path / "gpu_memory.json"
    results = Results(out, suites(CPU, "python")["memory"], "one")
    for case in small_cases():
        results.add({"name": case.name, "tensors_error_percent": 9.0})
    done = CliRunner().invoke(run.main, ["memory", "--device", "cpu", "--out", str(tmp_path), "--commit", "one"])
    assert done.exit_code == 1 and "all done" in done.output


def test_memory_of_a_small_case_is_predicted():
    row = memory.compare(list(small_cases())[LORA_CASE], CPU)
    assert abs(row["tensors_error_percent"]) < 1
    assert set(row["phases"]) == {"forward", "backward", "clip", "optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(small_cases())[3:], ids=lambda case: case.name)
def test_models_of_the_benchmark_are_built_as_they_are_predicted(case):
    """A switch that `random_model` leaves out is measured without it."""
    assert abs(memory.compare(case, CPU)["tensors_error_percent"]) < 0.1


@pytest.mark.slow
def test_speed_is_timed_without_trl():
    row = speed.compare(SMALL_SPEED_CASES[0], CPU, "/bin/false", steps=speed.WARM_UP_STEPS + 2)
    assert len(row["seconds"]) == 2 and row["tokens_per_s"] > 0 and row["mfu_percent"] >= 0
    assert row["trl"] == "no output" and "trl_tokens_per_s" not in row


@pytest.mark.slow
def test_a_machine_without_dvc_and_datasets_can_measure():
    program = f"""
import sys
for name in ("dvc", "datasets"):
    sys.modules[name] = None
from benchmarks.gpu import memory, run
import torch
torch.backends.mkldnn.set_flags(False)
row = memory.compare(list(run.small_cases())[{LORA_CASE}], torch.device("cpu"))
assert abs(row["tensors_error_percent"]) < 1, row
"""
    run_bounded([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_the_matrix_has_every_model_method_and_layout():
    wanted = list(cases())
    assert len({case.name for case in wanted}) == len(wanted) == 65
    assert {case.model for case in wanted} == set(BIG)
    assert {case.method for case in wanted} == {"full", "lora", "qlora", "int8_lora"}
    assert {case.layout for case in wanted} < set(LAYOUTS)
    assert all(case.model in MODELS and case.setting for case in wanted)


def test_flops_of_a_token_are_those_counted_by_hand():
    """A frozen weight counted as trained, or the input embedding, which is a table lookup."""
    lora, full, qlora = SMALL_SPEED_CASES
    hidden, wide, vocabulary, layers = 64, 128, 256, 2
    linear = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * wide) + hidden * vocabulary
    norms = (2 * layers + 1) * hidden
    scores = 6 * layers * hidden * 64
    model = random_model(full.config, full.setting.model, CPU)
    assert speed.flops_per_token(model, full) == 6 * (linear + norms) + scores
    adapted = random_model(lora.config, lora.setting.model, CPU)
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert speed.flops_per_token(adapted, lora) == 4 * linear + 6 * adapters + scores
    quantised = random_model(qlora.config, qlora.setting.model, CPU)
    assert speed.flops_per_token(quantised, qlora) == speed.flops_per_token(adapted, lora)


@pytest.mark.slow
def test_the_least_case_is_predicted_within_its_bar():
    case = next(case for case in SPEED_CASES if case.name == QLORA_LEAST)
    peak = predict(case.config, case.setting, ((case.shape,),), gpu_target("H100")).peak.bytes
    assert peak / GIB < 7.4
    weights = model_shapes(case.config).values
    assert 30e9 < 4 * (weights - 128256 * 4096) < 34e9, "4 FLOP for each frozen weight of an 8B"


def test_speed_bars_use_the_rate_of_this_devices_products():
    fast = {"tokens_per_s": 13_000.0, "mfu_percent": 42.0, "allocated_bytes": 100, "reserved_bytes": 104}
    rows: dict[str, dict[str, Any]] = {
        LORA_4096: {**fast, "trl_tokens_per_s": 10_000.0, "matmul_flops": speed.PEAK_FLOPS / 2},
        "other": {"name": "other", "out_of_memory": "CUDA out of memory."},
    }
    bars = {bar["name"]: (bar["value"], bar["bar"]) for bar in speed.summary(rows)}
    assert bars[f"{LORA_4096}: tokens/s"] == (13_000.0, ">= 6236.5")
    assert bars[f"{LORA_4096}: ours / TRL"] == (1.3, ">= 1.2")
    assert bars[f"{LORA_4096}: reserved / allocated"] == (1.04, "<= 1.05")
    assert not any(name.startswith("other") for name in bars)


@pytest.mark.gpu
def test_small_cases_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    cuda = torch.device("cuda")
    row = memory.compare(next(small_cases()), cuda)
    assert row["reserved_measured_bytes"] >= row["tensors_measured_bytes"]
    timed = speed.ours(SMALL_SPEED_CASES[0], cuda)
    assert timed["reserved_bytes"] >= timed["allocated_bytes"] > 0
