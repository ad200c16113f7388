"""A directory in which stages run as a user runs them, without DVC."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click import Command
from click.testing import CliRunner, Result

from lean_finetune.core.atomic_files import FIGURES, write_sealed
from tests.conftest import ROOT
from tests.kit.write_params import write_params
from tests.processes import run_bounded


def lay_out(directory: Path, **values: Any) -> Path:
    """Write params.yaml into a directory with some values changed. `train__lr` is train.lr."""
    changes = {key.replace("__", "."): value for key, value in values.items()}
    write_params(directory, {"run.progress": False, **changes})
    return directory


def invoke(command: Command, *arguments: str) -> Result:
    """Run a stage's entry in this process; any error but a UserError is raised."""
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False)


def error(result: Result, exit_code: int = 1) -> str:
    """The error of a failed run, which must be one line."""
    assert result.exit_code == exit_code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0].removeprefix("error: ")


def run_module(module: str, *arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` in a child process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return run_bounded([sys.executable, "-m", module, *arguments], cwd=cwd, env=environment, **options)


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Write JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_verdict(root: Path, precision: str = "fp32", **values: Any) -> None:
    """Write the estimate of a run that fits, as other stages read it; `values` are further ones of the verdict."""
    figures = {
        "gpu": "cpu",
        "gpu_reason": "auto: no CUDA device here, so this machine's RAM",
        "capacity_gib": 16.0,
        "peak_bytes_predicted": 54_000_000,
        "host_bytes_predicted": None,
        "host_of_process": None,
        "offloaded_bytes_predicted": 0,
        "worst_phase": "backward",
        "duration": None,
    }
    write_sealed(root / "data/estimate/verdict.json", {"enforce": True, "refusal": None, **values})
    write_sealed(root / "data/estimate/precision.json", {"precision": precision})
    write_sealed(root / "data/estimate" / FIGURES, figures)
