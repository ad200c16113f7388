"""Checkpoints of two processes on two nodes whose disks are not shared; the processes are threads."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import ControlChannel, World
from lean_finetune.train.checkpoint import scratch_dir
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore
from lean_finetune.train.checkpoint.scratch_dir import FINISHED, RECORD, RunDirectory, mark_finished
from lean_finetune.train.process.stop_signals import StopRequest
from lean_finetune.train.resume_run import open_checkpointer
from tests.conftest import ROOT

WAIT_SECONDS = 20
DIGEST = "0a" * 16
KILLED: list[object] = []
"""What killed processes did not publish: without a reference it would be removed."""


class Threads:
    """Collectives between threads."""

    def __init__(self, size: int):
        self.size = size
        self._barrier, self._local = threading.Barrier(size, timeout=WAIT_SECONDS), threading.local()
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._barrier.wait()
        self._values[rank] = value
        self._barrier.wait()
        return list(self._values)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self.exchange(self._local.rank, tensor.clone())[src])

    @property
    def rank(self) -> int:
        """Of this thread."""
        found: int = self._local.rank
        return found

    def run(self, function: Callable[[ControlChannel], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self._local.rank = rank
            return function(ThreadChannel(self, rank))

        with ThreadPoolExecutor(self.size) as pool:
            return [done.result() for done in [pool.submit(one, rank) for rank in range(self.size)]]


class ThreadChannel(ControlChannel):
    """The channel of a thread."""

    def __init__(self, threads: Threads, rank: int):
        super().__init__(World(rank=rank, size=threads.size, local_rank=0, local_size=1))
        self._threads = threads

    def gather(self, *numbers: int) -> list[list[int]]:
        return self._threads.exchange(self.rank, list(numbers))

    def gather_after_work(self, *numbers: int) -> list[list[int]]:
        return self.gather(*numbers)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    found = Threads(2)
    monkeypatch.setattr(scratch_dir.dist, "broadcast", found.broadcast)
    return found


def written(
    directories: list[Path], step: int, finished: Sequence[int] = (0, 1), published: Sequence[int] = (0, 1)
) -> Callable[[ControlChannel], bool]:
    """Write a checkpoint whose first half of the rows is the first process's; whether the disk is shared.

    Processes that are not `finished` were killed before they had flushed it, others before they had renamed it.
    """

    def write(channel: ControlChannel) -> bool:
        store = CheckpointStore(directories[channel.rank], 2, print, channel)
        rows = {"weights": (2 * channel.rank, (4, 3))}
        pending = store.write(
            step, {"weights": torch.full((2, 3), float(channel.rank))}, {"step": step, "layout": {}}, rows
        )
        if channel.rank in finished:
            pending.finish_rank()
        channel.gather(0)
        if store.disk.is_led_here and channel.rank in published:
            pending.publish()
        else:
            KILLED.append(pending)
        return store.disk.is_shared

    return write


def read(directories: list[Path], step: int = 1) -> Callable[[ControlChannel], list[float]]:
    def first_column(channel: ControlChannel) -> list[float]:
        checkpoint = CheckpointStore(directories[channel.rank], 2, print, channel).newest()
        assert checkpoint is not None
        assert [checkpoint.values_of(rank)["step"] for rank in (0, 1)] == [step, step]
        column: list[float] = checkpoint.tensors()["weights"].read()[:, 0].tolist()
        return column

    return first_column


def test_processes_find_out_whether_they_share_a_disk(tmp_path: Path, threads: Threads):
    assert threads.run(written([tmp_path / "one", tmp_path / "one"], 1)) == [True, True]
    assert threads.run(written([tmp_path / "a", tmp_path / "b"], 1)) == [False, False]
    assert not list(tmp_path.glob("*/disk"))


@pytest.mark.parametrize("shared", [True, False], ids=["written-on-one-machine", "written-on-two"])
def test_every_disk_gets_the_parts_that_it_lacks(tmp_path: Path, threads: Threads, shared: bool):
    """Each process read the files of all, and found those of its own node alone."""
    disks = [tmp_path / "a", tmp_path / "b"]
    threads.run(written([disks[0]] * 2 if shared else disks, 1))
    assert threads.run(read(disks)) == [[0.0, 0.0, 1.0, 1.0]] * 2
    assert threads.run(read(disks)) == [[0.0, 0.0, 1.0, 1.0]] * 2, "now complete on both"


@pytest.mark.parametrize(
    ("finished", "published", "newest"),
    [((0,), (), 1), ((1,), (), 1), ((0, 1), (0,), 2), ((0, 1), (1,), 2)],
    ids=["first-finished", "second-finished", "first-renamed", "second-renamed"],
)
def test_a_kill_between_the_saves_of_two_disks_leaves_the_newest_that_both_have(
    tmp_path: Path, threads: Threads, finished: tuple[int, ...], published: tuple[int, ...], newest: int
):
    """The run was refused, or half of a checkpoint used."""
    disks = [tmp_path / "a", tmp_path / "b"]
    threads.run(written(disks, 1))
    threads.run(written(disks, 2, finished, published))
    assert threads.run(read(disks, newest)) == [[0.0, 0.0, 1.0, 1.0]] * 2
    for disk in disks:
        assert sorted(path.name for path in disk.iterdir()) == [f"step-{step:09d}" for step in range(1, newest + 1)]


def test_a_part_on_an_absent_machine_is_refused_and_nothing_is_removed(tmp_path: Path, threads: Threads):
    """A half of a good checkpoint was taken for a damaged one, and deleted."""
    disks = [tmp_path / "a", tmp_path / "b"]
    threads.run(written(disks, 1))
    values = disks[0] / "step-000000001/values.json"
    values.write_text(json.dumps(json.loads(values.read_text()) | {"hosts": ["node-a", "node-b"]}))
    with pytest.raises(UserError, match="lacks what process 1 wrote to the disk of node-b; start that machine"):
        CheckpointStore(disks[0], 2, print).newest()
    assert values.exists()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_part_on_a_lost_disk_is_named_and_nothing_is_removed(tmp_path: Path, threads: Threads, lost: int, steps: int):
    """The other disks' parts were deleted, and the run started over."""
    disks = [tmp_path / "a", tmp_path / "b"]
    for step in range(1, steps + 1):
        threads.run(written(disks, step))
    saved = tmp_path / "saved"
    disks[lost].rename(saved)
    path = f"step-{steps:09d}"
    for _ in range(2):
        with pytest.raises(UserError, match=f"{path}: lacks what process {lost} wrote to the disk of .*; copy those"):
            threads.run(read(disks))
    assert sorted(one.name for one in disks[1 - lost].iterdir()) == [f"step-{step:09d}" for step in range(1, steps + 1)]
    shutil.copytree(saved / path, disks[lost] / path)
    assert threads.run(read(disks, steps)) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_a_complete_checkpoint_of_one_disk_is_used_if_node_0_lost_its_own(tmp_path: Path, threads: Threads):
    """It was deleted."""
    disks = [tmp_path / "a", tmp_path / "b"]
    threads.run(written(disks, 1))
    threads.run(read(disks))
    shutil.rmtree(disks[0])
    assert threads.run(read(disks)) == [[0.0, 0.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("cause", "first_steps"),
    [
        ("dvc has recorded it", 0),
        ("another run of one machine removed it", 0),
        ("node 0 was killed before it", 1),
    ],
)
def test_a_finished_run_starts_at_one_step_on_both_disks(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, cause: str, first_steps: int
):
    """Only node 0 has DVC's lock file and trains alone too: its disk had no checkpoint, the other's had a part."""
    disks = [tmp_path / "a/run", tmp_path / "b/run"]
    threads.run(written(disks, 1))
    for disk in disks:
        (disk / RECORD).write_text('{"sharing": {}}')
        mark_finished(disk, DIGEST)
    if cause == "node 0 was killed before it":
        (disks[0] / FINISHED).unlink()
    elif cause == "dvc has recorded it":
        lock = tmp_path / "dvc.lock"
        lock.write_text(f"md5: {DIGEST}")
        monkeypatch.setattr(scratch_dir, "DVC_LOCK", lock)
        is_file = type(lock).is_file
        # The other machine's checkout has none.
        monkeypatch.setattr(type(lock), "is_file", lambda path: is_file(path) and (path != lock or threads.rank == 0))
    else:
        shutil.rmtree(disks[0])

    def first_step(channel: ControlChannel) -> int:
        where = RunDirectory(directory=disks[channel.rank], record={"sharing": {}} if channel.is_first else None)
        run = load_params(ROOT / "params.yaml").run
        with open_checkpointer(where, run=run, stop=StopRequest(), notify=print, channel=channel) as checkpoints:
            return checkpoints.first_step

    assert threads.run(first_step) == [first_steps] * 2
