"""Checkpoints as files, when one is made, and what of a run makes it another run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from lean_finetune.model.safetensors_files import stored_tensors
from lean_finetune.train.checkpoint.checkpoint_files import RANKS, SUMS, TENSORS, VALUES, CheckpointStore
from lean_finetune.train.checkpoint.checkpointer import MOST_TIME_SHARE, ONE_PROCESS, Checkpointer
from lean_finetune.train.checkpoint.scratch_dir import RunDirectory
from lean_finetune.train.monitor.measured_peak import memory_profile
from lean_finetune.train.process.stop_signals import StopRequest
from lean_finetune.train.resume_run import open_checkpointer
from tests.conftest import ROOT

WEIGHT = torch.arange(6.0).view(2, 3)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> CheckpointStore:
    return CheckpointStore(tmp_path / "kept", 2, said.append)


def keep(store: CheckpointStore, step: int) -> Path:
    """A checkpoint that says which it is."""
    store.write(
        step, {"weights/w": WEIGHT + step, "count": torch.tensor(step)}, {"step": step, "layout": ONE_PROCESS}
    ).finish()
    return store.directory / f"step-{step:09d}"


def test_a_checkpoint_gives_back_what_was_written(store: CheckpointStore):
    keep(store, 3)
    found = store.newest()
    assert found is not None and found.values["step"] == 3
    tensors = found.tensors()
    assert torch.equal(tensors["weights/w"].read(), WEIGHT + 3) and tensors["count"].read().item() == 3


def test_newest_checkpoints_are_kept(store: CheckpointStore):
    """A disk that fills up with checkpoints."""
    paths = [keep(store, step) for step in (1, 2, 9, 10)]
    assert [path.exists() for path in paths] == [False, False, True, True]


def tampered(path: Path) -> None:
    raw = bytearray((path / TENSORS).read_bytes())
    raw[-1] ^= 1
    (path / TENSORS).write_bytes(raw)


def cut_short(path: Path) -> None:
    with open(path / TENSORS, "r+b") as file:
        file.truncate(100)


def other_values(path: Path) -> None:
    (path / VALUES).write_text('{"step": 5}')


def without_tensors(path: Path) -> None:
    (path / TENSORS).unlink()


def without_sums(path: Path) -> None:
    (path / SUMS).unlink()


def broken_sums(path: Path) -> None:
    (path / SUMS).write_text("{")


def sums_of_other_files(path: Path) -> None:
    (path / SUMS).write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [tampered, cut_short, other_values, without_tensors, without_sums, broken_sums, sums_of_other_files],
    ids=lambda damage: damage.__name__,
)
def test_damaged_checkpoint_is_replaced_by_the_one_before(store: CheckpointStore, said: list[str], damage: Any):
    """Half a file after a power cut, or a byte that turned, must not become weights."""
    keep(store, 1)
    damage(keep(store, 2))
    found = store.newest()
    assert found is not None and found.values["step"] == 1
    assert len(said) == 1 and "step-000000002: checkpoint is damaged (" in said[0]
    assert said[0].endswith("using the one before it")
    assert store.last_step() == 1


def test_unfinished_checkpoint_is_removed(store: CheckpointStore, said: list[str]):
    """A process that was killed between writing and naming."""
    store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    assert store.newest() is None and not said
    assert not list(store.directory.glob(".*"))


def test_finished_checkpoint_without_its_name_is_renamed(store: CheckpointStore, said: list[str]):
    """A process that was killed after its part was on the disk: of several, all name a checkpoint one step later."""
    keep(store, 2)
    unnamed = store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    unnamed.finish_rank()
    found = store.newest()
    assert found is not None and found.values["step"] == 4 and not said
    assert not list(store.directory.glob(".*")) and store.last_step() == 4


def test_checkpoint_that_one_process_had_not_finished_is_removed(store: CheckpointStore, said: list[str]):
    """The part of the second process has no checksums yet."""
    keep(store, 2)
    unnamed = store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    unnamed.finish_rank()
    [values] = store.directory.glob(f".*/*/{VALUES}")
    values.write_text(json.dumps({**json.loads(values.read_text()), RANKS: 2}))
    found = store.newest()
    assert found is not None and found.values["step"] == 2 and not said


def test_run_without_intact_checkpoint_starts_again(store: CheckpointStore, said: list[str]):
    tampered(keep(store, 2))
    assert store.newest() is None and len(said) == 1 and store.last_step() is None


def test_tensors_are_written_without_a_copy(tmp_path: Path):
    """A checkpoint must not need the memory of training again: PyTorch's allocator gives out nothing for it."""
    store = CheckpointStore(tmp_path, 1, print)
    big = torch.zeros(1 << 20)
    with memory_profile() as profiler:
        store.write(1, {"big": big, "small": torch.ones(())}, {"step": 1}).finish()
    allocated = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(allocated, default=0) < 1024
    assert stored_tensors(tmp_path / "step-000000001" / TENSORS)["big"].bytes == big.nbytes


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduled(store: CheckpointStore, clock: Clock, seconds: float | None = 60.0) -> Checkpointer:
    return Checkpointer(store, seconds=seconds, stop=StopRequest(), notify=print, clock=clock)


def test_checkpoints_are_due_by_the_clock(store: CheckpointStore):
    clock = Clock()
    checkpoints = scheduled(store, clock)
    due = []
    for clock.now in (0.0, 59.0, 60.0):
        due.append(checkpoints.is_due())
    assert due == [False, False, True]
    never = scheduled(store, clock, seconds=None)
    clock.now = 1e9
    assert not never.is_due()


def test_expensive_checkpoints_are_less_frequent(store: CheckpointStore):
    """Where writing takes long, training must not spend its time on that."""
    clock = Clock()
    checkpoints = scheduled(store, clock)
    clock.now = 100.0
    checkpoints._record_cost(30.0)
    clock.now = 100.0 + 30.0 / MOST_TIME_SHARE - 1.0
    assert not checkpoints.is_due()
    clock.now += 2.0
    assert checkpoints.is_due()


def settings() -> Any:
    return load_params(ROOT / "params.yaml").run


def test_a_second_process_is_refused_in_one_line(tmp_path: Path):
    """Two processes that write the same checkpoints would each resume from the other's."""
    with open_checkpointer(RunDirectory(directory=tmp_path / "run"), run=settings(), stop=StopRequest(), notify=print):
        with pytest.raises(UserError, match=r"run: another process trains the same run; wait until it ends"):
            with open_checkpointer(
                RunDirectory(directory=tmp_path / "run"), run=settings(), stop=StopRequest(), notify=print
            ):
                raise AssertionError("two at once")
        with open_checkpointer(
            RunDirectory(directory=tmp_path / "another"), run=settings(), stop=StopRequest(), notify=print
        ):
            pass
    with open_checkpointer(RunDirectory(directory=tmp_path / "run"), run=settings(), stop=StopRequest(), notify=print):
        pass


def test_successful_run_is_cleared_and_a_failed_one_keeps_its_checkpoints(tmp_path: Path):
    """Scratch that fills up, or that is emptied by the fault it is there for."""
    store = CheckpointStore(tmp_path / "run", 2, print)
    with (
        pytest.raises(ConnectionError),
        open_checkpointer(RunDirectory(directory=tmp_path / "run"), run=settings(), stop=StopRequest(), notify=print),
    ):
        keep(store, 2)
        raise ConnectionError
    assert store.last_step() == 2
    with open_checkpointer(
        RunDirectory(directory=tmp_path / "run"), run=settings(), stop=StopRequest(), notify=print
    ) as checkpoints:
        assert checkpoints.first_step == 2
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_abandoned_runs_are_reported(tmp_path: Path, said: list[str]):
    """Each changed parameter leaves the checkpoints of the run before it, which fill the disk in silence."""
    keep(CheckpointStore(tmp_path / "given up", 2, print), 2)
    with open_checkpointer(
        RunDirectory(directory=tmp_path / "run"), run=settings(), stop=StopRequest(), notify=said.append
    ):
        pass
    (line,) = said
    assert line.startswith(f"note: {tmp_path} has checkpoints of 1 other unfinished trainings (")
    assert CheckpointStore(tmp_path / "given up", 2, print).last_step() == 2
