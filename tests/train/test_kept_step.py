"""`train.keep=best` and `train.stop_after_no_gain`: which weights are written, and when training ends."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_finetune.config.load import load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.train.heldout_loss import HeldoutLosses
from lean_finetune.train.kept_step import kept_figures, kept_lines, kept_step, stops_early
from tests.conftest import ROOT
from tests.kit.specs import changed
from tests.small_model import spec_of
from tests.train.interrupted import Breaking, finish, interrupt
from tests.train.jobs import make_job, plan_of, random_tokens

LOSSES = (3.0, 2.0, 2.5, 2.0, 2.25, 1.0, 1.5)
"""Held-out losses after steps 1, 2, …: the lowest of the first five is that of step 2, which step 4 only equals."""
ACCURACIES = (0.5, 0.25, 0.5, 0.75, 0.75, 0.5, 0.5)
"""Held-out accuracies after the same steps."""
BEST = {"keep": "best", "stop_after_no_gain": 3}

pytestmark = pytest.mark.usefixtures("one_thread")


def curves_of(*losses: float | None) -> list[dict[str, Any]]:
    return [{} if loss is None else {"heldout_loss": loss} for loss in losses]


def test_the_first_of_the_lowest_losses_is_kept():
    best, last = changed(spec_of(), keep="best"), spec_of()
    assert kept_step(last, curves_of(3.0, 2.0)) is None
    assert kept_step(best, curves_of(None, None)) is None
    assert kept_step(best, curves_of(None, 3.0, None, 2.0, None, 2.0, None)) == 4


def test_training_stops_after_so_many_losses_without_a_gain():
    patient = changed(spec_of(), stop_after_no_gain=2)
    assert not stops_early(patient, curves_of(None, 3.0, None, 2.0, None, 2.5))
    assert stops_early(patient, curves_of(None, 3.0, None, 2.0, None, 2.5, None, 2.0))
    assert not stops_early(spec_of(), curves_of(1.0, 2.0, 3.0, 4.0))


def test_both_need_held_out_losses():
    params = load_params(ROOT / "params.yaml")
    for flag in ("train.keep=best", "train.stop_after_no_gain=3"):
        with pytest.raises(UserError, match=f"^{flag.partition('=')[0]}: .*heldout_every_steps, which is blank"):
            with_flags(params, [flag, "train.heldout_every_steps=null"])


def test_accuracy_decides_for_pairs():
    """Of equals the first is kept, although a later one has a lower loss; higher is better."""
    losses, accuracies = (0.6, 0.5, 0.4, 0.3, 0.2), (0.5, 0.75, 0.75, 0.25, 0.75)
    curves = [
        {"heldout_loss": loss, "heldout_reward_accuracy": accuracy}
        for loss, accuracy in zip(losses, accuracies, strict=True)
    ]
    by_loss = changed(spec_of(), keep="best", stop_after_no_gain=3)
    by_accuracy = changed(by_loss, best_by="accuracy")
    assert (kept_step(by_loss, curves), kept_step(by_accuracy, curves)) == (5, 2)
    assert not stops_early(by_loss, curves) and not stops_early(by_accuracy, curves[:4])
    assert stops_early(by_accuracy, curves)
    figures = kept_figures(by_accuracy, curves, 9)
    assert figures == {"kept_step": 2, "heldout_reward_accuracy_kept": 0.75, "stopped_after_step": 5}
    assert list(kept_lines(by_accuracy, figures, 9)) == [
        "train: stopped after optimizer step 5 of 9: the held-out accuracy rose no more",
        "train: keeps the weights after optimizer step 2, with the highest held-out accuracy (0.7500)",
    ]


def test_accuracy_without_pairs_or_without_an_effect_is_refused():
    params = load_params(ROOT / "params.yaml")
    for flags, message in (
        (["train.keep=best"], "accuracy is the share of pairs in the right order, or of labels; got accuracy with"),
        (["train.objective=dpo"], "has an effect only with train.keep=best or train.stop_after_no_gain; got accuracy"),
    ):
        with pytest.raises(UserError, match=f"^train.best_by: {message}"):
            with_flags(params, ["train.best_by=accuracy", *flags])


def job_of(model: Path, tmp_path: Path, steps: int, **section: Any) -> Any:
    """The first `steps` steps of a run of seven, all at the same learning rate."""
    tokens = random_tokens(tmp_path / "tokens", [8] * 14)
    plan = plan_of(tokens[0], np.arange(14).reshape(7, 1, 2)[:steps].tolist())
    constant: dict[str, Any] = {"schedule": "constant", "warmup_fraction": 0.0, "lr": 0.01, "lora_dropout": 0.1}
    job = make_job(model, tokens, plan, loader_threads=0, heldout_every_steps=1, **constant, **section)
    return replace(job, measured_steps=frozenset())


@pytest.fixture(autouse=True)
def losses(monkeypatch: pytest.MonkeyPatch):
    """Held-out figures are `LOSSES` and `ACCURACIES`."""

    def figures(self: HeldoutLosses, step: int, parallel: Any) -> dict[str, float]:
        return {"heldout_loss": LOSSES[step], "heldout_reward_accuracy": ACCURACIES[step]}

    monkeypatch.setattr(HeldoutLosses, "after_step", figures)


@pytest.mark.parametrize(("objective", "rows"), [("sft", 5), ("dpo", 10), ("kto", 10)])
def test_held_out_rows_count_rows_of_the_data(small_llama: Path, tmp_path: Path, objective: str, rows: int):
    """Half as many pairs as asked for, where stage evaluate counts pairs."""
    job = job_of(small_llama, tmp_path, 2, objective=objective, heldout_rows=5)
    assert HeldoutLosses(job, 2).count == rows


def test_the_best_weights_are_those_of_a_run_that_ended_there(small_llama: Path, tmp_path: Path):
    """Weights of the last step, or a best checkpoint that later ones have replaced."""
    ended = finish(job_of(small_llama, tmp_path, 2))
    best = finish(job_of(small_llama, tmp_path, 7, **BEST), Breaking(tmp_path / "best", every_step=True))
    assert best.weights == ended.weights and len(best.curves) == 5
    figures = {"kept_step": 2, "heldout_loss_kept": 2.0, "stopped_after_step": 5}
    assert figures.items() <= best.metrics.items() and not figures.keys() & ended.metrics.keys()
    assert list(kept_lines(spec_of(), figures, 7)) == [
        "train: stopped after optimizer step 5 of 7: the held-out loss fell no more",
        "train: keeps the weights after optimizer step 2, with the lowest held-out loss (2.0000)",
    ]


SLOW = [(1, "loss"), (4, "loss"), (5, "loss"), (3, "accuracy")]


@pytest.mark.parametrize(
    ("fail_after", "best_by"),
    [(2, "loss"), (5, "accuracy"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_an_interrupted_run_keeps_the_same_weights(small_llama: Path, tmp_path: Path, fail_after: int, best_by: str):
    """A choice that a resumed run has forgotten, before the best step, at it, after it, and after the last one."""
    job = job_of(small_llama, tmp_path, 7, **BEST, best_by=best_by)
    interrupt(job, tmp_path / "cut", fail_after=fail_after, every_step=True)
    whole = finish(job, Breaking(tmp_path / "whole", every_step=True))
    assert whole.metrics["kept_step"] == {"loss": 2, "accuracy": 4}[best_by]
    whole.check_equal(finish(job, Breaking(tmp_path / "cut", every_step=True)))


def test_a_last_step_that_is_the_best_is_kept(small_llama: Path, tmp_path: Path):
    ended = finish(job_of(small_llama, tmp_path, 6))
    best = finish(job_of(small_llama, tmp_path, 6, keep="best"), Breaking(tmp_path / "best"))
    assert best.weights == ended.weights and best.metrics["kept_step"] == 6


def test_a_best_checkpoint_that_is_gone_or_damaged_ends_the_run(small_llama: Path, tmp_path: Path):
    """Weights of another step in its place."""
    job = job_of(small_llama, tmp_path, 7, **BEST)
    for damage in ("gone", "damaged"):
        directory = tmp_path / damage
        interrupt(job, directory, fail_after=3, every_step=True)
        if damage == "gone":
            shutil.rmtree(directory / "step-000000002")
        else:
            (directory / "step-000000002/tensors.safetensors").write_bytes(b"")
        with pytest.raises(
            UserError, match=r"^train.keep: the best weights are those of .*step-000000002, which cannot"
        ):
            finish(job, Breaking(directory, every_step=True))


def test_without_checkpoints_nothing_has_the_best_weights(small_llama: Path, tmp_path: Path):
    """A benchmark that reports weights of the last step as the best ones."""
    with pytest.raises(ValueError, match="only a checkpoint"):
        finish(job_of(small_llama, tmp_path, 7, **BEST))


def test_figures_of_a_run_that_keeps_the_last_step_are_as_before():
    assert kept_figures(spec_of(), curves_of(3.0, 2.0), 2) == {}
