"""The GPU's benchmark, proven with the CPU as a stand-in device."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner

from benchmarks.estimate_cpu import without_onednn
from benchmarks.gpu import memory
from benchmarks.gpu.cases import BIG, LAYOUTS, MODELS, GpuCase, cases, small_cases
from benchmarks.gpu.run import Run
from tests.processes import run_bounded

LORA_CASE = 1
"""Of the small cases, the one without bitsandbytes that has adapters."""


@pytest.fixture(autouse=True)
def _without_onednn():
    """Its scratch inside bf16 products, more with each thread, is seen by no trace, and no GPU has it."""
    with without_onednn():
        yield


def test_it_measures_writes_after_each_configuration_and_goes_on(tmp_path, monkeypatch):
    """Figures lost when the machine is taken away, or measured twice."""
    small = list(small_cases())
    chosen = small[LORA_CASE : LORA_CASE + 2]
    monkeypatch.setattr(memory, "small_cases", lambda: chosen)
    out = tmp_path / "gpu.json"
    asked: list[GpuCase] = []
    measure_case = memory.measure_case

    def counting(case: GpuCase, device: torch.device) -> Run:
        asked.append(case)
        return measure_case(case, device)

    monkeypatch.setattr(memory, "measure_case", counting)

    def run(*more: str) -> str:
        done = CliRunner().invoke(memory.main, ["--device", "cpu", "--out", str(out), "--commit", "one", *more])
        assert done.exit_code == 0, done.output
        return done.output

    assert "0 configurations, 2 left" in run("--minutes", "0")
    run()
    written = json.loads(out.read_text())
    assert [row["name"] for row in written["rows"]] == [case.name for case in chosen]
    assert all(abs(row["tensors_error_percent"]) < 1 for row in written["rows"])
    assert all(set(row["phases"]) == {"forward", "backward", "clip", "optimizer"} for row in written["rows"])
    before = len(asked)
    run()
    assert len(asked) == before == 2
    run("--commit", "two", "--minutes", "0")
    assert json.loads(out.read_text())["commit"] == "one"


@pytest.mark.parametrize("case", list(small_cases())[3:], ids=lambda case: case.name)
def test_models_of_the_benchmark_are_built_as_they_are_predicted(case):
    """A switch that the benchmark's own builder of models leaves out, so that it is measured without it."""
    row = memory.compare(case, torch.device("cpu"))
    assert abs(row["tensors_error_percent"]) < 0.1


def test_figures_of_another_commit_are_measured_again(tmp_path):
    """A prediction of today beside a measurement of yesterday's code."""
    out = tmp_path / "gpu.json"
    memory.Results(out, "one").add("case", {"name": "case", "tensors_error_percent": 1.0})
    assert memory.Results(out, "one").rows and not memory.Results(out, "two").rows


@pytest.mark.slow
def test_a_machine_without_dvc_and_datasets_measures():
    """A borrowed GPU that lacks a library which nothing measured there needs."""
    program = f"""
import sys
for name in ("dvc", "datasets"):
    sys.modules[name] = None
from benchmarks.gpu import memory
import torch
torch.backends.mkldnn.set_flags(False)
row = memory.compare(list(memory.small_cases())[{LORA_CASE}], torch.device("cpu"))
assert abs(row["tensors_error_percent"]) < 1, row
"""
    run_bounded([sys.executable, "-c", program], check=True)


def test_the_matrix_is_large_enough():
    """Models, methods, switches or shapes dropped in silence."""
    wanted = list(cases())
    assert len({case.name for case in wanted}) == len(wanted) >= 24
    assert {case.model for case in wanted} == set(BIG)
    assert {case.method for case in wanted} == {"full", "lora", "qlora", "int8_lora"}
    assert {case.layout for case in wanted} < set(LAYOUTS)
    assert all(case.model in MODELS for case in wanted)


@pytest.mark.gpu
def test_a_small_case_on_the_gpu(tmp_path):
    """The benchmark broken where it matters."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    row = memory.compare(list(small_cases())[0], torch.device("cuda"))
    assert row["reserved_measured_bytes"] >= row["tensors_measured_bytes"]
