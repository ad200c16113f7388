"""Every command explains itself at once: `--help` and `explain` load neither PyTorch nor another slow library."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import run_bounded

STAGES = ("code", "pin", "tokenize", "bucket", "estimate", "train", "evaluate", "report")
SLOW_LIBRARIES = ("torch", "transformers", "datasets", "matplotlib", "dvc")
"""Each takes between half a second and seven of CPU."""


def loaded_by(*argv: str) -> tuple[str, set[str]]:
    """(standard output, slow libraries loaded) of a stage's command."""
    program = (
        "import runpy, sys, atexit\n"
        f"atexit.register(lambda: print(*(n for n in {SLOW_LIBRARIES!r} if n in sys.modules), file=sys.stderr))\n"
        f"sys.argv = {[*argv]!r}\n"
        "runpy.run_module(sys.argv[0], run_name='__main__')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_bounded([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("stage", STAGES)
def test_help_loads_no_slow_library(stage: str):
    """Seven seconds of imports for a page of text."""
    text, libraries = loaded_by(f"stages.{stage}", "--help")
    assert text.startswith("Usage: ") and "--help" in text
    assert libraries == set()


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["explain", "--help"], ["fit", "--list-gpus"]])
def test_the_command_answers_without_torch(arguments: list[str]):
    text, libraries = loaded_by("lean_finetune.cli", *arguments)
    assert len(text.splitlines()) > 5 and libraries == set()


def test_a_recorded_curve_is_explained_without_torch(tmp_path: Path):
    """A machine without PyTorch, or one that waits seconds for one line."""
    curve = tmp_path / "curve.csv"
    curve.write_text("step,held_gib\n" + "".join(f"{step},{10 + 0.02 * step}\n" for step in range(20)))
    text, libraries = loaded_by("lean_finetune.cli", "explain", str(curve))
    assert text.startswith("leak: held_bytes grows steadily")
    assert libraries == set()
