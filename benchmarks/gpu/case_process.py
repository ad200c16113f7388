"""Predict or measure one case in a new process. The last line printed is JSON: the columns of its row.

A new process has an empty allocator, takes settings of the allocator that hold for all of a process, and may end
without ending the benchmark. Predictions run where no GPU is visible.
"""

import json
from argparse import ArgumentParser
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import kernels, loading, memory, profiling, speed, switches
from benchmarks.gpu.cases import (
    Case,
    KernelsCase,
    LoadCase,
    MemoryCase,
    ProfileCase,
    SpeedCase,
    SwitchesCase,
    fake_cases,
    gpu_cases,
)
from benchmarks.gpu.fake_cuda import fake_cuda
from benchmarks.harness import Row
from cuda_memory.gpus import Device
from lean_finetune.train.monitor.measured_peak import CudaMeter

GPU_TESTS = (
    "tests/train/monitor/test_oom_handler.py",
    "tests/model/test_allocator_settings.py",
    "tests/train/monitor/test_measured_peak.py",
    "tests/train/monitor/test_memory_monitor.py",
)
"""The files with tests marked `gpu`."""


class Outcomes:
    """A plugin of pytest that records how each test ended."""

    def __init__(self) -> None:
        """No test has run."""
        self.by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a test's call, or what failed or skipped it before or after."""
        if report.when == "call" or report.outcome != "passed":
            self.by_test[report.nodeid] = report.outcome


def tests_marked_gpu() -> Row:
    """Outcomes of the tests that need a GPU."""
    import pytest  # Not at the top: the other cases do without it.

    outcomes = Outcomes()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "gpu", *GPU_TESTS], plugins=[outcomes])
    if not outcomes.by_test:
        return {"failed": f"pytest ended with {code} and no test"}
    return {**Counter(outcomes.by_test.values()), "tests": outcomes.by_test}


def measured(case: Case, device: torch.device, snapshot: Path | None) -> Row:
    """Measure a case."""
    if isinstance(case, MemoryCase):
        return memory.measured(case, device, CudaMeter(device), snapshot)
    if isinstance(case, SpeedCase):
        return speed.measured(case, device)
    if isinstance(case, KernelsCase):
        return kernels.measured(device)
    if isinstance(case, SwitchesCase):
        return switches.measured(case, device)
    if isinstance(case, ProfileCase):
        return profiling.measured(case, device)
    if isinstance(case, LoadCase):
        return loading.measured(case, device)
    return tests_marked_gpu()


def main() -> None:
    """Do what the command line says, and print the row."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["predict", "measure"])
    parser.add_argument("case")
    parser.add_argument("--device", choices=["cuda", "fake"], required=True)
    parser.add_argument("--gpu", type=json.loads, help="what to predict: the fields of a Device as JSON")
    parser.add_argument("--snapshot", type=Path, help="file for the history of the allocator")
    given = parser.parse_args()
    case = next(case for case in [*gpu_cases(), *fake_cases()] if case.name == given.case)
    if given.work == "predict":
        assert isinstance(case, MemoryCase)
        capability = tuple(given.gpu.pop("compute_capability"))
        row = memory.predicted(case, Device(kind="cuda", compute_capability=capability, **given.gpu))
    else:
        fake = given.device == "fake"
        with fake_cuda() if fake else nullcontext():
            row = measured(case, torch.device("cpu" if fake else "cuda"), given.snapshot)
    print(json.dumps(row))


if __name__ == "__main__":
    main()
