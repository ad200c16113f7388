"""If one process of a run fails, all end in bounded time with one error line, and the same command resumes."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.distributed.test_stage import copy, curve, planned, workspace  # noqa: F401 - fixtures
from tests.processes import kill_group, killed_after

pytestmark = pytest.mark.multiprocess

TIMEOUT_SECONDS = 5
"""run.rank_timeout_seconds of these runs."""
ENDS_SECONDS = 60
"""Within which all is over after a fault: the timeout, the agent's 30 s for those that are stuck, a busy machine."""
STEP = 4

LAUNCH = """
import sys
from pathlib import Path
from lean_finetune.core.errors import StageCommand
from lean_finetune.distributed.launch import launch
import click

@click.command(cls=StageCommand)
def main():
    launch("tests.distributed.failing", [], processes=2, directory=Path("scratch/train/ranks"), grace_seconds=600)

main()
"""


def run_with(fault: str, root: Path) -> tuple[int, list[str], float]:
    """Run with a fault: exit status, lines on standard error, seconds since the fault.

    The port that the environment names is in use, as by another run on the same machine.
    """
    taken = socket.create_server(("127.0.0.1", 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LEAN_FINETUNE_FAULT": fault}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
    environment.pop("DVC_STAGE", None)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    known: set[int] = set()
    with taken, killed_after(process):
        try:
            while process.poll() is None:
                known |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
                time.sleep(0.2)
            ended = time.time()
        finally:
            kill_group(process)
        assert process.stderr is not None
        output = process.stderr.read()
        process.stderr.close()
    assert len(known) >= 2 and not [pid for pid in known if psutil.pid_exists(pid)], "a process outlived its run"
    met = root / "fault-was-met"
    return process.returncode, output.splitlines(), ended - met.stat().st_mtime if met.exists() else 0.0


MESSAGES = {
    "memory": r"error: .*(memory|max_tokens).*",
    "killed": r"error: hardware\.num_gpus: process 1 ended by SIGKILL; .*the same command resumes from the last .*",
    "disk": r"error: .*File too large.*free space, then rerun.*",
    "hangs": (
        rf"error: run\.rank_timeout_seconds: .* process 0 of 2 waited {TIMEOUT_SECONDS} s in phase \w+ of "
        rf"optimizer step {STEP}; .*; the one that did not come: process 1"
    ),
    # A stand-in for NCCL, whose timeout is only told to a thread: gloo's would come after 10 minutes.
    "nccl": (
        rf"error: run\.rank_timeout_seconds: .* process 0 of 2 waited 600 s in phase \w+ of optimizer step {STEP}; "
        r".*; the one that did not come: process 1"
    ),
    "absent": (
        rf"error: run\.rank_timeout_seconds: .* process 0 of 2 waited {TIMEOUT_SECONDS} s before or after its steps; "
        r".*; the one that did not come: process 1"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank"), [("killed", 1), ("memory", 1), ("hangs", 1), ("nccl", 1), ("disk", 0), ("absent", 1)]
)
def test_one_process_fails_and_the_same_command_goes_on(copy: Path, kind: str, rank: int):  # noqa: F811
    """The others would wait forever, or print a traceback each."""
    patience = 600 if kind == "nccl" else TIMEOUT_SECONDS
    planned(copy, 2, "zero3", run__rank_timeout_seconds=patience, run__checkpoint_seconds=1e-6)
    status, output, seconds = run_with(f"{kind} {rank} {STEP}", copy)
    assert status == 1 and seconds < ENDS_SECONDS
    faults = [line for line in output if line.startswith("error: ")]
    assert len(faults) == 1 and re.fullmatch(MESSAGES[kind], faults[0]), output
    assert not [line for line in output if "Traceback" in line]
    status, output, _ = run_with(f"{kind} {rank} {STEP}", copy)
    assert status == 0, output
    assert kind == "absent" or any(line.startswith("train: resumed at optimizer step ") for line in output)
    assert [int(row["step"]) for row in curve(copy)] == list(range(len(curve(copy))))
    assert not list((copy / "scratch/train").glob("*/step-*"))
