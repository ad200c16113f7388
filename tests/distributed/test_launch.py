"""Faults of a launch: reported for that launch alone, and blamed on the processes that did not arrive."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lean_finetune.core.errors import DoesNotFit
from lean_finetune.distributed.faults import ConnectionLost, Ending, WaitTimedOut, fault_of
from lean_finetune.distributed.launch import (
    LOST,
    RANKS_DIRECTORY,
    _ending,
    _locked,
    report_faults_once,
)
from lean_finetune.distributed.processes import World
from lean_finetune.train.process.ranks import explain_timeouts

GLOO_CLOSED = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5123"
GLOO_LATE = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
STORE_LATE = "wait timeout after 12000ms, keys: /default_pg/0//cpu//0/1"
KILLED = ChildFailedError("train", {1: ProcessFailure(1, 12345, -9, "")})


def world(rank: int) -> World:
    return World(rank=rank, size=4, local_rank=rank, local_size=4)


def test_logs_of_a_launch_stay_while_it_runs_and_until_the_next(tmp_path: Path):
    """A second launch, which may be refused, must neither remove them nor add its own error."""
    with _locked(tmp_path / "ranks", "first", shared=False) as first:
        (first / "1.log").write_text("a traceback")
        with _locked(tmp_path / "ranks", "second", shared=False) as second:
            (second / "0.fault").write_text("one process at a time may train the same run")
            assert _ending(KILLED, first).message.startswith("hardware.num_gpus: process 1 ended by SIGKILL; ")
            assert (first / "1.log").exists()
    assert (first / "1.log").exists(), "users read it after the end"
    with _locked(tmp_path / "ranks", "third", shared=False) as third:
        assert list((tmp_path / "ranks").iterdir()) == [third]


@pytest.mark.parametrize(
    ("message", "kind", "shown"),
    [
        (GLOO_LATE, WaitTimedOut, "process 2 of 4 waited 12 s in phase backward; "),
        (STORE_LATE, WaitTimedOut, "process 2 of 4 waited 12 s in phase backward; "),
        (GLOO_CLOSED, ConnectionLost, "Connection closed by peer"),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError, "mat1 and mat2"),
    ],
)
def test_timeouts_and_lost_connections_are_distinguished(message: str, kind: type[Exception], shown: str):
    """The process that waited is not at fault, and no other error is about waiting."""
    with pytest.raises(kind, match=shown), explain_timeouts(world(2), 12.0, lambda: "in phase backward"):
        raise RuntimeError(message)


def test_only_those_that_did_not_come_are_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of four, the last hangs. One times out, which breaks the connections of the others, which waited too."""
    monkeypatch.setenv(RANKS_DIRECTORY, str(tmp_path))
    monkeypatch.setattr("os.dup2", lambda *_: None)  # Ranks above 0 send their output to a log.
    for rank, message in ((2, GLOO_LATE), (1, GLOO_CLOSED)):
        with pytest.raises(SystemExit), report_faults_once(world(rank), tmp_path), explain_timeouts(world(rank), 12.0):
            raise RuntimeError(message)
    (tmp_path / f"0{LOST}").touch()
    fault = fault_of({0: _ending(KILLED, tmp_path)}, ["here"], 4)
    assert str(fault).endswith("; the one that did not come: process 3")
    assert "process 2 of 4 waited 12 s before or after its steps" in str(fault)
    assert GLOO_CLOSED in (tmp_path / "1.log").read_text()


def test_the_run_ends_with_the_exit_code_of_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run on several GPUs that does not fit, and ends like one with a wrong parameter."""
    monkeypatch.setenv(RANKS_DIRECTORY, str(tmp_path))
    monkeypatch.setattr("os.dup2", lambda *_: None)
    with pytest.raises(SystemExit) as ended, report_faults_once(world(1), tmp_path):
        raise DoesNotFit("hardware.gpu: too small")
    assert ended.value.code == 3
    ending = Ending(**json.loads(json.dumps(asdict(_ending(KILLED, tmp_path)))))  # As nodes exchange it.
    fault = fault_of({0: ending}, ["here"], 4)
    assert (str(fault), fault.exit_code) == ("hardware.gpu: too small", 3)
