"""A run that was broken off and gone on with ends as one that was not: same weights, losses and metrics."""

import errno
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.core.errors import UserError
from lean_finetune.model.load_model import load_model
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.small_model import CPU, spec_of
from tests.train.interrupted import STEPS, Breaking, Outcome, finish, in_parts, interrupt, small_job

METHODS = ("full", "lora", "qlora", "int8_lora")
FAST = [("qlora", "paged_adamw_8bit"), ("full", "adafactor")]
REST = [pair for pair in itertools.product(METHODS, OPTIMIZERS) if pair not in FAST]


pytestmark = pytest.mark.usefixtures("one_thread")


def whole_and_parts(model: Path, directory: Path, method: str, optim: dict, **spec) -> tuple[Outcome, Outcome]:
    """A run in one go, and the same stopped after its first and third step."""
    # Tables that bitsandbytes makes once a process would else be counted in the first of both alone.
    load_model(model, spec_of(method=method), CPU)
    job = small_job(model, directory / "tokens", method=method, lora_dropout=0.1, optim=optim, **spec)
    return finish(job), in_parts(job, directory / "kept", [1, 3])


@pytest.mark.parametrize(("method", "optimizer"), FAST)
def test_interrupted_run_equals_an_uninterrupted_one(small_llama: Path, tmp_path: Path, method: str, optimizer: str):
    """Weights, losses, memory figures: not a bit may tell that the process ended twice."""
    whole, parts = whole_and_parts(small_llama, tmp_path, method, {"name": optimizer})
    whole.check_equal(parts)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "optimizer"), REST)
def test_interrupted_run_equals_an_uninterrupted_one_for_every_method_and_optimizer(
    small_llama: Path, tmp_path: Path, method: str, optimizer: str
):
    whole, parts = whole_and_parts(small_llama, tmp_path, method, {"name": optimizer})
    whole.check_equal(parts)


PRECISIONS = [
    ("full", "bf16", {"name": "adamw", "master_weights": True}),
    ("full", "bf16", {"name": "adamw_8bit", "master_weights": True}),
    ("full", "bf16", {"name": "adafactor"}),
    ("full", "pure_bf16", {"name": "adafactor"}),
    ("full", "pure_bf16", {"name": "adamw"}),
    ("lora", "fp16", {"name": "adamw"}),
    ("lora", "pure_bf16", {"name": "lion_8bit"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "precision", "optim"), PRECISIONS)
def test_interrupted_run_equals_an_uninterrupted_one_in_every_precision(
    small_llama: Path, tmp_path: Path, method: str, precision: str, optim: dict
):
    """State in another type than the weights', rounded to theirs as PyTorch's own loading does."""
    whole, parts = whole_and_parts(small_llama, tmp_path, method, optim, precision=precision)
    whole.check_equal(parts)


def test_interrupted_step_is_repeated_with_the_same_dropout(small_llama: Path, tmp_path: Path):
    """What half a step drew or added up must leave no trace."""
    job = small_job(small_llama, tmp_path / "tokens", lora_dropout=0.3)
    interrupt(job, tmp_path / "kept", stop_within=2)
    checkpoints = Breaking(tmp_path / "kept")
    assert checkpoints.first_step == 2
    finish(job).check_equal(finish(job, checkpoints))


def test_failed_run_resumes_from_its_last_checkpoint(small_llama: Path, tmp_path: Path):
    """Nothing is saved as the power fails: what was kept before serves."""
    job = small_job(small_llama, tmp_path / "tokens", lora_dropout=0.3)
    interrupt(job, tmp_path / "kept", fail_after=3, every_step=True)
    said: list[str] = []
    checkpoints = Breaking(tmp_path / "kept", notify=said.append)
    assert checkpoints.first_step == 3
    finish(job).check_equal(finish(job, checkpoints))
    assert len(said) == 1 and said[0].startswith(f"train: resumed at optimizer step 3 of {STEPS} (checkpoint of 20")


def test_a_run_stopped_in_its_first_step_starts_again(small_llama: Path, tmp_path: Path):
    """There is nothing to keep before a step is done."""
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "kept", stop_within=0)
    checkpoints = Breaking(tmp_path / "kept")
    assert checkpoints.first_step == 0 and "no checkpoint" in checkpoints.resume_hint()
    finish(job).check_equal(finish(job, checkpoints))


def test_memory_figures_include_earlier_processes(small_llama: Path, tmp_path: Path):
    """The largest batch is in the first step: a process that begins later never sees what it took."""
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "kept", stop_after=1)
    found = CheckpointStore(tmp_path / "kept", 2, print).newest()
    assert found is not None
    found.values["memory_by_phase"]["backward"]["rss_bytes"] = 1 << 50
    checkpoints = Breaking(tmp_path / "kept")
    checkpoints._found = found
    by_phase = train(job, make_meter(CPU), checkpoints).memory_by_phase
    assert by_phase["backward"]["rss_bytes"] == 1 << 50
    assert by_phase["forward"]["rss_bytes"] not in (None, 0, 1 << 50)


@pytest.mark.slow
def test_checkpoints_do_not_change_results(small_llama: Path, tmp_path: Path):
    """A run that keeps every step is the run that keeps none, to the measured byte."""
    job = small_job(small_llama, tmp_path / "tokens", lora_dropout=0.3)
    checkpoints = Breaking(tmp_path / "kept", every_step=True)
    finish(job).check_equal(finish(job, checkpoints))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [f"step-{STEPS:09d}"], "the end of training"


@pytest.mark.parametrize("part", ["write_loaded", "sha256_file"])
@pytest.mark.slow
def test_full_disk_costs_a_checkpoint_and_not_the_run(small_llama: Path, tmp_path: Path, monkeypatch, part: str):
    """While the tensors are written, or while a thread finishes the checkpoint: what was kept before stays."""
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "kept", stop_after=1)
    said: list[str] = []
    checkpoints = Breaking(tmp_path / "kept", notify=said.append, every_step=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"lean_finetune.train.checkpoint.checkpoint_files.{part}", full)
    finish(job).check_equal(finish(job, checkpoints))
    assert len(said) == 1 + STEPS and all("No space left" in line for line in said[1:])
    assert said[1].startswith("warning: no checkpoint was made, earlier ones are kept: ")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-000000001"]


def test_weights_that_are_not_finite_are_not_saved(small_llama: Path, tmp_path: Path):
    """A checkpoint of broken weights would end every later run, too; the message says what is there and what is not."""
    job = small_job(small_llama, tmp_path / "tokens", optim={"name": "sgd", "lr": 1.0, "schedule": "constant"})
    broken = replace(job, optim_spec=replace(job.optim_spec, lr=1e45))

    def diverge(checkpoints: Breaking) -> str:
        with pytest.raises(UserError) as told:
            train(broken, make_meter(CPU), checkpoints)
        return str(told.value)

    assert "must be finite" in (text := diverge(Breaking(tmp_path / "kept", every_step=True)))
    assert "no checkpoint was made" in text
    assert not list((tmp_path / "kept").glob("step-*"))

    interrupt(job, tmp_path / "kept", stop_after=2)
    assert "the checkpoint of optimizer step 2 is kept" in (text := diverge(Breaking(tmp_path / "kept")))
    assert "fails here again; changed parameters start at the first step" in text
