"""SIGKILL at any instant of any stage: outputs are whole or absent, and the same command ends as if nothing had been."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Finished
from tests.faults.outputs import ABSENT, STAGES, declared, digest, listing, state
from tests.faults.stage_run import Fault, Runner

SEED = 6
OLD = "what an earlier run with other parameters left"


def put_old(workspace: Path, stage: str) -> dict[str, str]:
    """Replace a stage's outputs by others, as an earlier run leaves them; return their hashes."""
    for path in declared(stage):
        remove(workspace / path)
        file = workspace / path if Path(path).suffix == ".json" else workspace / path / "old.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'"{OLD}"')
    return state(workspace, stage)


def put_nothing(workspace: Path, stage: str) -> dict[str, str]:
    """Remove a stage's outputs, as DVC does before it runs one."""
    for path in declared(stage):
        remove(workspace / path)
    return state(workspace, stage)


def remove(path: Path) -> None:
    """Remove a file or directory that may be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_nothing_half_written(workspace: Path, stage: str, old: dict[str, str], finished: Finished) -> None:
    """Each output is absent, as it was, or as it shall be."""
    for path, now in state(workspace, stage).items():
        assert now in (ABSENT, old[path], finished.states[stage][path]), f"{path} is half-written"


def check_rerun(runner: Runner, workspace: Path, stage: str, finished: Finished) -> None:
    """The same command ends as the undisturbed run did, and cleans up."""
    ended = runner.run(stage, workspace)
    assert ended.status == 0, ended.output
    assert state(workspace, stage) == finished.states[stage]
    assert listing(workspace) == finished.listing


@pytest.mark.parametrize("stage", ["pin_data", "pin_model", "tokenize", "bucket"])
def test_a_kill_between_any_two_changes_of_the_disk(runner, quick, tmp_path, stage):
    """Write-aside and rename, step by step: here a half-written output would show."""
    workspace = quick.copy(tmp_path / "work")
    changes = tmp_path / "changes.txt"
    put_old(workspace, stage)
    assert runner.run(stage, workspace, Fault(changes=changes)).status == 0
    count = len(changes.read_text().splitlines())
    print(stage, count)
    print(changes.read_text())
    for number in range(count):
        old = (put_old, put_nothing)[number % 2](workspace, stage)
        ended = runner.run(stage, workspace, Fault(at_change=number))
        assert ended.status == -signal.SIGKILL, ended.output
        check_nothing_half_written(workspace, stage, old, quick)
    check_rerun(runner, workspace, stage, quick)
