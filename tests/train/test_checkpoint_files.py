"""Checkpoints as files, when one is made, and what of a run makes it another run."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from lean_finetune.model.safetensors_files import stored_tensors
from lean_finetune.pinning.code import PACKAGE, code_hashes
from lean_finetune.train import run_fingerprint
from lean_finetune.train.checkpoint.checkpoint_files import PARTS, SUMS, TENSORS, VALUES, CheckpointStore
from lean_finetune.train.checkpoint.resume import ALONE_CUT, LARGEST_SHARE, Checkpoints, opened
from lean_finetune.train.checkpoint.scratch_dir import Choice
from lean_finetune.train.monitor.measured_peak import memory_profile
from lean_finetune.train.process.stop_signals import Stop
from lean_finetune.train.run_fingerprint import run_key, run_parts
from tests.conftest import ROOT
from tests.processes import run_bounded
from tests.small_model import CPU

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
        step, {"weights/w": WEIGHT + step, "count": torch.tensor(step)}, {"step": step, "cut": ALONE_CUT}
    ).finish()
    return store.directory / f"step-{step:09d}"


def test_a_checkpoint_gives_back_what_was_written(store: CheckpointStore):
    keep(store, 3)
    found = store.newest()
    assert found is not None and found.values["step"] == 3
    tensors = found.tensors()
    assert torch.equal(tensors["weights/w"].read(), WEIGHT + 3) and tensors["count"].read().item() == 3


def test_the_last_few_are_kept(store: CheckpointStore):
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
def test_a_damaged_checkpoint_gives_way_to_the_one_before(store: CheckpointStore, said: list[str], damage: Any):
    """Half a file after a power cut, or a byte that turned, must not become weights."""
    keep(store, 1)
    damage(keep(store, 2))
    found = store.newest()
    assert found is not None and found.values["step"] == 1
    assert len(said) == 1 and "step-000000002: checkpoint is damaged (" in said[0]
    assert said[0].endswith("taking the one before it")
    assert store.last_step() == 1


def test_what_was_never_finished_is_no_checkpoint(store: CheckpointStore, said: list[str]):
    """A process that was killed between writing and naming."""
    store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    assert store.newest() is None and not said
    assert not list(store.directory.glob(".*"))


def test_what_was_finished_and_not_named_is_taken_up(store: CheckpointStore, said: list[str]):
    """A process that was killed after its part was on the disk: of several, all name a checkpoint one step later."""
    keep(store, 2)
    unnamed = store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    unnamed.finish_part()
    found = store.newest()
    assert found is not None and found.values["step"] == 4 and not said
    assert not list(store.directory.glob(".*")) and store.last_step() == 4


def test_what_one_of_several_had_not_finished_is_no_checkpoint(store: CheckpointStore, said: list[str]):
    """The part of the second process has no checksums yet."""
    keep(store, 2)
    unnamed = store.write(4, {"weights/w": WEIGHT}, {"step": 4})
    unnamed.finish_part()
    [values] = store.directory.glob(f".*/*/{VALUES}")
    values.write_text(json.dumps({**json.loads(values.read_text()), PARTS: 2}))
    found = store.newest()
    assert found is not None and found.values["step"] == 2 and not said


def test_the_last_damaged_one_leaves_a_run_at_its_start(store: CheckpointStore, said: list[str]):
    tampered(keep(store, 2))
    assert store.newest() is None and len(said) == 1 and store.last_step() is None


def test_the_file_is_written_without_a_copy_of_its_tensors(tmp_path: Path):
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


def scheduled(store: CheckpointStore, clock: Clock, seconds: float | None = 60.0) -> Checkpoints:
    return Checkpoints(store, seconds=seconds, stop=Stop(), told=print, clock=clock)


def test_one_is_due_when_its_time_has_come(store: CheckpointStore):
    clock = Clock()
    checkpoints = scheduled(store, clock)
    due = []
    for clock.now in (0.0, 59.0, 60.0):
        due.append(checkpoints.is_due())
    assert due == [False, False, True]
    never = scheduled(store, clock, seconds=None)
    clock.now = 1e9
    assert not never.is_due()


def test_dear_checkpoints_come_less_often(store: CheckpointStore):
    """Where writing takes long, training must not spend its time on that."""
    clock = Clock()
    checkpoints = scheduled(store, clock)
    clock.now = 100.0
    checkpoints._spend(30.0)
    clock.now = 100.0 + 30.0 / LARGEST_SHARE - 1.0
    assert not checkpoints.is_due()
    clock.now += 2.0
    assert checkpoints.is_due()


def settings() -> Any:
    return load_params(ROOT / "params.yaml").run


def test_a_second_process_is_refused_in_one_line(tmp_path: Path):
    """Two processes that write the same checkpoints would each resume from the other's."""
    with opened(Choice(directory=tmp_path / "run"), run=settings(), stop=Stop(), told=print):
        with pytest.raises(UserError, match=r"run: one process at a time may train the same run, .*; wait for its end"):
            with opened(Choice(directory=tmp_path / "run"), run=settings(), stop=Stop(), told=print):
                raise AssertionError("two at once")
        with opened(Choice(directory=tmp_path / "another"), run=settings(), stop=Stop(), told=print):
            pass
    with opened(Choice(directory=tmp_path / "run"), run=settings(), stop=Stop(), told=print):
        pass


def test_a_run_that_ends_well_leaves_nothing_and_a_fault_leaves_its_checkpoints(tmp_path: Path):
    """Scratch that fills up, or that is emptied by the fault it is there for."""
    store = CheckpointStore(tmp_path / "run", 2, print)
    with (
        pytest.raises(ConnectionError),
        opened(Choice(directory=tmp_path / "run"), run=settings(), stop=Stop(), told=print),
    ):
        keep(store, 2)
        raise ConnectionError
    assert store.last_step() == 2
    with opened(Choice(directory=tmp_path / "run"), run=settings(), stop=Stop(), told=print) as checkpoints:
        assert checkpoints.first_step == 2
    assert not (tmp_path / "run").exists()


def test_trainings_that_were_given_up_are_told_of(tmp_path: Path, said: list[str]):
    """Each changed parameter leaves the checkpoints of the run before it, which fill the disk in silence."""
    keep(CheckpointStore(tmp_path / "given up", 2, print), 2)
    with opened(Choice(directory=tmp_path / "run"), run=settings(), stop=Stop(), told=said.append):
        pass
    (line,) = said
    assert line.startswith(f"note: {tmp_path} holds checkpoints of 1 other unfinished trainings (")
    assert CheckpointStore(tmp_path / "given up", 2, print).last_step() == 2


KEY_FILES = {"tokens": "tokens", "plan": "plan.arrow", "model": "model.json"}


def key_in(directory: Path, device: torch.device = CPU, threads: int = 1, **values: Any) -> str:
    """The key of a run over the files in a directory."""
    decided = {"seed": 1, "train": {"lr": 0.1}, "precision": "fp32", **values}
    files = {name: directory / path for name, path in KEY_FILES.items()}
    return run_key({"parts": run_parts(decided, files, device, threads), "earlier": []})


@pytest.fixture
def read(tmp_path: Path) -> Path:
    """What a run reads."""
    directory = tmp_path / "read"
    (directory / "tokens/train").mkdir(parents=True)
    for name in ("tokens/train/00000.arrow", "tokens/meta.json", "plan.arrow", "model.json"):
        (directory / name).write_text(name)
    return directory


def test_the_same_run_elsewhere_has_the_same_key(read: Path, tmp_path: Path):
    """DVC's temporary and queued runs read copies, and go on from the checkout's checkpoints."""
    shutil.copytree(read, tmp_path / "copy")
    assert key_in(read) == key_in(tmp_path / "copy")


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"train": {"lr": 0.2}}, {"train": {"lr": 0.1, "new": None}}, {"precision": "bf16"}],
    ids=lambda change: next(iter(change)),
)
def test_another_parameter_is_another_run(read: Path, change: dict[str, Any]):
    """A stale checkpoint would be gone on with under a changed learning rate, say."""
    assert key_in(read, **change) != key_in(read)


@pytest.mark.parametrize("name", ["tokens/train/00000.arrow", "tokens/meta.json", "plan.arrow", "model.json"])
def test_other_data_or_another_model_is_another_run(read: Path, name: str):
    before = key_in(read)
    (read / name).write_text("changed")
    assert key_in(read) != before
    (read / name).write_text(name)
    assert key_in(read) == before
    (read / "tokens/train/00001.arrow").write_text("more rows")
    assert key_in(read) != before


def test_other_code_threads_or_libraries_are_another_run(read: Path, monkeypatch: pytest.MonkeyPatch):
    """Code that was edited between two runs trains otherwise from the middle on."""
    before = key_in(read)
    with monkeypatch.context() as patched:
        patched.setattr(run_fingerprint, "code_hashes", lambda module: {**code_hashes(module), "added.py": "0"})
        assert key_in(read) != before
    assert key_in(read, threads=64) != before
    with monkeypatch.context() as patched:
        patched.setattr(run_fingerprint, "version", lambda name: "99")
        assert key_in(read) != before
    assert key_in(read) == before


def test_the_code_of_a_key_is_all_that_training_loads():
    """A file that trains but is in no key: its edit would resume a stale checkpoint."""
    program = (
        "import json, sys, stages.train, lean_finetune.train.train_run\n"
        "print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, '__file__', None)]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_bounded([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    ours = [Path(file) for file in json.loads(done.stdout) if Path(file).is_relative_to(PACKAGE)]
    loaded = {file.relative_to(ROOT).as_posix() for file in ours if file.name != "__init__.py"}
    assert loaded - set(code_hashes("stages.train")) == set()
    assert loaded - set(code_hashes(run_fingerprint.TRAINING)) <= {"lean_finetune/core/torchrun_threads.py"}
