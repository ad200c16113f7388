"""The package without lean_finetune and PyTorch: it explains a snapshot, and its wheel needs NumPy and click only."""

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from cuda_memory.units import MIB
from lean_finetune.cli import main
from tests.conftest import ROOT
from tests.cuda_memory.snapshots import Snapshot, frame
from tests.processes import run_bounded

BLOCKED = """
import runpy, sys
for name in ("torch", "lean_finetune", "transformers", "pydantic", "jinja2", "markupsafe", "dvc"):
    sys.modules[name] = None
sys.argv = ["cuda_memory", *sys.argv[1:]]
runpy.run_module("cuda_memory", run_name="__main__")
"""
"""Runs the command where the modules cannot be imported that only lean_finetune needs."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A snapshot."""
    found = Snapshot()
    found.reserve(0, 40 * MIB)
    found.alloc(0, 30 * MIB, frame("/home/me/model.py", 21, "forward"))
    found.fail(100 * MIB, 20 * MIB, frame("/home/me/model.py", 22, "forward"))
    return found.write(tmp_path / "oom_snapshot.pickle")


def answer_alone(directory: Path, *words: str) -> str:
    """What the package in a directory answers, run in an empty one."""
    empty = directory / "empty"
    empty.mkdir(exist_ok=True)
    paths = {**os.environ, "PYTHONPATH": str(directory)}
    return run_bounded([sys.executable, "-c", BLOCKED, *words], cwd=empty, env=paths, check=True).stdout


def test_answers_as_lean_finetune_does_without_it_and_pytorch(file: Path, tmp_path: Path):
    """A laptop without PyTorch reads a snapshot of a cluster."""
    (tmp_path / "cuda_memory").symlink_to(ROOT / "cuda_memory")
    page, other = tmp_path / "page.html", tmp_path / "other.html"
    alone = answer_alone(tmp_path, str(file), "--gpu", "8GiB", "--html", str(page))
    result = CliRunner().invoke(main, ["snapshot", str(file), "--gpu", "8GiB", "--html", str(other)])
    assert alone == result.output and "out of memory: 100 MiB requested in me/model.py:22 forward" in alone
    assert page.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_the_wheel_needs_numpy_and_click_and_has_its_style_sheet(file: Path, tmp_path: Path):
    """`pip install ./cuda_memory` that downloads PyTorch, or a page without a style."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT / "cuda_memory", source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run_bounded([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True)
    (wheel,) = tmp_path.glob("cuda_memory-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    (metadata,) = installed.glob("*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: ([\w-]+)", metadata.read_text(), re.MULTILINE)
    assert sorted(needed) == ["click", "numpy"]
    assert "cuda-memory = cuda_memory.snapshot:snapshot" in (metadata.parent / "entry_points.txt").read_text()
    answer_alone(installed, str(file), "--html", "page.html")
    assert "color-scheme: light dark" in (installed / "empty/page.html").read_text()


def test_the_example_in_python_runs(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The README's code, after a function was renamed."""
    monkeypatch.chdir(file.parent)
    text = (ROOT / "cuda_memory/README.md").read_text()
    exec(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1], {})
    printed = capsys.readouterr().out
    assert f"{{'activations': {30 * MIB}}}" in printed and "expandable_segments:True" in printed
