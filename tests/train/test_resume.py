"""A run that was interrupted and resumed ends as an uninterrupted one: same weights, losses and metrics."""

import errno
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import REFERENCE
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.offload.activation_offload import make_offload
from lean_finetune.step.offload.disk_weights import DiskPlace
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore
from lean_finetune.train.job import TrainJob
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.estimate_cpu import save_small
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.model.quantized import NF4, save_bitsandbytes, save_fp8_experts, save_mxfp4
from tests.small_model import CPU, spec_of
from tests.train.interrupted import STEPS, Breaking, finish, in_parts, interrupt, small_job
from tests.train.jobs import make_job, plan_of, random_lengths, random_tokens

METHODS = ("full", "lora", "qlora", "int8_lora")
FAST = [("full", "adafactor")]
REST = [pair for pair in itertools.product(METHODS, OPTIMIZERS) if pair not in FAST]


pytestmark = pytest.mark.usefixtures("one_thread")


PRECISIONS = [
    ("full", {"optimizer": "adamw", "master_weights": True}, "bf16"),
    ("full", {"optimizer": "adamw_8bit", "master_weights": True}, "bf16"),
    ("full", {"optimizer": "adafactor"}, "bf16"),
    ("full", {"optimizer": "adafactor"}, "pure_bf16"),
    ("full", {"optimizer": "adamw"}, "pure_bf16"),
    ("lora", {"optimizer": "adamw"}, "fp16"),
    ("lora", {"optimizer": "lion_8bit"}, "pure_bf16"),
]
"""State in another type than the weights', which PyTorch's own loading would round to theirs."""
SLOW = [*((method, {"optimizer": name}, "fp32") for method, name in REST), *PRECISIONS]


@pytest.mark.parametrize(
    ("method", "optim", "precision"),
    [(m, {"optimizer": o}, "fp32") for m, o in FAST] + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
    ids=str,
)
def test_interrupted_run_equals_an_uninterrupted_one(
    small_llama: Path, tmp_path: Path, method: str, optim: dict, precision: str
):
    """A bit of weights, losses or memory figures that depends on two interruptions."""
    # bitsandbytes creates tables once a process; the first run alone would count them.
    load_model(small_llama, spec_of(method=method), CPU)
    options: dict[str, Any] = {"method": method, "optim": optim, "precision": precision}
    job = small_job(small_llama, tmp_path / "tokens", lora_dropout=0.1, **options)
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "method"),
    [(save_mxfp4, "full"), (save_fp8_experts, "lora"), (save_fp8_experts, "int8_lora")],
)
def test_a_run_from_unpacked_files_resumes_to_the_same_bytes(tmp_path: Path, save: Any, method: str):
    """Weights that differ each time they are unpacked."""
    job = small_job(save(tmp_path / "model"), tmp_path / "tokens", method=method, precision="bf16")
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["qlora", "int8_lora"])
def test_a_run_from_packed_files_resumes_and_learns_what_packing_learns(tmp_path: Path, method: str):
    """A base of bitsandbytes that differs from the one that training packs, by a bit."""
    packed = {**NF4, "bnb_4bit_use_double_quant": True} if method == "qlora" else {"load_in_8bit": True}
    model = save_bitsandbytes(tmp_path / "model", **packed)
    found = [
        small_job(directory, tmp_path / "tokens", method=method, precision="bf16")
        for directory in (model, model / "16_bit")
    ]
    resumed = in_parts(found[0], tmp_path / "checkpoints", [1, 3])
    finish(found[0]).check_equal(resumed)
    assert finish(found[1]).weights == resumed.weights


@pytest.mark.slow
@pytest.mark.parametrize(("method", "experts"), [("qlora", "all"), ("lora", "all"), ("full", "none")])
def test_an_interrupted_mixture_equals_an_uninterrupted_one(tmp_path: Path, method: str, experts: str):
    """Adapters of experts, or packed experts, that a checkpoint leaves out."""
    save_small("Qwen3-MoE", tmp_path / "model")
    load_model(tmp_path / "model", spec_of(method=method), CPU)
    job = small_job(tmp_path / "model", tmp_path / "tokens", method=method, lora_experts=experts)
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "place"), [("int8", "none"), ("fp8", "disk")])
def test_a_run_with_compressed_activations_resumes_to_the_same_bytes(small_llama, tmp_path: Path, bits, place):
    """Codes that depend on what a process computed before."""
    job = small_job(small_llama, tmp_path / "tokens", method="full", grad_ckpt=bits == "fp8")
    job = replace(job, offload=make_offload(place, bits, CPU, tmp_path))
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))


@pytest.mark.slow
def test_interrupted_step_is_repeated_with_the_same_dropout(small_llama: Path, tmp_path: Path):
    """Random numbers or gradients of half a step used twice."""
    job = small_job(small_llama, tmp_path / "tokens", lora_dropout=0.3)
    interrupt(job, tmp_path / "checkpoints", stop_within=2)
    checkpoints = Breaking(tmp_path / "checkpoints")
    assert checkpoints.first_step == 2
    finish(job).check_equal(finish(job, checkpoints))


@pytest.mark.slow
def test_failed_run_resumes_from_its_last_checkpoint(small_llama: Path, tmp_path: Path):
    """Nothing is saved when the power fails: the checkpoint before is used."""
    job = small_job(small_llama, tmp_path / "tokens", lora_dropout=0.3)
    interrupt(job, tmp_path / "checkpoints", fail_after=3, every_step=True)
    messages: list[str] = []
    checkpoints = Breaking(tmp_path / "checkpoints", notify=messages.append)
    assert checkpoints.first_step == 3
    finish(job).check_equal(finish(job, checkpoints))
    assert len(messages) == 1 and messages[0].startswith(
        f"train: resumed at optimizer step 3 of {STEPS} (checkpoint of 20"
    )
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == [f"step-{STEPS:09d}"]


@pytest.mark.slow
def test_a_run_stopped_in_its_first_step_starts_again(small_llama: Path, tmp_path: Path):
    """Before the first finished step there is nothing to save."""
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "checkpoints", stop_within=0)
    checkpoints = Breaking(tmp_path / "checkpoints")
    assert checkpoints.first_step == 0 and "no checkpoint" in checkpoints.resume_hint()
    finish(job).check_equal(finish(job, checkpoints))


@pytest.mark.slow
def test_memory_figures_include_earlier_processes(small_llama: Path, tmp_path: Path):
    """The largest batch is in the first step: a process that begins later never sees what it took."""
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "checkpoints", stop_after=1)
    found = CheckpointStore(tmp_path / "checkpoints", 2, print).newest()
    assert found is not None
    found.values["memory_by_phase"]["backward"]["rss_bytes"] = 1 << 50
    checkpoints = Breaking(tmp_path / "checkpoints")
    checkpoints._found = found
    by_phase = train(job, make_meter(CPU), checkpoints).memory_by_phase
    assert by_phase["backward"]["rss_bytes"] == 1 << 50
    assert by_phase["forward"]["rss_bytes"] not in (None, 0, 1 << 50)


@pytest.mark.parametrize("part", ["write_loaded", "sha256_file"])
@pytest.mark.slow
def test_full_disk_costs_a_checkpoint_and_not_the_run(small_llama: Path, tmp_path: Path, monkeypatch, part: str):
    """While the tensors are written, or while a thread finishes the checkpoint: the one before stays."""
    job = small_job(small_llama, tmp_path / "tokens")
    interrupt(job, tmp_path / "checkpoints", stop_after=1)
    messages: list[str] = []
    checkpoints = Breaking(tmp_path / "checkpoints", notify=messages.append, every_step=True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"lean_finetune.train.checkpoint.checkpoint_files.{part}", full)
    finish(job).check_equal(finish(job, checkpoints))
    assert len(messages) == 1 + STEPS and all("No space left" in line for line in messages[1:])
    assert messages[1].startswith("warning: no checkpoint was made, that of optimizer step 1 is kept: ")
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-000000001"]


def test_weights_that_are_not_finite_are_not_saved(small_llama: Path, tmp_path: Path):
    """A checkpoint of broken weights would end every later run; the message says which checkpoint there is."""
    job = small_job(small_llama, tmp_path / "tokens", optim={"optimizer": "sgd", "lr": 1.0, "schedule": "constant"})
    broken = replace(job, train=changed(job.train, lr=1e45))

    def diverge(checkpoints: Breaking) -> str:
        with pytest.raises(UserError) as error:
            train(broken, make_meter(CPU), checkpoints)
        return str(error.value)

    assert "must be finite" in (text := diverge(Breaking(tmp_path / "checkpoints", every_step=True)))
    assert "no checkpoint was made" in text
    assert not list((tmp_path / "checkpoints").glob("step-*"))

    interrupt(job, tmp_path / "checkpoints", stop_after=2)
    assert "the checkpoint of optimizer step 2 is kept" in (text := diverge(Breaking(tmp_path / "checkpoints")))
    assert "fails here again; changed parameters start at the first step" in text


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_run_with_its_state_on_disk_goes_on_in_memory_and_the_reverse(small_llama, tmp_path: Path, optimizer: str):
    """A checkpoint of state on disk that is stale, incomplete or named otherwise."""
    moved = {"optimizer": optimizer, "offload": "optimizer"}
    place = DiskPlace(directory=tmp_path / "scratch", buffer_bytes=64 * 2**20)
    in_memory = small_job(small_llama, tmp_path / "tokens", method="full", optim=moved)
    on_disk = replace(in_memory, disk=place)
    expected = finish(in_memory)
    for number, (first, second) in enumerate([(on_disk, in_memory), (in_memory, on_disk), (on_disk, on_disk)]):
        interrupt(first, tmp_path / str(number), stop_after=3)
        found = finish(second, Breaking(tmp_path / str(number)))
        assert (found.weights, found.curves) == (expected.weights, expected.curves)


@pytest.mark.slow
def test_a_disk_that_refuses_state_ends_the_run_with_what_is_kept(small_llama, tmp_path: Path, monkeypatch):
    """A traceback from a thread, or a checkpoint of state that was half written."""
    place = DiskPlace(directory=tmp_path / "scratch", buffer_bytes=64 * 2**20)
    moved = {"offload": "optimizer", "disk": place}
    job = small_job(small_llama, tmp_path / "tokens", method="full", optim=moved)
    interrupt(job, tmp_path / "checkpoints", stop_after=2)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as patch,
        pytest.raises(
            UserError,
            match=r"^train\.offload_to: .*No space left.*; the checkpoint of optimizer step 2 is kept: the same",
        ),
    ):
        patch.setattr(os, "pwritev", full)
        finish(job, Breaking(tmp_path / "checkpoints"))
    assert finish(job, Breaking(tmp_path / "checkpoints")).weights == finish(job).weights


def labelled_job(model: Path, directory: Path, **spec: Any) -> TrainJob:
    """A run of KTO: rows 0, 2, 4, … have labels, and each is followed by its mismatch."""
    rows, heldout = random_tokens(directory, random_lengths(6, 30, 2 * STEPS * 4), heldout_rows=8)
    for split in (rows, heldout):
        split.give(KINDS["labelled"].label_column, np.arange(len(split)) // 2 % 2 == 0)
        split.give(REFERENCE, np.linspace(-60, -20, len(split), dtype=np.float32))
    planned = plan_of(rows, np.arange(0, len(rows), 2).reshape(STEPS, 2, 2).tolist())
    longest = [int(np.maximum(rows.lengths[one.rows], rows.lengths[one.rows + 1]).max()) for one in all_of(planned)]
    plan = replace(planned, length=np.array(longest, np.int32), kind=KINDS["labelled"])
    return make_job(model, (rows, heldout), plan, objective="kto", measured_steps=frozenset(range(STEPS)), **spec)


def all_of(plan: Plan) -> list[MicroBatch]:
    return [plan.micro_batch(number) for number in range(len(plan))]


def test_an_interrupted_run_of_labelled_rows_equals_an_uninterrupted_one(small_llama: Path, tmp_path: Path):
    """A divergence that a resumed process estimates from other answers; figures that a checkpoint forgets."""
    job = labelled_job(small_llama, tmp_path / "tokens", method="lora", lr=1e-3, heldout_rows=4)
    whole = finish(job)
    names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl")
    for row in whole.curves:
        assert all(row[name] is not None for name in names) and row["kl"] >= 0.0
        assert (row["heldout_loss"] is None) == (row["heldout_reward_accuracy"] is None)
    assert whole.curves[-1]["heldout_kl"] is not None
    interrupt(job, tmp_path / "checkpoints", stop_within=2)
    whole.check_equal(in_parts(job, tmp_path / "checkpoints", [3]))


def test_an_interrupted_run_of_pairs_equals_an_uninterrupted_one(small_llama: Path, tmp_path: Path):
    """References of other rows after a resume, or held-out rewards and a best step that a checkpoint forgets."""
    rows, heldout = random_tokens(tmp_path / "tokens", random_lengths(6, 30, STEPS * 8), heldout_rows=8)
    for split in (rows, heldout):
        split.give(REFERENCE, np.linspace(-60, -20, len(split), dtype=np.float32))
    plan = replace(plan_of(rows, np.arange(len(rows)).reshape(STEPS, 2, 4).tolist()), kind=KINDS["pair"])
    best: dict[str, Any] = {"keep": "best", "best_by": "accuracy", "heldout_every_steps": 1, "heldout_rows": 8}
    job = make_job(small_llama, (rows, heldout), plan, objective="dpo", method="lora", lr=1e-2, **best)
    job = replace(job, measured_steps=frozenset(range(STEPS)))
    whole = finish(job, Breaking(tmp_path / "whole", every_step=True))
    assert "kept_step" in whole.metrics and len({row["heldout_reward_margin"] for row in whole.curves}) == STEPS
    interrupt(job, tmp_path / "checkpoints", stop_within=2)
    whole.check_equal(in_parts(job, tmp_path / "checkpoints", [3]))
