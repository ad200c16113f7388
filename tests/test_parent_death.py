"""A stage ends with dvc: killed, it must not leave a process that computes on. One started by hand lives on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from stages.pin import main as pin
from tests.conftest import ROOT
from tests.faults.conftest import SMALL
from tests.processes import kill_group
from tests.workspace import invoke, lay_out

END_SECONDS = 60
START_SECONDS = 120
UNDER_DVC, UNDER_TORCHRUN, BY_HAND = {"DVC_STAGE": "demo"}, {"TORCHELASTIC_RUN_ID": "1"}, dict[str, str]()
STARTER = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
IN_A_SHELL = "import subprocess, sys; subprocess.Popen(['sh', '-c', '\"$@\"; true', 'sh', *sys.argv[1:]]).wait()"
"""A shell that has more to do stays beside its command, as some always do."""
STAGE = """
import importlib.machinery, sys, time
sys.modules["__main__"].__spec__ = importlib.machinery.ModuleSpec("stages.demo", None)
from lean_finetune.core.errors import StageCommand
StageCommand("demo", callback=lambda: (print("at work", flush=True), time.sleep(600))).main([])
"""


@contextmanager
def started(place: Path, starter: str, command: list[str], given: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts the command and waits for it; what the command says is in `place/said`."""
    mine = {name: value for name, value in os.environ.items() if name not in ("DVC_STAGE", "DVC_ROOT")}
    with open(place / "said", "wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", starter, *command],
            cwd=place,
            env={**mine, **given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill_group(process)


def wait_for(true: Callable[[], object]) -> None:
    """Fail where something does not come true in time."""
    until = time.monotonic() + START_SECONDS
    while not true():
        assert time.monotonic() < until, "too late"
        time.sleep(0.005)


def descendants(process: subprocess.Popen[bytes], least: int) -> list[psutil.Process]:
    """All that it started, once there are so many."""
    found: list[psutil.Process] = []

    def are_there() -> bool:
        found[:] = psutil.Process(process.pid).children(recursive=True)
        return len(found) >= least

    wait_for(are_there)
    return found


@pytest.mark.parametrize("starter", [STARTER, IN_A_SHELL], ids=["parent", "parent of its shell"])
def test_a_stage_ends_in_order_when_dvc_is_killed(tmp_path: Path, starter: str):
    with started(tmp_path, starter, [sys.executable, "-c", STAGE], UNDER_DVC) as dvc:
        wait_for(lambda: "at work" in (tmp_path / "said").read_text())
        all_of_it = descendants(dvc, 1)
        dvc.kill()
        _, alive = psutil.wait_procs(all_of_it, timeout=END_SECONDS)
        assert not alive
    assert "stopped by the end of its parent: no output is half-written" in (tmp_path / "said").read_text()


def test_a_stage_started_by_hand_outlives_its_shell(tmp_path: Path):
    """`nohup` and `setsid` are a person's to choose; and a parent thread that ends is no parent that ends."""
    with started(tmp_path, STARTER, [sys.executable, "-c", STAGE], BY_HAND) as shell:
        [stage] = descendants(shell, 1)
        shell.kill()
        shell.wait()
        time.sleep(2)
        assert stage.is_running() and stage.status() != psutil.STATUS_ZOMBIE
        stage.kill()


THREAD = (
    "import subprocess, sys, threading;"
    "made = [];"
    "thread = threading.Thread(target=lambda: made.append(subprocess.Popen(sys.argv[1:])));"
    "thread.start(); thread.join(); made[0].wait()"
)


def test_a_thread_that_started_a_stage_may_end(tmp_path: Path):
    """Linux tells a process of its parent thread's end as if it were its parent's."""
    with started(tmp_path, THREAD, [sys.executable, "-c", STAGE], UNDER_DVC) as dvc:
        [stage] = descendants(dvc, 1)
        time.sleep(3)
        assert stage.is_running() and stage.status() != psutil.STATUS_ZOMBIE


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_workers_of_tokenize_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each holds a tokenizer and a core."""
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
        all_of_it = descendants(parent, 3)
        parent.kill()
        _, alive = psutil.wait_procs(all_of_it, timeout=END_SECONDS)
        assert not alive
    assert not (tmp_path / "data/tokens").exists()
    assert "stopped by the end of its parent" in (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["estimate", "train", "evaluate"])
def test_a_stage_that_imports_torch_ends(tmp_path: Path, stage: str):
    """It takes seconds, in which nothing handles signals."""
    with started(tmp_path, STARTER, [sys.executable, "-m", f"stages.{stage}"], UNDER_DVC) as dvc:
        [child] = descendants(dvc, 1)
        wait_for(lambda: "libtorch" in Path(f"/proc/{child.pid}/maps").read_text())
        dvc.kill()
        _, alive = psutil.wait_procs([child], timeout=END_SECONDS)
        assert not alive
    assert (tmp_path / "said").read_text() == ""
