"""The SLURM scripts of docs/several-machines.md put a stopped job back into the queue."""

import os
from pathlib import Path

import pytest

from tests.distributed.test_nodes import programs, recipe
from tests.processes import run_bounded


@pytest.mark.parametrize("name", ["sbatch-one-node", "sbatch"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_stopped_job_is_put_back_into_the_queue_and_a_failed_one_is_not(tmp_path: Path, name: str, stopped: bool):
    """A run of days that ends at the time limit of its first job, or one that fails again and again."""
    srun = '#!/bin/sh\ntest "$1" != --kill-on-bad-exit=1 || shift\nexport SLURM_NODEID=0\nexec "$@"\n'
    # SLURM sends the signal to all processes of a step: here to the shell, whose child is the stage that ends with it.
    dvc = f"#!/bin/sh\n{'kill -TERM $PPID; ' if stopped else ''}exit 255\n"
    path = programs(tmp_path, dvc=dvc, srun=srun, scontrol='#!/bin/sh\necho "$@" >> requeued\n')
    command = ["bash", "-c", recipe("sh", name)]
    done = run_bounded(command, cwd=tmp_path, env={**os.environ, "PATH": path, "SLURM_JOB_ID": "7"})
    assert done.returncode == 255, done.stderr
    requeued = tmp_path / "requeued"
    assert requeued.exists() == stopped and (not stopped or requeued.read_text() == "requeue 7\n")
    assert not list((tmp_path / "scratch").iterdir())
