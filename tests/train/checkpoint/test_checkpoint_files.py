"""Checkpoint files: complete or ignored, pruned, locked; and when one is due."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from lean_finetune.model.files.safetensors_files import stored_tensors
from lean_finetune.train.checkpoint.checkpoint_files import RANKS, SUMS, TENSORS, VALUES, CheckpointStore
from lean_finetune.train.checkpoint.checkpointer import MOST_TIME_SHARE, ONE_PROCESS, Checkpointer
from lean_finetune.train.checkpoint.scratch_dir import HOSTS, PARTS, RunDirectory
from lean_finetune.train.monitor.measured_peak import memory_profile
from lean_finetune.train.process.stop_signals import StopRequest
from lean_finetune.train.resume_run import open_checkpointer
from tests.conftest import ROOT

WEIGHT = torch.arange(6.0).view(2, 3)


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, messages: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", 2, messages.append)


def keep(store: CheckpointStore, step: int) -> Path:
    """Write a checkpoint whose content depends on its step."""
    tensors = {"weights/w": WEIGHT + step, "count": torch.tensor(step)}
    store.write(step, tensors, {"step": step, "layout": ONE_PROCESS}).finish()
    return store.directory / f"step-{step:09d}"


def test_newest_checkpoints_are_kept_and_have_what_was_written(store: CheckpointStore):
    paths = [keep(store, step) for step in (1, 2, 9, 10)]
    assert [path.exists() for path in paths] == [False, False, True, True]
    found = store.newest()
    assert found is not None and found.values["step"] == 10
    tensors = found.tensors()
    assert torch.equal(tensors["weights/w"].read(), WEIGHT + 10) and tensors["count"].read().item() == 10


def flip_a_bit(path: Path) -> None:
    raw = bytearray((path / TENSORS).read_bytes())
    raw[-1] ^= 1
    (path / TENSORS).write_bytes(raw)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda path: os.truncate(path / TENSORS, 100),
        lambda path: (path / VALUES).write_text('{"step": 5}'),
        lambda path: (path / TENSORS).unlink(),
        lambda path: (path / SUMS).write_text("{"),
        lambda path: (path / SUMS).write_text("[]"),
        lambda path: (path / VALUES).write_text(json.dumps({**json.loads((path / VALUES).read_text()), RANKS: 0})),
        lambda path: (path / VALUES).write_text(json.dumps({**json.loads((path / VALUES).read_text()), RANKS: "../"})),
        lambda path: a_pipe(path / VALUES),
        lambda path: a_pipe(path / TENSORS),
    ],
    ids=(
        *("bit", "truncated", "other values", "no tensors", "broken sums", "no sums", "no processes", "a path"),
        *("a pipe as values", "a pipe as tensors"),
    ),
)
def test_damaged_checkpoint_is_replaced_by_the_one_before(store: CheckpointStore, messages: list[str], damage: Any):
    """Half a file after a power failure, or a changed byte, must not become weights."""
    first = keep(store, 1)
    damage(keep(store, 2))
    found = store.newest()
    assert found is not None and found.values["step"] == 1
    assert len(messages) == 1 and "step-000000002: checkpoint cannot be used (" in messages[0]
    assert messages[0].endswith("using the one before it")
    assert store.last_step() == 1
    damage(first)
    assert store.newest() is None and messages[1].endswith("and no older one is here")


def test_other_names_beside_checkpoints_are_left_alone(store: CheckpointStore):
    """`step-old`, a copy that a user kept, was a traceback."""
    keep(store, 1)
    for name in ("step-old", "step-1", "step-0000000001"):
        (store.directory / name).mkdir()
    found = store.newest()
    assert found is not None and found.values["step"] == 1 and (store.directory / "step-old").exists()


@pytest.mark.parametrize(("finished", "ranks", "newest"), [(False, 1, 2), (True, 1, 4), (True, 2, 2)])
def test_checkpoint_without_its_name_is_used_only_if_all_processes_finished(
    store: CheckpointStore, messages: list[str], finished: bool, ranks: int, newest: int
):
    """A kill between writing and renaming: the checkpoint is lost, or half of it is used."""
    keep(store, 2)
    unnamed = store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    if finished:
        unnamed.finish_rank()
    [values] = store.directory.glob(f".*/*/{VALUES}")
    if ranks == 2:  # Written by two processes, the second of which has no checksums yet.
        two = {RANKS: 2, PARTS: [0, 1], HOSTS: ["here", "here"]}
        values.write_text(json.dumps(json.loads(values.read_text()) | two))
    found = store.newest()
    assert found is not None and found.values["step"] == newest and not messages
    assert not list(store.directory.glob(".*"))


def test_tensors_are_written_without_a_copy(tmp_path: Path):
    """A checkpoint that needs the memory of training again."""
    store = CheckpointStore(tmp_path, 1, print)
    big = torch.zeros(1 << 20)
    with memory_profile() as profiler:
        store.write(1, {"big": big, "small": torch.ones(())}, {"step": 1}).finish()
    allocated = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(allocated, default=0) < 1024
    assert stored_tensors(tmp_path / "step-000000001" / TENSORS)["big"].bytes == big.nbytes


def test_checkpoints_are_due_by_the_clock_and_less_often_if_expensive(store: CheckpointStore):
    """Training that spends its time on checkpoints."""
    now = [0.0]
    make = partial(Checkpointer, store, stop=StopRequest(), notify=print, clock=lambda: now[0])
    checkpoints, never = make(seconds=60.0), make(seconds=None)
    due = []
    for now[0] in (0.0, 59.0, 60.0):
        due.append(checkpoints.is_due())
    assert due == [False, False, True] and not never.is_due()
    checkpoints._record_cost(30.0)
    for now[0] in (60.0 + 30.0 / MOST_TIME_SHARE - 1.0, 60.0 + 30.0 / MOST_TIME_SHARE):
        due.append(checkpoints.is_due())
    assert due[3:] == [False, True]


def opened(directory: Path, notify: Callable[[str], None] = print) -> AbstractContextManager[Checkpointer]:
    run = load_params(ROOT / "params.yaml").run
    return open_checkpointer(RunDirectory(directory=directory), run=run, stop=StopRequest(), notify=notify)


def test_a_second_process_is_refused_in_one_line(tmp_path: Path):
    """Two processes that write the same checkpoints would each resume from the other's."""
    with opened(tmp_path / "run"):
        with pytest.raises(UserError, match=r"run: another process trains the same run; wait until it ends"):
            with opened(tmp_path / "run"):
                raise AssertionError("two runs")
        with opened(tmp_path / "another"):
            pass
    with opened(tmp_path / "run"):
        pass


def test_successful_run_is_cleared_and_a_failed_one_keeps_its_checkpoints(tmp_path: Path):
    """Scratch that fills up, or that is emptied by the fault it is there for."""
    store = CheckpointStore(tmp_path / "run", 2, print)
    with pytest.raises(ConnectionError), opened(tmp_path / "run"):
        keep(store, 2)
        raise ConnectionError
    assert store.last_step() == 2
    with opened(tmp_path / "run") as checkpoints:
        assert checkpoints.first_step == 2
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_abandoned_runs_are_reported(tmp_path: Path, messages: list[str]):
    """Each changed parameter leaves the checkpoints of the run before it, which fill the disk."""
    keep(CheckpointStore(tmp_path / "abandoned", 2, print), 2)
    with opened(tmp_path / "run", messages.append):
        pass
    (line,) = messages
    assert line.startswith(f"note: {tmp_path} has checkpoints of 1 other unfinished training (")
    assert CheckpointStore(tmp_path / "abandoned", 2, print).last_step() == 2
