"""The GPU benchmark, run on a CPU."""

import json
import os
import re
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import memory, profiling, speed
from benchmarks.gpu.__main__ import Session, main, rows_of
from benchmarks.gpu.case_process import GPU_TESTS
from benchmarks.gpu.cases import (
    FIRST,
    LAYOUTS,
    LORA_4096,
    QLORA_LEAST,
    SMALL_SPEED_CASES,
    SPEED_CASES,
    Case,
    ProfileCase,
    TrlCase,
    fake_cases,
    gpu_cases,
    small_cases,
)
from benchmarks.gpu.fake_cuda import FAKE_GPU, fake_cuda
from benchmarks.gpu.model_configs import MODELS
from cuda_memory.snapshot_pickle import read_plain_pickle
from cuda_memory.units import GIB
from lean_finetune.memory.devices import cpu_device
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.train.monitor.measured_peak import CpuMeter, CudaMeter
from tests.conftest import ROOT
from tests.kit.estimate_cpu import without_onednn
from tests.kit.random_model import random_model
from tests.memory.common import gpu_target
from tests.processes import run_bounded
from tests.small_model import CPU

LORA_CASE = 1
"""Index of the small case with adapters and without bitsandbytes."""
CPU_TARGET = target_of(cpu_device(GIB))
NOT_NEEDED = ("datasets", "dvc", "dvclive", "orjson", "tiktoken")
"""Packages of the project without which the benchmark runs."""


@pytest.fixture(autouse=True)
def _without_onednn():
    """No trace sees the scratch memory of oneDNN's bf16 products, which no GPU has."""
    with without_onednn():
        yield


def session(out: Path, seconds: float = 600) -> Session:
    """A session of the small cases."""
    return Session(
        cases=fake_cases(),
        device="fake",
        gpu=FAKE_GPU,
        out=out,
        ends=time.monotonic() + seconds,
        trl_python=sys.executable,
        unsloth_python=sys.executable,
        commit="one",
    )


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Names of the cases that are measured. Their processes print nothing, and the second case kills its own."""
    names: list[str] = []

    def last_line(self: Session, command: list[str], case: Case, changes: Any = None) -> dict[str, Any]:
        if "predict" in command:
            return {"tensors_predicted_bytes": 101}
        names.append(case.name)
        return {"failed": "ended by signal 9"} if case is self.cases[1] else {"tensors_measured_bytes": 100}

    monkeypatch.setattr(Session, "last_line", last_line)
    monkeypatch.setattr(Session, "prepare", lambda *_: None)
    return names


def test_a_session_continues_and_tries_a_case_that_was_killed_once_more(tmp_path, started):
    names = [case.name for case in fake_cases()]
    session(tmp_path, seconds=0).run()
    assert not started, "no time"
    session(tmp_path).run()
    assert started == names
    for _ in range(2):
        resumed = session(tmp_path)
        resumed.rows = rows_of(tmp_path / "gpu.json", FAKE_GPU.name)
        resumed.run()
    assert started == [*names, names[1]]
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["name"] for row in rows] == names and rows[0]["tensors_error_percent"] == pytest.approx(1.0)
    assert rows[1]["tries"] == 2 and rows[1]["failed"] == "ended by signal 9"
    assert rows_of(tmp_path / "gpu.json", "another GPU") == {}


def test_a_session_that_is_killed_has_a_row_of_the_case_that_was_running(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "measure", lambda *_: sys.exit(9))
    monkeypatch.setattr(Session, "predict", lambda *_: {})
    monkeypatch.setattr(Session, "prepare", lambda *_: None)
    results = tmp_path / "gpu.json"
    for tries in (1, 2):
        killed = session(tmp_path)
        killed.rows = rows_of(results, FAKE_GPU.name)
        with pytest.raises(SystemExit):
            killed.run()
        row = rows_of(results, FAKE_GPU.name)[fake_cases()[0].name]
        assert (row["failed"], row["tries"]) == ("the session ended during this case", tries)
    killed.rows = rows_of(results, FAKE_GPU.name)
    assert killed.is_done(killed.cases[0])


def test_a_case_that_fails_or_hangs_has_the_reason_in_its_row(tmp_path):
    one, case = session(tmp_path), fake_cases()[0]
    code = "import sys; print(7, file=sys.stderr); sys.exit('no memory')"
    assert one.last_line([sys.executable, "-c", code], case) == {"failed": "no memory", "stderr": ["7", "no memory"]}
    assert one.last_line(["sh", "-c", "kill -9 $$"], case) == {"failed": "ended by signal 9"}
    assert one.last_line(["sh", "-c", "echo loading; echo '{\"a\": 1}'"], case) == {"a": 1}
    one.ends = time.monotonic() - command.GRACE_SECONDS + 0.2
    assert one.last_line(["sleep", "60"], case) == {"failed": "no end after 0 s"}


def test_a_process_that_imports_ahead_runs_its_case_only_when_it_is_told_to(tmp_path):
    """Two cases at once on a GPU would spoil both measurements."""
    one, case = session(tmp_path), fake_cases()[0]
    assert one.measuring(case)[1:5] == ["-m", "benchmarks.gpu.ahead", "benchmarks.gpu.case_process", "measure"]
    begun = tmp_path / "begun"
    code = f"import pathlib; input(); pathlib.Path({str(begun)!r}).touch(); print('{{}}')"
    one.measuring = lambda case: [sys.executable, "-c", code]  # type: ignore[method-assign]
    one.prepare(case)
    one.prepare(case)
    (process,) = one.waiting.values()
    time.sleep(0.3)
    assert process.poll() is None and not begun.exists()
    assert one.last_line(one.measuring(case), case) == {} and begun.exists()
    assert not one.waiting and process.poll() == 0


def test_archives_of_snapshots_are_bounded(tmp_path, monkeypatch):
    """A session on a lent machine returns few files of a limited size."""
    monkeypatch.setattr(command, "ARCHIVE_BYTES", 1000)
    one, places = session(tmp_path), []
    one.cases = FIRST
    for number, content in ((0, bytes(10_000)), (1, os.urandom(2000)), (4, bytes(10_000))):
        one.snapshot(FIRST[number]).write_bytes(content)
        places.append(one.archive(FIRST[number])["snapshot"])
    assert places == ["snapshots-1.zip: 01.pickle", "left out: snapshots-1.zip is full", "snapshots-2.zip: 05.pickle"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["snapshots-1.zip", "snapshots-2.zip"]
    with zipfile.ZipFile(tmp_path / "snapshots-1.zip") as archive:
        assert archive.namelist() == ["01.pickle"]


def test_the_command_fails_where_a_bar_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(Session, "run", lambda self: None)
    monkeypatch.setattr(Session, "bars", lambda self: [{"name": "tensors", "value": 9.0, "holds": False}])
    assert main(["--device", "fake", "--out", str(tmp_path), "--commit", "one"]) == 1


def test_the_first_minutes_cover_every_method_with_and_without_checkpointing():
    pairs = {(case.method, case.grad_ckpt) for case in FIRST}
    assert pairs == {(method, on) for method in ("full", "lora", "qlora", "int8_lora") for on in (True, False)}
    assert len(FIRST) == 12 and sum(case.seconds for case in FIRST) < 8 * 60
    names = [case.name for case in gpu_cases()]
    assert len(names) == len(set(names))


def test_no_file_with_tests_of_a_gpu_is_left_out():
    mark = re.compile(r"^@pytest\.mark\.gpu", re.MULTILINE)
    marked = [path for path in ROOT.glob("tests/**/test_*.py") if mark.search(path.read_text())]
    assert sorted(GPU_TESTS) == sorted(path.relative_to(ROOT).as_posix() for path in marked)


def test_replaced_functions_count_tensors_by_phase_and_record_them(tmp_path):
    """A column that is never filled, or a snapshot that is not written, would be found only on a GPU."""
    snapshot = tmp_path / "one.pickle"
    with fake_cuda():
        row = memory.measured(list(small_cases())[LORA_CASE], CPU, CudaMeter(CPU), snapshot)
    assert set(row["phases"]) == {"forward", "backward", "clip", "optimizer"}
    for sizes in row["phases"].values():
        assert 0 < sizes["tensors_measured_bytes"] <= sizes["reserved_measured_bytes"] <= row["reserved_measured_bytes"]
    (events,) = read_plain_pickle(snapshot)["device_traces"]
    live = 0
    for event in events:
        live += event["size"] if event["action"] == "alloc" else -event["size"]
        assert live >= 0
    assert len(events) > 100


@pytest.mark.slow
def test_the_whole_command_runs_on_a_cpu_without_packages_that_a_gpu_machine_lacks(tmp_path):
    """Memory, speed and loading, each case predicted and measured in its own process."""
    site, out = tmp_path / "site", tmp_path / "out"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED}))\n")
    done = run_bounded(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "fake", "--out", str(out), "--minutes", "20"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "gpu.json").read_text())
    assert found["not_proven"] and not found["bars"]
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == len(fake_cases()) and not any("failed" in row for row in rows.values()), rows
    recorded = [row for row in rows.values() if "snapshot" in row]
    assert len(recorded) == 4 and all("reserved_error_percent" in row for row in recorded)
    with zipfile.ZipFile(out / "snapshots-1.zip") as archive:
        assert archive.namelist() == ["01.pickle", "02.pickle", "03.pickle", "04.pickle"]
    assert rows[SMALL_SPEED_CASES[0].name]["tokens_per_s"] > 0
    loading = rows[fake_cases()[-1].name]
    assert 0 < loading["loaded_bytes"] <= loading["peak_bytes"] and loading["files"] > 0


def error_percent(number: int) -> float:
    """The error of the prediction of a small case for this CPU."""
    case = list(small_cases())[number]
    peak = predict(TracedModel(MODELS[case.model], case.setting, CPU_TARGET), LAYOUTS[case.layout]).peak.bytes
    measured = memory.measured(case, CPU, CpuMeter())
    return memory.compared({"tensors_predicted_bytes": peak}, measured)["tensors_error_percent"]


def test_memory_of_a_small_case_is_predicted():
    assert abs(error_percent(LORA_CASE)) < 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3, len(list(small_cases()))))
def test_models_of_the_benchmark_are_built_as_they_are_predicted(number):
    assert abs(error_percent(number)) < 0.1


def test_flops_of_a_token_are_those_counted_by_hand():
    """Frozen weights need two products, trained ones three, and the input embedding none."""
    lora, full, qlora = SMALL_SPEED_CASES
    hidden, wide, vocabulary, layers = 64, 128, 256, 2
    linear = layers * (2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * wide) + hidden * vocabulary
    norms = (2 * layers + 1) * hidden
    scores = 6 * layers * hidden * 64
    model = random_model(full.config, full.setting.train, CPU)
    assert speed.flops_per_token(model, full) == 6 * (linear + norms) + scores
    adapted = random_model(lora.config, lora.setting.train, CPU)
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert speed.flops_per_token(adapted, lora) == 4 * linear + 6 * adapters + scores
    quantised = random_model(qlora.config, qlora.setting.train, CPU)
    assert speed.flops_per_token(quantised, qlora) == speed.flops_per_token(adapted, lora)


@pytest.mark.slow
def test_the_least_case_is_predicted_within_its_bar():
    case = next(case for case in SPEED_CASES if case.name == QLORA_LEAST)
    peak = predict(TracedModel(case.config, case.setting, gpu_target("H100")), ((case.shape,),)).peak.bytes
    assert peak / GIB < 7.4
    weights = model_shapes(case.config).values
    assert 30e9 < 4 * (weights - 128256 * 4096) < 34e9, "4 FLOP for each frozen weight of an 8B"


def event(category: str, name: str, start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    """An event as PyTorch's profiler writes it; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": arguments}


def test_a_profile_says_what_the_gpu_did_and_when_it_waited():
    types = {"Input Dims": [[8, 4], [4, 2]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    numbers = {"External id": 1, "correlation": 7}
    events = [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "aten::mm", 0, 9, **{"External id": 1}, **types),
        event("cpu_op", "aten::mul", 10, 9, **{"External id": 2}),
        event("cuda_runtime", "cudaLaunchKernel", 1, 4, correlation=7),
        event("cuda_runtime", "cudaLaunchKernel", 11, 4, correlation=8),
        event("cuda_runtime", "cudaStreamSynchronize", 20, 6000),
        event("kernel", "nvjet_tst", 10, 2000, **numbers),
        event("kernel", "vectorized_elementwise_kernel", 1010, 3000, **{"External id": 2}, correlation=8),
        event("gpu_memcpy", "Memcpy DtoH", 5010, 1000),
    ]
    row = profiling.summary(events, 4.0)
    assert (row["kernels_ms"], row["busy_ms"], row["idle_percent"]) == (3.0, 2.5, 37.5), "per step; overlaps count once"
    assert row["launches"] == 1.0 and row["started_at_once_percent"] == 50.0
    groups = {group["name"]: (group["ms"], group["number"]) for group in row["groups"]}
    assert groups == {"elementwise": (1.5, 0.5), "matmul bf16": (1.0, 0.5), "copies": (0.5, 0.5)}
    assert [each["name"] for each in row["operations"]][1] == "aten::mm BFloat16[8, 4] BFloat16[4, 2]"
    assert row["host_waits"] == [{"name": "cudaStreamSynchronize", "ms": 3.0, "number": 0.5}]


def test_the_profile_of_a_step_runs():
    case = ProfileCase(speed=SMALL_SPEED_CASES[0])
    with fake_cuda():
        row = profiling.measured(case, CPU)
    assert {"forward", "backward", "clip", "optimizer"} < set(row["phases_ms"])
    assert row["busy_ms"] > 0 and {group["name"] for group in row["groups"]} >= {"matmul bf16", "attention"}
    assert set(row["attention"]) == {"FLASH_ATTENTION", "CUDNN_ATTENTION"}


def test_speed_bars_use_the_rate_of_this_devices_products():
    fast = {"tokens_per_s": 13_000.0, "mfu_percent": 42.0, "allocated_bytes": 100, "reserved_bytes": 104}
    rows: dict[str, dict[str, Any]] = {
        LORA_4096: {**fast, "matmul_flops": speed.PEAK_FLOPS / 2},
        TrlCase.prefix + LORA_4096: {"tokens_per_s": 10_000.0},
        "other": {"name": "other", "out_of_memory": "CUDA out of memory."},
    }
    bars = {bar.name: (bar.value, bar.as_json()["bar"]) for bar in speed.bars(rows)}
    assert bars[f"{LORA_4096}: tokens/s"] == (13_000.0, ">= 6236.5")
    assert bars[f"{LORA_4096}: ours / TRL"] == (1.3, ">= 1.2")
    assert bars[f"{LORA_4096}: reserved / allocated"] == (1.04, "<= 1.05")
    assert not any(name.startswith("other") for name in bars)
