"""A run on one machine listens on loopback alone: its store and gloo take writes from anybody who connects."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lean_finetune.distributed.launch import LOCAL, Node, NodeGroup, launch
from lean_finetune.distributed.processes import SINGLE_PROCESS, process_group
from tests.distributed.listening import addresses


def test_the_store_of_a_run_on_one_machine_listens_on_loopback():
    """A key-value store of the run that others on the network can write."""
    group = NodeGroup(Node(), 5.0)
    assert group.store.port and set(addresses()) == {LOCAL}


def test_a_single_process_listens_on_loopback():
    """FSDP2 needs a process group also alone; gloo then listens where this machine's name resolves to."""
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME="eth0"):  # As images of clusters set it.
        with process_group(SINGLE_PROCESS, torch.device("cpu"), 60.0, alone=True):
            assert set(addresses()) == {LOCAL}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_listen_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same of the processes that the launcher starts, and of the launcher while they run."""
    monkeypatch.chdir(tmp_path)
    before = str(Path(__file__).parents[2])
    with patch.dict(os.environ, GLOO_SOCKET_IFNAME="eth0", PYTHONPATH=before):
        launch("tests.distributed.listening", [], processes=2, directory=tmp_path / "ranks", grace_seconds=60)
    for rank in range(2):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert set(found) == {LOCAL}
