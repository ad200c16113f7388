"""Processes that a user starts with torchrun, on one or several machines: one error message, and one run or none."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.distributed.test_stage import change, copy, planned, workspace  # noqa: F401 - fixtures
from tests.processes import kill_group, killed_after, run_bounded

pytestmark = pytest.mark.multiprocess

SECONDS = 240
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "DVC_STAGE"},
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def on_nodes(*roots: Path) -> list[tuple[int | None, str]]:
    """Exit status and standard error of the run's process on each of several nodes, all of which are this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank, root in enumerate(roots):
        place = {"RANK": rank, "WORLD_SIZE": len(roots), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "by-hand"}
        with open(root / "said", "w") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "stages.train"],
                cwd=root,
                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in (place | meeting).items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        processes.append(process)
    try:
        for process in processes:
            with killed_after(process, SECONDS):
                process.wait()
    finally:
        for process in processes:
            kill_group(process)
    return [(process.returncode, (root / "said").read_text()) for process, root in zip(processes, roots, strict=True)]


@pytest.mark.slow
def test_nodes_with_different_settings_are_refused(copy: Path):  # noqa: F811
    """Both ended with success, and different weights."""
    planned(copy, 2, "ddp")
    other = copy / "other-node"
    shutil.copytree(copy, other, symlinks=True)
    change(other, train__lr=1e-3, train__weight_decay=0.5)
    host = platform.node()
    for status, said in on_nodes(copy, other):
        assert status == 1
        [line] = said.splitlines()
        assert line.startswith("error: train.lr: must be the same in all processes of a run; ")
        assert (
            f"got 0.003 in process 0 on {host}; 0.001 in process 1 on {host}; 1 more differ (train.weight_dec" in line
        )
    assert not (copy / "data/tuned").exists() and not (other / "data/tuned").exists()


@pytest.mark.slow
def test_under_torchrun_one_process_speaks(copy: Path):  # noqa: F811
    """Every process printed the same notes and the same fault."""
    planned(copy, 2, "ddp", train__lr=1e30)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "stages.train"]
    done = run_bounded(command, cwd=copy, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, timeout_seconds=SECONDS)
    assert done.returncode == 1
    assert [line[:16] for line in done.stderr.splitlines() if line.startswith("error")] == ["error: train.lr:"]
    assert len(list((copy / "scratch/train/ranks").glob("*/1.log"))) == 1


SEEN = "import os, lean_finetune.core.torchrun_threads; print('threads', os.environ.get('OMP_NUM_THREADS'))"


@pytest.mark.slow
@pytest.mark.parametrize(("set_to", "seen"), [(None, "None"), ("1", "1")])
def test_torchrun_does_not_decide_the_number_of_threads(set_to: str | None, seen: str):
    """It sets one for each process where its user set none: packing and host updates took one core of many."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
    if set_to is not None:
        environment["OMP_NUM_THREADS"] = set_to
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", SEEN]
    done = run_bounded(command, cwd=ROOT, env=environment, timeout_seconds=SECONDS, check=True)
    assert done.stdout.splitlines() == [f"threads {seen}"] * 2
