"""`dvc repro` killed again and again, with all that it started, ends as one that nobody disturbed."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.outputs import ABSENT, listing, state
from tests.pipeline.clone import Clone, make_clone
from tests.processes import TIMEOUT_SECONDS, kill_group

STAGES = ("pin_data", "pin_model", "tokenize", "bucket")
"""Of the pipeline; that `train` goes on where it was killed under DVC is shown in tests/pipeline."""
REPRO = ("repro", STAGES[-1])
SIGNS = ("scratch/tokenize/*/train", "data/tokens", "data/batches")
"""Work in the middle, and outputs in place of which DVC knows nothing yet; the kill comes when they are seen."""


def new_clone(place: Path) -> Clone:
    """A checkout in which nothing ran."""
    place.mkdir()
    return make_clone(place / "repo")


def kill_repro_at(clone: Clone, sign: str) -> None:
    """Start `dvc repro` and kill its group as soon as a path is there."""
    command = [sys.executable, "-m", "dvc", *REPRO]
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment, deadline = clone.environment, time.monotonic() + TIMEOUT_SECONDS
    assert not list(clone.root.glob(sign))
    with subprocess.Popen(command, cwd=clone.root, env=environment, start_new_session=True, **silent) as process:
        try:
            while not list(clone.root.glob(sign)):
                assert process.poll() is None, f"it ended before {sign} was seen"
                assert time.monotonic() < deadline, f"{sign} was never seen"
                time.sleep(0.001)
        finally:
            kill_group(process)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.multiprocess
def test_repeatedly_killed_pipeline_ends_with_the_same_outputs(tmp_path):
    """Stages run under DVC: it removes outputs before a stage, and keeps those of finished ones."""
    undisturbed, disturbed = new_clone(tmp_path / "undisturbed"), new_clone(tmp_path / "disturbed")
    before = {stage: state(disturbed.root, stage) for stage in STAGES}
    undisturbed.dvc(*REPRO)
    states = {stage: state(undisturbed.root, stage) for stage in STAGES}
    for sign in SIGNS:
        kill_repro_at(disturbed, sign)
        _, left = psutil.wait_procs(disturbed.processes(), timeout=10)
        assert left == []
        for stage in STAGES:
            for path, now in state(disturbed.root, stage).items():
                assert now in (ABSENT, before[stage][path], states[stage][path]), f"{path} is half-written"
    disturbed.dvc(*REPRO)
    assert {stage: state(disturbed.root, stage) for stage in STAGES} == states
    assert [line for line in listing(disturbed.root) if ".partial" in line] == []
