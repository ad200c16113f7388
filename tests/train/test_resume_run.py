"""Why an unfinished run is not resumed; `run.resume: compatible` resumes runs with other code or versions."""

import json
import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.config.load import load_params
from lean_finetune.core.errors import UserError
from lean_finetune.train.checkpoint.checkpoint_files import steps_in
from lean_finetune.train.checkpoint.checkpointer import NO_CHECKPOINTS, CheckpointHooks
from lean_finetune.train.checkpoint.scratch_dir import (
    DVC_LOCK,
    FINISHED,
    RECORD,
    RunDirectory,
    lock_run_directory,
    mark_finished,
    metrics_digest,
)
from lean_finetune.train.job import TrainJob
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.process.stop_signals import StopRequest
from lean_finetune.train.resume_run import choose_directory, open_checkpointer, resumable_part, resumed_figures, run_key
from tests.conftest import ROOT
from tests.small_model import CPU
from tests.train.interrupted import small_job

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS: dict[str, dict[str, Any]] = {
    "parameters": {"seed": 17, "train.lr": 0.003, "bucket": "0a"},
    "data": {"tokens.train.arrow": "1b"},
    "model": {"model": "2c"},
    "code": {"lean_finetune/step/training_step.py": "3d", "lean_finetune/step/loss.py": "4e"},
    "device": {"name": "AVX2"},
    "threads": {"run.cpu_threads": 2},
    "versions": {"torch": "2.13.0"},
    "sharing": {"hardware.num_gpus": 1, "train.sharding": "none"},
}


def parts_with(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The parts of a run that differs."""
    changed = deepcopy(PARTS)
    for kind, values in changes.items():
        changed[kind] |= values
    return changed


def unfinished(root: Path, step: int, changes: dict[str, dict[str, Any]]) -> Path:
    """The directory of an unfinished run."""
    record = {"parts": resumable_part(parts_with(**changes)), "earlier": []}
    directory = root / run_key(record)
    (directory / f"step-{step:09d}").mkdir(parents=True)
    (directory / RECORD).write_text(json.dumps(record))
    return directory


def replace_by_pipe(record: Path) -> None:
    record.unlink()
    os.mkfifo(record)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.write_text("{"),
        lambda record: record.write_text("[]"),
        lambda record: record.write_text(record.read_text().replace("0.003", "0.004")),
        replace_by_pipe,
    ],
)
def test_a_run_whose_record_is_damaged_is_none_to_resume(tmp_path: Path, damage):
    """A traceback, a hang, or the checkpoint of a run with other data, resumed as a compatible one."""
    fingerprint, messages = PARTS, list[str]()
    directory = unfinished(tmp_path, 2, {"versions": {"torch": "2.11.0"}})
    found = choose_directory(tmp_path, fingerprint, "compatible", messages.append)
    assert found.earlier == directory and len(messages) == 1
    damage(directory / RECORD)
    found = choose_directory(tmp_path, fingerprint, "compatible", messages.append)
    assert found.earlier is None and not steps_in(found.directory) and len(messages) == 1


OLDER = parts_with(code={"lean_finetune/step/training_step.py": "older"})
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "parameters": ({"train.lr": 0.001}, "train.lr: 0.001 there, 0.003 here"),
    "data": ({"tokens.train.arrow": "other"}, "tokens.train.arrow"),
    "model": ({"model": "other"}, "model"),
    "code": ({"lean_finetune/step/training_step.py": "other"}, "lean_finetune/step/training_step.py"),
    "threads": ({"run.cpu_threads": 8}, "run.cpu_threads: 8 there, 2 here"),
    "versions": ({"torch": "2.11.0"}, 'torch: "2.11.0" there, "2.13.0" here'),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_reason_is_reported_when_a_run_is_not_resumed(tmp_path: Path, kind: str):
    """Training starts at step 0 again without saying what was changed."""
    change, text = CHANGES[kind]
    other, messages = unfinished(tmp_path, 2, {kind: change}), list[str]()
    assert choose_directory(tmp_path, PARTS, "exact", messages.append).earlier is None
    [line] = messages
    assert line.startswith(f"note: the unfinished training in {other} (optimizer step 2) is not resumed: {kind} differ")
    assert text in line
    assert line.endswith("-S run.resume=compatible resumes it") == (kind in ("code", "versions"))
    choice = choose_directory(tmp_path, PARTS, "compatible", lambda line: None)
    assert choice.earlier == (other if kind in ("code", "versions") else None)


def test_nearest_of_several_runs_is_reported(tmp_path: Path):
    """Each changed parameter leaves an unfinished run behind."""
    unfinished(tmp_path, 90, {"parameters": {"train.lr": 1.0}})
    code = {"lean_finetune/step/training_step.py": "a", "lean_finetune/step/loss.py": "b"}
    unfinished(tmp_path, 80, {"code": code, "versions": {"torch": "1"}})
    nearest, messages = unfinished(tmp_path, 3, {"code": {"lean_finetune/step/training_step.py": "a"}}), list[str]()
    choose_directory(tmp_path, PARTS, "exact", messages.append)
    assert len(messages) == 1 and str(nearest) in messages[0]


def opened_for(choice: RunDirectory, messages: list[str]) -> Any:
    run = load_params(ROOT / "params.yaml").run
    return open_checkpointer(choice, run=run, stop=StopRequest(), notify=messages.append)


def quick_job(model: Path, place: Path, **spec: Any) -> TrainJob:
    """A job without measurements."""
    job = small_job(model, place / "tokens", heldout_every_steps=None, **spec)
    return replace(job, measured_steps=frozenset())


def weights_of(job: TrainJob, checkpoints: CheckpointHooks = NO_CHECKPOINTS) -> list[Any]:
    """Train, and return the trained weights as lists that can be compared."""
    return [weight.tolist() for _, weight in train(job, make_meter(CPU), checkpoints).parallel.trained_parameters()]


def train_until(step: int, job: TrainJob, choice: RunDirectory, messages: list[str], first_step: int = 0) -> None:
    """Train until a power failure after the checkpoint of a step."""

    def after_step(run: Any, *_: Any) -> None:
        if run.step == step:
            checkpoints._save_last(run)
            raise ConnectionError

    with pytest.raises(ConnectionError), opened_for(choice, messages) as checkpoints:
        assert checkpoints.first_step == first_step
        checkpoints.after_step = after_step
        weights_of(job, checkpoints)


def test_compatible_run_resumes_with_a_note_and_is_never_resumed_as_exact(small_llama: Path, tmp_path: Path):
    """Metrics of two versions of the code that look like those of one."""
    job, root, messages = quick_job(small_llama, tmp_path), tmp_path / "checkpoints", list[str]()
    old = choose_directory(root, OLDER, "exact", print)
    train_until(2, job, old, messages)
    choice = choose_directory(root, PARTS, "compatible", messages.append)
    assert choice.earlier == old.directory
    train_until(4, job, choice, messages, first_step=2)
    assert choose_directory(root, PARTS, "exact", messages.append).directory != choice.directory
    assert "is not resumed: it has itself resumed other code" in messages[-1]
    again = choose_directory(root, PARTS, "compatible", messages.append)
    assert again == RunDirectory(directory=choice.directory, earlier=None, record=choice.record)
    assert resumed_figures(again) == {
        "resumed": "compatible: with other code (lean_finetune/step/training_step.py) up to step 2"
    }
    with opened_for(again, messages) as checkpoints:
        assert checkpoints.first_step == 4
        assert weights_of(job, checkpoints) == weights_of(job)  # The code is in fact the same.


def test_checkpoint_that_this_code_cannot_read_is_refused_in_one_line(small_llama: Path, tmp_path: Path):
    """run.resume=compatible ends in a traceback, or removes the checkpoint."""
    root, messages = tmp_path / "checkpoints", list[str]()
    old = choose_directory(root, OLDER, "exact", print)
    train_until(2, quick_job(small_llama, tmp_path, method="lora"), old, messages)
    choice = choose_directory(root, PARTS, "compatible", print)
    with pytest.raises(UserError, match="^run.resume: compatible needs .*set run.resume=exact"):
        with opened_for(choice, messages) as checkpoints:
            weights_of(quick_job(small_llama, tmp_path / "more", method="full"), checkpoints)
    assert [path.name for path in old.directory.glob("step-*")] == ["step-000000002"]
    assert not choice.directory.exists()


def test_finished_run_keeps_its_last_checkpoint_until_the_next_run(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """DVC removes outputs before it runs a stage: a kill between publishing and dvc.lock must not cost the training."""
    monkeypatch.chdir(tmp_path)
    job, root, messages = quick_job(small_llama, tmp_path), tmp_path / "checkpoints", list[str]()
    (tmp_path / "train.json").write_text("{}")
    choice = choose_directory(root, PARTS, "exact", print)
    two_gpus = parts_with(sharing={"hardware.num_gpus": 2, "train.sharding": "ddp"})
    shared = choose_directory(root, two_gpus, "exact", print)
    assert shared.directory == choice.directory
    # In a temporary copy DVC records nothing here. A run of another mode would measure no memory in a finished one.
    for chosen, first_step in ((choice, 0), (choice, 5), (shared, 0), (choice, 0), (choice, 5)):
        with opened_for(chosen, messages) as checkpoints:
            assert checkpoints.first_step == first_step
            ended = weights_of(job, checkpoints)
            mark_finished(choice.directory, metrics_digest(tmp_path / "train.json"))
    assert weights_of(job) == ended
    DVC_LOCK.write_text("md5: 99914b932bd37a50b983c5e7c90ae93b")  # MD5 of {}: DVC has recorded the outputs.
    with opened_for(choose_directory(root, PARTS, "exact", print), messages) as checkpoints:
        assert checkpoints.first_step == 0
        weights_of(job, checkpoints)
        mark_finished(choice.directory, metrics_digest(tmp_path / "train.json"))
    messages.clear()
    with opened_for(choose_directory(root, parts_with(parameters={"seed": 1}), "exact", messages.append), messages):
        assert not choice.directory.exists() and messages == []


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [(RECORD, None, False), (RECORD, "{", False), (RECORD, "{}", False), (FINISHED, "", True)],
    ids=["no record", "half a record", "a record of version 0.1", "empty marker"],
)
def test_a_finished_run_with_damaged_files_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | None, kept: bool
):
    """A kill while the directory was cleared, or a power failure, would make it unusable."""
    monkeypatch.chdir(tmp_path)
    choice = choose_directory(tmp_path, PARTS, "exact", print)
    (choice.directory / "step-000000001").mkdir(parents=True)
    DVC_LOCK.write_text("md5: 99914b932bd37a50b983c5e7c90ae93b")
    (choice.directory / RECORD).write_text(json.dumps(choice.record))
    mark_finished(choice.directory, "0a" * 16)
    if content is None:
        (choice.directory / name).unlink()
    else:
        (choice.directory / name).write_text(content)
    with lock_run_directory(choice.directory, print, choice.record) as starts_over:
        assert starts_over is not kept
        assert json.loads((choice.directory / RECORD).read_text()) == choice.record
