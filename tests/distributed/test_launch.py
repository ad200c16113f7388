"""Faults of a launch: reported for that launch alone, and blamed on the processes that did not arrive."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lean_finetune.core.errors import DoesNotFit
from lean_finetune.core.file_locks import locked_directory
from lean_finetune.core.signals import LAUNCHER
from lean_finetune.distributed.faults import (
    ERROR_FILE,
    ConnectionLost,
    Ending,
    Kind,
    WaitTimedOut,
    endings_in,
    explain_timeouts,
    fault_of,
    report_faults_once,
)
from lean_finetune.distributed.launch import ErrorFiles, Node, NodeGroup, NoRestart
from lean_finetune.distributed.processes import World

GLOO_CLOSED = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5123"
GLOO_LATE = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
STORE_LATE = "wait timeout after 12000ms, keys: /default_pg/0//cpu//0/1"
KILLED = {1: ProcessFailure(1, 12345, -9, "")}


def failures(directory: Path, codes: dict[int, int]) -> dict[int, ProcessFailure]:
    """What torchrun's agent reports of processes that ended with these codes."""
    return {rank: ProcessFailure(rank, 12345, code, str(directory / f"{rank}.json")) for rank, code in codes.items()}


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], World]:
    """Makes this process one of four that `launch` started."""
    monkeypatch.setattr("os.dup2", lambda *_: None)  # Ranks above 0 send their output to a log.
    monkeypatch.setenv(LAUNCHER, "1")

    def start(rank: int) -> World:
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / f"{rank}.json"))
        return World(rank=rank, size=4, local_rank=rank, local_size=4)

    return start


def test_logs_of_a_launch_stay_while_it_runs_and_until_the_next(tmp_path: Path):
    """A second launch, which may be refused, must neither remove them nor add its own error."""
    with locked_directory(tmp_path / "ranks", "first", shared=False) as first:
        (first / "1.log").write_text("a traceback")
        with locked_directory(tmp_path / "ranks", "second", shared=False) as second:
            fault = Ending(kind="error", message="one process at a time may train the same run")
            (second / "0.json").write_text(json.dumps(asdict(fault)))
            (ending,) = endings_in(first, KILLED).values()
            assert ending.message.startswith("hardware.num_gpus: process 1 ended by SIGKILL; ")
            assert (first / "1.log").exists()
    assert (first / "1.log").exists(), "users read it after the end"
    with locked_directory(tmp_path / "ranks", "third", shared=False) as third:
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
    world = World(rank=2, size=4, local_rank=2, local_size=4)
    with pytest.raises(kind, match=shown), explain_timeouts(world, 12.0, lambda: "in phase backward"):
        raise RuntimeError(message)


def test_only_those_that_did_not_come_are_blamed(tmp_path: Path, launched: Callable[[int], World]):
    """Of four, the last hangs. One times out, which breaks the connections of the others, which waited too."""
    for rank, message in ((2, GLOO_LATE), (1, GLOO_CLOSED), (0, GLOO_CLOSED)):
        world = launched(rank)
        with pytest.raises(SystemExit), report_faults_once(world, tmp_path), explain_timeouts(world, 12.0):
            raise RuntimeError(message)
    fault = fault_of(endings_in(tmp_path, failures(tmp_path, {0: 1, 1: 1, 2: 1, 3: -9})), ["here"], 4)
    assert str(fault).endswith("; the one that did not come: process 3")
    assert "process 2 of 4 waited 12 s before or after its steps" in str(fault)
    assert GLOO_CLOSED in (tmp_path / "1.log").read_text()


def test_the_run_ends_with_the_exit_code_of_its_fault(tmp_path: Path, launched: Callable[[int], World]):
    """A run on several GPUs that does not fit, and ends like one with a wrong parameter."""
    with pytest.raises(SystemExit) as ended, report_faults_once(launched(1), tmp_path):
        raise DoesNotFit("hardware.gpu: too small")
    assert ended.value.code == 3
    fault = fault_of(endings_in(tmp_path, failures(tmp_path, {0: -15, 1: 3})), ["here"], 4)
    assert (str(fault), fault.exit_code) == ("hardware.gpu: too small", 3)


@pytest.mark.parametrize(
    ("attempt", "kinds", "again"),
    [
        (1, [], True),
        (1, ["crash", "lost"], True),
        (2, ["crash", "lost"], True),
        (1, ["error", "lost"], False),
        (1, ["waited", "stopped"], True),
        (2, ["waited"], False),
        (1, ["stopped", "lost"], False),
        (1, ["stopped"], True),
    ],
    ids=["killed", "crash", "again", "recurs", "hung", "lost-machine", "signal", "stopped-by-the-agent"],
)
def test_processes_start_again_where_that_can_help(tmp_path: Path, attempt: int, kinds: list[Kind], again: bool):
    """A loop of starts that each run out of memory, training after Ctrl-C, or no restart after a kill."""
    for rank, kind in enumerate(kinds):
        ending = Ending(kind=kind, message="", timestamp=rank)
        (tmp_path / f"{rank}.json").write_text(json.dumps(asdict(ending)))
    files = ErrorFiles(tmp_path, NodeGroup(Node(), 5.0))
    environments = {rank: {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(attempt)} for rank in range(2)}
    with nullcontext() if again else pytest.raises(NoRestart):
        files.reify(environments)
        assert {one[ERROR_FILE] for one in environments.values()} == {f"{tmp_path}/{rank}.json" for rank in range(2)}
    assert len(list(tmp_path.glob("*.json"))) == (0 if again else len(kinds))
