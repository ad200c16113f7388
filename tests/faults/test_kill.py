"""SIGKILL at any instant of any stage: outputs are complete or absent, and a rerun gives the same outputs."""

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
    "pin_code": 4,
    "pin_data": 6,
    "pin_model": 6,
    "tokenize": 10,
    "bucket": 8,
    "estimate": 4,
    "train": 8,
    "evaluate": 6,
    "report": 6,
}
"""Kills at random times of each stage, in the slow test."""


def kill_at_changes(runner: Runner, finished: Finished, stage: str, place: Path, most: int | None) -> None:
    """Kill a stage before each directory change, or before `most` changes chosen at random."""
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
    """Kill a stage at random times, with or without its children; return the reruns' output."""
    workspace, draw = finished.copy(place / "work"), random.Random(f"{SEED} {stage}")
    outputs: list[str] = []
    span_seconds = finished.seconds[stage]
    for _ in range(4 * kills + 4):
        old = draw.choice((put_old, put_nothing))(workspace, stage)
        instant = draw.random() * span_seconds
        run = runner.start(stage, workspace)
        time.sleep(instant)
        run.send(signal.SIGKILL, to_group=draw.random() < 0.5)
        ended = run.wait()
        check_nothing_half_written(workspace, stage, old, finished)
        if ended.status == 0:  # It ended before the signal.
            span_seconds *= 0.8
            continue
        assert ended.status == -signal.SIGKILL, ended.output
        outputs.append(check_rerun(runner, workspace, stage, finished))
        if len(outputs) == kills:
            return outputs
    pytest.fail(f"{stage} was killed {len(outputs)} times, not {kills}: its instants are drawn over too long a time")


@pytest.mark.multiprocess
def test_a_kill_between_two_changes_of_the_disk(runner, quick, tmp_path):
    """A half-written output, if the process is killed between writing aside and renaming."""
    kill_at_changes(runner, quick, "bucket", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["pin_code", "pin_data", "pin_model", "tokenize", "bucket", "evaluate", "report"])
def test_a_kill_between_any_two_changes_of_the_disk(runner, finished, tmp_path, stage):
    kill_at_changes(runner, finished, stage, tmp_path, None)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "tokenize"])
def test_a_kill_at_a_random_instant(runner, trained, tmp_path, stage):
    kill_at_instants(runner, trained, stage, tmp_path, 2 if stage == "train" else 1)


KILLS_WITH_PAIRS = {"tokenize": 6, "bucket": 4, "reference": 6, "train": 4, "evaluate": 4}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", ["tokenize", "reference"])
def test_a_kill_between_any_two_changes_of_the_disk_with_pairs(runner, paired, tmp_path, stage):
    kill_at_changes(runner, paired, stage, tmp_path, None)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, kills", KILLS_WITH_PAIRS.items(), ids=KILLS_WITH_PAIRS)
def test_kills_at_random_instants_with_pairs(runner, paired, tmp_path, stage, kills):
    """24 kills: half a pair, or a log-probability of another row."""
    kill_at_instants(runner, paired, stage, tmp_path, kills)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage, kills", KILLS.items(), ids=KILLS)
def test_kills_at_random_instants(runner, finished, tmp_path, stage, kills):
    """58 kills over all stages."""
    outputs = kill_at_instants(runner, finished, stage, tmp_path, kills)
    assert stage != "train" or any("train: resumed at optimizer step " in text for text in outputs)
