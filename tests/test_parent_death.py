"""A stage exits when DVC or torchrun is killed, so that no process is orphaned. One started by hand continues."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from stages.pin import main as pin
from tests.conftest import ROOT
from tests.faults.conftest import SMALL
from tests.processes import kill_group, wait_for
from tests.workspace import invoke, lay_out

END_SECONDS = 60
UNDER_DVC, UNDER_TORCHRUN, BY_HAND = {"DVC_STAGE": "demo"}, {"TORCHELASTIC_RUN_ID": "1"}, dict[str, str]()
STARTER = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
IN_A_SHELL = "import subprocess, sys; subprocess.Popen(['sh', '-c', '\"$@\"; true', 'sh', *sys.argv[1:]]).wait()"
"""A shell with another command to run stays the parent; some shells always do."""
STAGE = """
import importlib.machinery, sys, time
sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec("stages.demo", None)
from lean_finetune.core.stage_command import StageCommand
StageCommand("demo", callback=lambda: (print("working", flush=True), time.sleep(600))).main([])
"""


@contextmanager
def started(place: Path, starter: str, command: list[str], given: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts the command and waits for it. The output is in `place/output`."""
    mine = {name: value for name, value in os.environ.items() if name not in ("DVC_STAGE", "DVC_ROOT")}
    with open(place / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", starter, *command],
            cwd=place,
            env={**mine, **given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_group(process)


def descendants(process: subprocess.Popen[bytes], least: int) -> list[psutil.Process]:
    """All child processes, once there are at least this many."""
    return wait_for(lambda: (found := psutil.Process(process.pid).children(recursive=True))[least - 1 :] and found)


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert not alive


@pytest.mark.parametrize("starter", [STARTER, IN_A_SHELL], ids=["parent", "parent of its shell"])
def test_a_stage_ends_with_its_message_when_dvc_is_killed(tmp_path: Path, starter: str):
    with started(tmp_path, starter, [sys.executable, "-c", STAGE], UNDER_DVC) as dvc:
        wait_for(lambda: "working" in (tmp_path / "output").read_text())
        processes = descendants(dvc, 1)
        dvc.kill()
        assert_ended(processes)
    assert "stopped by the end of its parent: no output is half-written" in (tmp_path / "output").read_text()


THREAD = (
    "import subprocess, sys, threading;"
    "children = [];"
    "thread = threading.Thread(target=lambda: children.append(subprocess.Popen(sys.argv[1:])));"
    "thread.start(); thread.join(); children[0].wait()"
)


@pytest.mark.parametrize("starter, given", [(STARTER, BY_HAND), (THREAD, UNDER_DVC)], ids=["by hand", "by a thread"])
def test_a_stage_continues_without_its_shell_or_the_thread_that_started_it(tmp_path: Path, starter: str, given: dict):
    """`nohup` is the user's choice. Linux reports the end of the parent's thread like the end of the parent."""
    with started(tmp_path, starter, [sys.executable, "-c", STAGE], given) as parent:
        [stage] = descendants(parent, 1)
        if given == BY_HAND:
            parent.kill()
            parent.wait()
        time.sleep(2)
        assert stage.is_running() and stage.status() != psutil.STATUS_ZOMBIE
        stage.kill()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_workers_of_tokenize_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each uses a core and the memory of a tokenizer."""
    lay_out(tmp_path, **SMALL)
    lines = (ROOT / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)
    with open(tmp_path / "rows.jsonl", "w") as rows:
        for copy in range(8):
            rows.writelines(line.replace('"content": "', f'"content": "{copy} ', 1) for line in lines)
    monkeypatch.chdir(tmp_path)
    for what in ("data", "model"):
        assert invoke(pin, what).exit_code == 0
    with started(tmp_path, STARTER, [sys.executable, "-m", "stages.tokenize"], UNDER_TORCHRUN) as parent:
        wait_for(lambda: list(tmp_path.glob("scratch/tokenize/*/train")))
        processes = descendants(parent, 3)
        parent.kill()
        assert_ended(processes)
    assert not (tmp_path / "data/tokens").exists()
    assert "stopped by the end of its parent" in (tmp_path / "output").read_text()


@pytest.mark.slow
def test_a_stage_ends_during_the_import_of_torch(tmp_path: Path):
    """The import takes seconds, in which no Python handler runs."""
    with started(tmp_path, STARTER, [sys.executable, "-m", "stages.train"], UNDER_DVC) as dvc:
        [child] = descendants(dvc, 1)
        wait_for(lambda: "libtorch" in Path(f"/proc/{child.pid}/maps").read_text())
        dvc.kill()
        assert_ended([child])
    assert "Traceback" not in (tmp_path / "output").read_text()
