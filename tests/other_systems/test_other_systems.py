"""Windows and macOS without bitsandbytes: what works there works, and what does not says so in one line."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda_memory.terminal import replace_unencodable
from cuda_memory.units import MIB
from lean_finetune.config.load import COMMON_PARAMS
from tests.conftest import ROOT
from tests.cuda_memory.snapshots import Snapshot, frame
from tests.other_systems.emulated_system import POSIX_MODULES
from tests.processes import run_bounded
from tests.test_layers import imported_names

AXOLOTL = "base_model: tiny\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nmicro_batch_size: 1\nsequence_len: 512\n"
ROW = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


@pytest.fixture
def directory(tmp_path: Path, tiny_dir: Path) -> Path:
    """A user's directory: a model, rows, a configuration of another tool, a snapshot, a params.yaml."""
    shutil.copytree(tiny_dir, tmp_path / "tiny")
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 20)
    shutil.copy(COMMON_PARAMS, tmp_path / "params.yaml")
    snapshot = Snapshot()
    snapshot.reserve(0, 40 * MIB)
    snapshot.alloc(0, 30 * MIB, frame("/home/me/model.py", 21, "forward"))
    snapshot.write(tmp_path / "snapshot.pickle")
    return tmp_path


def answers_on(system: str, directory: Path, *lines: str) -> list[dict[str, Any]]:
    """What a stage and each command line answer in a directory on another system."""
    script = ROOT / "tests/other_systems/emulated_system.py"
    words = json.dumps([line.split() for line in lines])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_bounded([sys.executable, script, system, words], cwd=directory, env=environment, check=True)
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


FIT = "fit --model tiny --gpu T4"
LINES = (
    "--version",
    f"{FIT} --method lora --lengths rows.jsonl",
    FIT,
    f"{FIT} --method full --set train.optimizer=adamw_8bit",
    "import axolotl.yaml --out imported.yaml",
    "snapshot snapshot.pickle --html page.html",
    "doctor",
    "init run --model tiny --data rows.jsonl --method lora",
    "init run --check",
    "plan --model tiny --data rows.jsonl --gpu T4 --method lora --out planned.yaml",
)


def check_commands(answers: list[dict[str, Any]], directory: Path) -> None:
    """What the commands answer on every system without bitsandbytes."""
    version, lora, qlora, eight_bit, imported, snapshot, doctor, init, check, plan, modules = answers
    assert version["code"] == 0, version
    assert lora["code"] == 0 and lora["stdout"].startswith("verdict              fits: "), lora
    for refused, key, instead in (
        (qlora, "train.method", "train.method=lora"),
        (eight_bit, "train.optimizer", "train.optimizer=adamw"),
    ):
        assert refused["code"] == 1 and refused["stdout"] == "", refused
        assert refused["stderr"].startswith(f"error: {key}: needs bitsandbytes, which is not installed; got "), refused
        assert "run `pip install bitsandbytes`" in refused["stderr"] and refused["stderr"].count("\n") == 1
        assert refused["stderr"].endswith(f", or set {instead}\n")
    assert imported["code"] == 0 and (directory / "imported.yaml").is_file(), imported
    assert snapshot["code"] == 0 and "<html" in (directory / "page.html").read_text(), snapshot
    assert "Traceback" not in doctor["stderr"] and "packages" in doctor["stdout"], doctor
    assert init["code"] == 0 and (directory / "run/dvc.yaml").is_file() and (directory / "run/.dvc").is_dir(), init
    assert check["code"] == 0, check
    assert plan["code"] == 0 and (directory / "planned.yaml").is_file(), plan
    assert modules["code"] == 0, modules["stderr"]
    # Locks and files that were half-written are gone.
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_commands_work_on_windows_and_stages_say_where_they_run(directory: Path):
    """`import fcntl`, SIGUSR1, /proc or an open lock file that is removed, in a command that needs none of them."""
    stage, *answers = answers_on("win32", directory, *LINES)
    assert stage["code"] == 1 and stage["stderr"].count("\n") == 1, stage
    assert "do not run on Windows" in stage["stderr"] and "WSL2" in stage["stderr"]
    check_commands(answers, directory)


@pytest.mark.slow
def test_commands_and_stages_start_on_macos(directory: Path):
    """`sched_getaffinity`, O_DIRECT or /proc at import."""
    stage, *answers = answers_on("darwin", directory, *LINES)
    assert stage["code"] == 0, stage
    check_commands(answers, directory)


def test_modules_that_a_system_or_installation_lacks_are_imported_in_few_places():
    """`import fcntl` or `import bitsandbytes` in a module that every command reads."""
    lacking = {*POSIX_MODULES, "bitsandbytes", "msvcrt"}
    found = {
        (path.relative_to(ROOT).as_posix(), top)
        for package in ("cuda_memory", "lean_finetune")
        for path in (ROOT / package).rglob("*.py")
        for top in {name.partition(".")[0] for name in imported_names(path)} & lacking
    }
    assert found == {
        ("lean_finetune/commands/chat.py", "readline"),
        ("lean_finetune/commands/doctor.py", "bitsandbytes"),
        ("lean_finetune/core/optional_bitsandbytes.py", "bitsandbytes"),
        ("lean_finetune/core/systems.py", "fcntl"),
        ("lean_finetune/core/systems.py", "msvcrt"),
        ("lean_finetune/data/read/worker_memory.py", "resource"),
        ("lean_finetune/page/child.py", "resource"),
        ("lean_finetune/step/adamw_8bit.py", "bitsandbytes"),
        ("lean_finetune/train/monitor/memory_monitor.py", "resource"),
    }


def test_a_pipe_of_windows_gets_question_marks_for_bars(monkeypatch: pytest.MonkeyPatch):
    """`lean-finetune fit > file` that ends in UnicodeEncodeError, because cp1252 has no block characters."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="cp1252", write_through=True))
    replace_unencodable()
    print("forward ██▌ 7 GiB", end="")
    assert written.getvalue() == b"forward ??? 7 GiB"
