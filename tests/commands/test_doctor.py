"""`lean-finetune doctor`: each fault of a machine with its remedy, and an exit code."""

import builtins
import json
import logging
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from cuda_memory.units import COLUMNS
from lean_finetune.commands import doctor as machine_checks
from lean_finetune.commands.doctor import (
    check_disk,
    check_git,
    check_gpus,
    check_imports,
    check_memory,
    check_packages,
    doctor,
)
from tests.conftest import ROOT
from tests.json_answers import check_answer
from tests.processes import run_bounded
from tests.workspace import invoke


def test_a_machine_is_described_in_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A check that breaks where there is no GPU, checkout or network."""
    monkeypatch.chdir(tmp_path)
    result = invoke(doctor)
    # A path is one word, which may be longer than a line.
    assert max(map(len, result.stdout.replace(str(tmp_path), "DIR").splitlines())) <= COLUMNS
    content = json.loads(invoke(doctor, "--json").stdout)
    check_answer("doctor", content)
    assert content["ok"] == (result.exit_code == 0)
    assert {"Python", "packages", "RAM", "CPU", "disk", "git", "pipeline", "hub"} <= {
        f["what"] for f in content["findings"]
    }
    assert all(finding["remedy"] for finding in content["findings"] if finding["level"] != "ok")


def test_no_warning_of_a_library_comes_between_the_lines():
    """A kernel that bitsandbytes advises to install, and that no stage uses."""
    name = "bitsandbytes.backends.cpu.ops"
    code = f"import logging, lean_finetune.commands.doctor as _; print(logging.getLogger({name!r}).level)"
    done = run_bounded([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert int(done.stdout) == logging.ERROR


def test_a_git_without_identity_fails_with_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`dvc exp run` that ends after hours, because git does not know who commits."""
    monkeypatch.chdir(tmp_path)
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    (finding,) = check_git()
    assert finding.level == "fail" and "git config --global user.name" in (finding.remedy or "")
    monkeypatch.setattr(machine_checks, "CHECKS", (check_git,))
    result = invoke(doctor)
    assert result.exit_code == 1 and result.stdout.endswith("1 of 1 checks failed\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.text for finding in check_git()] == ["not found"]


def test_a_full_disk_and_little_memory_fail(monkeypatch: pytest.MonkeyPatch):
    """A run of hours that cannot be saved."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(2**30))
    assert {finding.level for finding in check_disk()} == {"fail"}
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(8 * 2**30))
    assert {finding.level for finding in check_disk()} == {"note"}
    monkeypatch.setattr(machine_checks, "free_host_bytes", lambda: (2**30, "of this machine's RAM"))
    assert [finding.level for finding in check_memory()] == ["fail"]


def test_a_wrong_version_is_named_with_the_one_that_works(monkeypatch: pytest.MonkeyPatch):
    """A traceback in training from a library that is too old."""
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["click>=1000", 'pytest>=1000; extra == "test"'])
    (finding,) = check_packages()
    assert finding.level == "fail" and finding.remedy == 'pip install "click>=1000"'


def test_a_driver_without_a_matching_torch_fails(monkeypatch: pytest.MonkeyPatch):
    """Hours of training on the CPU of a machine with a GPU, because pip installed the build for CPUs."""
    done = subprocess.CompletedProcess([], 0, stdout="NVIDIA A10G, 570.86\n")
    monkeypatch.setattr(machine_checks.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (finding,) = check_gpus()
    assert finding.level == "fail" and "NVIDIA A10G" in finding.text and "pytorch.org" in (finding.remedy or "")


def test_a_library_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch):
    """An import error of a model class, three pages above which stands the library that caused it."""

    def broken(name: str, *_: Any, **__: Any) -> Any:
        if name == "peft":
            raise ModuleNotFoundError("Could not import module") from RuntimeError("operator other::nms does not exist")
        return imported(name, *_, **__)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", broken)
    (finding,) = check_imports()
    assert finding.level == "fail" and finding.text.endswith(": operator other::nms does not exist")


def test_a_gpu_in_use_and_an_old_one_are_noted(monkeypatch: pytest.MonkeyPatch):
    """An out-of-memory error from another program's memory, or bf16 on a GPU that only emulates it."""
    monkeypatch.setattr(machine_checks, "_output", lambda *_: "Tesla T4, 570.86")
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (4 * 2**30, 15 * 2**30),
        "get_device_name": "Tesla T4",
        "get_device_capability": (7, 5),
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    busy, kernels = check_gpus()
    assert busy.text == "Tesla T4: 4 GiB free of 15 GiB, driver 570.86"
    assert [busy.level, kernels.level] == ["note", "note"] and "no bf16" in kernels.text


def test_nothing_imports_torch_before_the_checks_that_need_it():
    """Five seconds of silence before the first line."""
    program = (
        "import sys; from lean_finetune.commands import doctor as m; "
        "early = m.CHECKS[: m.CHECKS.index(m.check_gpus)]; found = [f for check in early for f in check()]; "
        "assert len(found) > 5 and 'torch' not in sys.modules, sorted(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run_bounded([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
