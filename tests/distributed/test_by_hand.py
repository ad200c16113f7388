"""Processes that a user starts with torchrun, on one or several machines: one error message, and one run or none."""

import os
import platform
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.distributed.launched import change, errors_of, free_port, only_error_of, planned, running
from tests.processes import run_bounded

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_nodes_with_different_settings_are_refused(copy: Path):
    """Both ended with success, and different weights. Both nodes are this machine."""
    planned(copy, 2, "ddp")
    other = copy / "other-node"
    shutil.copytree(copy, other, symlinks=True)
    change(other, train__lr=1e-3, train__weight_decay=0.5)
    shared: dict[str, Any] = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "by-hand"}
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(root, RANK=rank, **shared)) for rank, root in enumerate((copy, other))]
        assert [node.wait() for node in nodes] == [1, 1]
    host = platform.node()
    for root in (copy, other):
        line = only_error_of(root)
        assert line.startswith("error: train.lr: must be the same in all processes of a run; ")
        values = f'got "auto" in process 0 on {host}; 0.001 in process 1 on {host}; 1 more differ (train.weight_dec'
        assert values in line
    assert not (copy / "data/tuned").exists() and not (other / "data/tuned").exists()


def test_under_torchrun_a_user_error_is_printed_once(copy: Path):
    """Every process printed the same notes and the same error; torchrun's summary said nothing."""
    planned(copy, 2, "ddp", train__lr=1e30)
    with running(copy, *TORCHRUN, "-m", "stages.train", GLOO_SOCKET_IFNAME="lo") as agent:
        assert agent.wait() == 1
    lines = errors_of(copy)
    assert [line[:16] for line in lines if line.startswith("error")] == ["error: train.lr:"]
    assert any(line.strip().startswith("traceback : train.lr:") for line in lines)
    assert len(list((copy / "scratch/train/ranks").glob("*/1.log"))) == 1


SEEN = "import os, lean_finetune.core.torchrun_threads; print('threads', os.environ.get('OMP_NUM_THREADS'))"


@pytest.mark.parametrize(("set_to", "seen"), [(None, "None"), ("1", "1")])
def test_torchrun_does_not_decide_the_number_of_threads(set_to: str | None, seen: str):
    """It sets one for each process if its user sets none: packing and host updates took one core of many."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), **({} if set_to is None else {"OMP_NUM_THREADS": set_to})}
    command = [sys.executable, *TORCHRUN, "--no-python", sys.executable, "-c", SEEN]
    done = run_bounded(command, cwd=ROOT, env=environment, check=True)
    assert done.stdout.splitlines() == [f"threads {seen}"] * 2
