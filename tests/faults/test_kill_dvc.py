"""`dvc repro` killed again and again, with all that it started, ends as one that nobody disturbed."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.outputs import ABSENT, STAGES, listing, state
from tests.pipeline.clone import Clone, make_clone
from tests.processes import kill_group

SEED = 6
KILLS = 4


def new_clone(place: Path) -> Clone:
    """A checkout in which nothing ran."""
    place.mkdir()
    clone = make_clone(place / "repo")
    clone.set_params(train__epochs=1, data__heldout_fraction=0.5)
    return clone


def kill_repro(clone: Clone, seconds: float) -> bool:
    """Start `dvc repro` and kill its group after this time; whether it still ran."""
    command = [sys.executable, "-m", "dvc", "repro"]
    with subprocess.Popen(
        command,
        cwd=clone.root,
        env=clone.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass  # As it should be.
        finally:
            kill_group(process)
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_pipeline_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path):
    """Stages run under DVC: it removes outputs before a stage, and keeps those of finished ones."""
    undisturbed = new_clone(tmp_path / "undisturbed")
    started = time.monotonic()
    undisturbed.dvc("repro")
    took = time.monotonic() - started
    states = {stage: state(undisturbed.root, stage) for stage in STAGES}
    disturbed, draw = new_clone(tmp_path / "disturbed"), random.Random(SEED)
    before = {stage: state(disturbed.root, stage) for stage in STAGES}
    for _ in range(KILLS):
        assert kill_repro(disturbed, draw.uniform(0.1, 0.4) * took), "it ended before it was killed"
        _, left = psutil.wait_procs(disturbed.processes(), timeout=10)
        assert left == []
        for stage in STAGES:
            for path, now in state(disturbed.root, stage).items():
                assert now in (ABSENT, before[stage][path], states[stage][path]), f"{path} is half-written"
    disturbed.dvc("repro")
    assert {stage: state(disturbed.root, stage) for stage in STAGES} == states
    assert [line for line in listing(disturbed.root) if ".partial" in line] == []
