"""The benchmarks that docs/benchmarks.md lists run as commands, in their smallest form."""

import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.conftest import ROOT
from tests.processes import run_bounded

INTRODUCTION = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8").partition("\n## ")[0]
NAMES = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", INTRODUCTION, re.MULTILINE)))
NOT_RUN = {
    "pipeline": "test_pipeline.py runs it on a small pipeline",
    "estimate": "minutes; test_estimate.py and tests/memory/predict/test_families.py check its rows",
    "train": "minutes: its smallest form trains with transformers' Trainer too",
    "cuda_traces": "test_cuda_traces.py runs it on recordings",
    "cuda_ops": "test_cuda_ops.py runs it on recordings",
    "preference_train": "needs TRL's environment, and has no part without it",
    "other_tools": "test_other_tools.py runs it on configurations",
    "templates": "test_templates.py runs it on templates",
    "compression": "test_compression.py runs it",
    "fused_kernels": "needs the extra liger: tests/model/test_fused_kernels.py runs it",
    "gpu": "test_gpu.py runs it on a CPU",
}
"""Benchmarks that this test leaves out, and why."""
SMALLEST = {"staircase": ["--out", "staircase.png"]}


def test_the_page_lists_every_benchmark():
    """A benchmark that nobody finds, or a row whose benchmark is gone."""
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "benchmark(" in path.read_text()}
    packages = {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert sorted(NAMES) == sorted((modules | packages | set(SMALLEST)) - {"harness", "models"})


def test_python_m_benchmarks_lists_every_command(capsys: pytest.CaptureFixture[str]):
    """`No module named benchmarks.__main__`."""
    main()
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in lines} == {*NAMES, "house", "models", "scaling_model"}
    assert all(len(line.split(maxsplit=1)[1]) > 20 and line.endswith(".") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(NOT_RUN)))
def test_each_command_prints_its_tables(name: str, tmp_path: Path):
    """A bar may fail on a busy machine; an error may not."""
    arguments = SMALLEST.get(name, ["--quick", "--out", "results.json"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_bounded([sys.executable, "-m", f"benchmarks.{name}", *arguments], cwd=tmp_path, env=environment)
    failed_bar = re.search(r"\bNO$", done.stdout, re.MULTILINE)
    assert done.returncode == (1 if failed_bar else 0), done.stdout + done.stderr
    assert len(done.stdout.splitlines()) > 3 and list(tmp_path.iterdir())
