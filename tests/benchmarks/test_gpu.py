"""The GPU benchmarks, run on a CPU."""

import json
import time
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.estimate_cpu import without_onednn
from benchmarks.gpu import memory, run, speed
from benchmarks.gpu.cases import (
    LORA_4096,
    QLORA_LEAST,
    SMALL_SPEED_CASES,
    SPEED_CASES,
    small_cases,
)
from benchmarks.gpu.random_model import random_model
from benchmarks.gpu.run import Suite, rows_of, run_suite
from benchmarks.harness import versions
from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.units import GIB
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.state_formulas import model_shapes
from tests.memory.common import gpu_target
from tests.small_model import CPU

LORA_CASE = 1
"""Index of the small case with adapters and without bitsandbytes."""


@pytest.fixture(autouse=True)
def _without_onednn():
    """No trace sees the scratch memory of oneDNN's bf16 products, which no GPU has."""
    with without_onednn():
        yield


def test_a_run_continues_the_results_of_its_commit_and_drops_others(tmp_path):
    measured: list[str] = []
    small = list(small_cases())[:2]

    def measure(case: Any) -> dict[str, Any]:
        measured.append(case.name)
        return {"name": case.name, "tensors_error_percent": 1.0}

    suite = Suite(results_file="x.json", cases=small, measure=measure, summary=memory.summary)
    out = tmp_path / "x.json"
    assert run_suite(suite, out, "one", time.monotonic() - 1) and not measured, "no time"
    for _ in range(2):
        assert run_suite(suite, out, "one", time.monotonic() + 60)
        assert measured == [case.name for case in small]
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == measured
    assert rows_of(out, "one") and not rows_of(out, "two")


def test_the_command_fails_where_a_bar_fails(tmp_path):
    rows = [{"name": case.name, "tensors_error_percent": 9.0} for case in small_cases()]
    write_json(tmp_path / "gpu_memory.json", {"commit": "one", "versions": versions(), "rows": rows})
    done = CliRunner().invoke(run.main, ["memory", "--device", "cpu", "--out", str(tmp_path), "--commit", "one"])
    assert done.exit_code == 1 and "all done" in done.output


def test_memory_of_a_small_case_is_predicted():
    row = memory.compare(list(small_cases())[LORA_CASE], CPU)
    assert abs(row["tensors_error_percent"]) < 1
    assert set(row["phases"]) == {"forward", "backward", "clip", "optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize("case", list(small_cases())[3:], ids=lambda case: case.name)
def test_models_of_the_benchmark_are_built_as_they_are_predicted(case):
    assert abs(memory.compare(case, CPU)["tensors_error_percent"]) < 0.1


@pytest.mark.slow
def test_speed_is_timed_without_trl():
    row = speed.compare(SMALL_SPEED_CASES[0], CPU, "/bin/false", steps=speed.WARM_UP_STEPS + 2)
    assert len(row["seconds"]) == 2 and row["tokens_per_s"] > 0 and row["mfu_percent"] >= 0
    assert row["trl"] == "no output" and "trl_tokens_per_s" not in row


def test_flops_of_a_token_are_those_counted_by_hand():
    """Frozen weights need two products, trained ones three, and the input embedding none."""
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
