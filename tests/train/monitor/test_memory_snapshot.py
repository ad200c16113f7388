"""Snapshots of CUDA's memory during training, with a fake history: its functions have the real signatures.

The fake cannot prove that recording is cheap, that it changes no allocation, or what the history of a real run has.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock, create_autospec

import pytest
import torch

from cuda_memory.diagnosis import analyse
from cuda_memory.snapshot_file import read_snapshot
from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import SINGLE_PROCESS, World
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.out_of_memory import (
    FIRST_STEPS,
    FIRST_STEPS_FILE,
    OOM_FILE,
    MemorySnapshots,
    OomHandler,
    TrainingOutOfMemory,
)
from tests.kit.specs import changed
from tests.small_model import CPU, save_small_llama, spec_of
from tests.train.jobs import make_job, plan_of, random_tokens
from tests.train.recorded_run import Recorder

CUDA = torch.device("cuda", 0)
HISTORY = {"segments": [], "device_traces": [[{"action": "oom", "device_free": 512, "size": 2**30, "stream": 0}]]}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A GPU's history; returns what started it."""
    start = create_autospec(torch.cuda.memory._record_memory_history)
    read = create_autospec(torch.cuda.memory._snapshot, return_value=HISTORY)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", start)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", read)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return start


def snapshots_of(
    choice: Any,
    directory: Path,
    device: torch.device = CUDA,
    world: World = SINGLE_PROCESS,
    notify: Callable[[str], None] = print,
) -> MemorySnapshots:
    return MemorySnapshots(choice, device, directory, world, notify)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fails() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("choice", ["on_oom", "first_steps"])
def test_history_is_bounded_and_written_when_memory_runs_out(tmp_path: Path, recorded: Mock, choice: str):
    """A run of days fills the RAM with history; an out-of-memory error leaves nothing to look at."""
    snapshots = snapshots_of(choice, tmp_path)
    recorded.assert_called_once_with(context="alloc", stacks="python", max_entries=100_000)
    oom_handler = OomHandler(CPU, updates_in_backward=False, on_failure=lambda: snapshots.write(OOM_FILE))
    with pytest.raises(TrainingOutOfMemory, match="1.00 GiB"), oom_handler.reported():
        fails()
    snapshots.close()
    assert files(tmp_path) == [f"{OOM_FILE}.pickle"]
    (recording,) = read_snapshot(tmp_path / f"{OOM_FILE}.pickle")
    assert [event.action for event in recording.events] == ["oom"]


@pytest.mark.parametrize("fault", ["history", "disk"])
def test_fault_of_the_snapshot_does_not_hide_that_of_the_run(
    tmp_path: Path, recorded: Mock, monkeypatch: pytest.MonkeyPatch, fault: str
):
    """The user looks for a bug in pickle, and never learns that memory ran out."""
    notes: list[str] = []
    if fault == "history":
        monkeypatch.setattr(
            torch.cuda.memory, "_snapshot", Mock(side_effect=RuntimeError("CUDA error: launch failure"))
        )
    else:
        (tmp_path / "file").touch()
        tmp_path = tmp_path / "file"
    snapshots = snapshots_of("on_oom", tmp_path, notify=notes.append)
    oom_handler = OomHandler(CPU, updates_in_backward=False, on_failure=lambda: snapshots.write(OOM_FILE))
    with pytest.raises(TrainingOutOfMemory, match="1.00 GiB"), oom_handler.reported():
        fails()
    (note,) = notes
    assert note.startswith(f"warning: {tmp_path / OOM_FILE}.pickle: no snapshot of the memory was written (")
    assert tmp_path.is_file() or files(tmp_path) == []


@pytest.mark.parametrize("steps", [1, FIRST_STEPS, FIRST_STEPS + 2])
def test_first_steps_are_written_once(tmp_path: Path, recorded: Mock, steps: int):
    """Nothing from a run shorter than that; a file for each later step."""
    notes: list[str] = []
    snapshots = snapshots_of("first_steps", tmp_path, notify=notes.append)
    for step in range(steps):
        assert (files(tmp_path) == []) == (step <= FIRST_STEPS)
        snapshots.step_started()
    snapshots.close()
    assert files(tmp_path) == [f"{FIRST_STEPS_FILE}.pickle"]
    assert notes == [
        f"note: explain the memory of the first steps with: lean-finetune snapshot {tmp_path / FIRST_STEPS_FILE}.pickle"
    ]


def test_each_process_has_its_own_file(tmp_path: Path, recorded: Mock):
    """Two GPUs write one file at once, and one of them reports a fault instead."""
    for rank in range(2):
        world = World(rank=rank, size=2, local_rank=rank, local_size=2)
        snapshots_of("on_oom", tmp_path, world=world).write(OOM_FILE)
    assert files(tmp_path) == [f"{OOM_FILE}_rank{rank}.pickle" for rank in range(2)]


@pytest.mark.parametrize(("choice", "device"), [("never", CUDA), ("never", CPU), ("on_oom", CPU)])
def test_without_a_history_nothing_is_written(tmp_path: Path, recorded: Mock, choice: str, device: torch.device):
    """The default is usable without a GPU, where it has no effect."""
    snapshots = snapshots_of(choice, tmp_path, device)
    for _ in range(FIRST_STEPS + 1):
        snapshots.step_started()
    snapshots.close()
    assert snapshots.write(OOM_FILE) is None and files(tmp_path) == [] and not recorded.called


@pytest.mark.parametrize(("device", "why"), [(CPU, "trains on the CPU"), (CUDA, "uses cudaMallocAsync")])
def test_first_steps_without_a_history_are_refused(tmp_path, recorded, monkeypatch, device: torch.device, why: str):
    """A run of hours that was to be recorded, and no file at its end."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(UserError, match=rf"^run\.memory_snapshot: first_steps .*{why}; use never$"):
        snapshots_of("first_steps", tmp_path, device)
    snapshots_of("on_oom", tmp_path, device)
    assert not recorded.called


LARGE_VOCABULARY, LENGTH = 2048, 32
STEPS = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.slow
def test_snapshot_of_a_run_names_its_memory(tmp_path: Path):
    """A report that calls the weights, states or logits of our own training unknown."""
    model = save_small_llama(tmp_path / "model", vocab_size=LARGE_VOCABULARY)
    tokens = random_tokens(tmp_path, [LENGTH] * 8)
    job = make_job(model, tokens, plan_of(tokens[0], STEPS), train=spec_of(method="full"))
    with Recorder() as recorder:
        trained = train(replace(job, train=changed(job.train, heldout_every_steps=None)), make_meter(CPU)).model
    (recording,) = read_snapshot(recorder.snapshot.write(tmp_path / "run.pickle"))
    peak = analyse(recording).timeline.by_category()
    weights = sum(parameter.nbytes for parameter in trained.parameters())
    assert peak["weights"][-1] == pytest.approx(weights, rel=0.01)
    assert peak["optimizer"][-1] == pytest.approx(2 * weights, rel=0.01)
    assert peak["gradients"].max() == pytest.approx(weights, rel=0.01)
    assert job.train.loss_chunk is not None
    assert peak["logits"].max() >= job.train.loss_chunk * LARGE_VOCABULARY * 4
    assert peak["unknown"].max() < 0.02 * weights
