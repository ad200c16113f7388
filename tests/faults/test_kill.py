"""SIGKILL at any instant of any stage: outputs are whole or absent; the same command ends as if nothing had been."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.stage_run import Fault, Runner
from tests.faults.workspaces import (
    Finished,
    changes_of,
    check_nothing_half_written,
    check_rerun,
    put_nothing,
    put_old,
)

SEED = 6
KILLS = {
    "pin_data": 6,
    "pin_model": 6,
    "tokenize": 10,
    "bucket": 8,
    "estimate": 4,
    "train": 8,
    "evaluate": 6,
    "report": 6,
}
"""At random instants of each stage, in the long form."""


def kill_at_changes(runner: Runner, finished: Finished, stage: str, place: Path, most: int | None) -> None:
    """Kill a stage before changes of directory entries, up to `most` of them by chance; None: before every one."""
    workspace = finished.copy(place / "work")
    count = len(changes_of(runner, workspace, stage, place / "changes.txt"))
    assert count >= 3, "a stage writes its outputs aside, and renames them"
    numbers = range(count) if most is None else sorted(random.Random(SEED).sample(range(count), most))
    for number in numbers:
        old = put_old(workspace, stage)
        ended = runner.run(stage, workspace, Fault(at_change=number))
        assert ended.status == -signal.SIGKILL, ended.output
        check_nothing_half_written(workspace, stage, old, finished)
    check_rerun(runner, workspace, stage, finished)


def kill_at_instants(runner: Runner, finished: Finished, stage: str, place: Path, kills: int) -> list[str]:
    """Kill a stage at random instants of its run, each time alone or with all that it started; what each rerun told."""
    workspace, draw = finished.copy(place / "work"), random.Random(f"{SEED} {stage}")
    told: list[str] = []
    span_seconds = finished.seconds[stage]
    for _ in range(4 * kills + 4):
        old = draw.choice((put_old, put_nothing))(workspace, stage)
        instant = draw.random() * span_seconds
        run = runner.start(stage, workspace)
        time.sleep(instant)
        run.send(signal.SIGKILL, to_group=draw.random() < 0.5)
        ended = run.wait()
        check_nothing_half_written(workspace, stage, old, finished)
        if ended.status == 0:  # It was faster this time, and had ended before the signal.
            span_seconds *= 0.8
            continue
        assert ended.status == -signal.SIGKILL, ended.output
        told.append(check_rerun(runner, workspace, stage, finished))
        if len(told) == kills:
            return told
    pytest.fail(f"{stage} was killed {len(told)} times, not {kills}: its instants are drawn over too long a time")


@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["bucket", pytest.param("tokenize", marks=pytest.mark.slow)])
def test_a_kill_between_two_changes_of_the_disk(runner, quick, tmp_path, stage):
    """Write-aside and rename, step by step: here a half-written output would show."""
    kill_at_changes(runner, quick, stage, tmp_path, 2)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "tokenize"])
def test_a_kill_at_a_random_instant(runner, quick, tmp_path, stage):
    """Whatever the stage is at."""
    kill_at_instants(runner, quick, stage, tmp_path, 2 if stage == "train" else 1)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["pin_data", "pin_model", "tokenize", "bucket", "evaluate", "report"])
def test_a_kill_between_any_two_changes_of_the_disk(runner, finished, tmp_path, stage):
    """As above, at every one of them."""
    kill_at_changes(runner, finished, stage, tmp_path, None)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, kills", KILLS.items(), ids=KILLS)
def test_kills_at_random_instants(runner, finished, tmp_path, stage, kills):
    """54 of them over all stages."""
    told = kill_at_instants(runner, finished, stage, tmp_path, kills)
    assert stage != "train" or any("train: resumed at optimizer step " in text for text in told)
