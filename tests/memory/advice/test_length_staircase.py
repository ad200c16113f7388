"""`fit --lengths`: reserved memory by step, of steps that are put together from a few traced micro-batches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lean_finetune.commands.fit_text import staircase_lines
from lean_finetune.commands.row_lengths import of_quantiles
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice import length_staircase
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.advice.length_staircase import Staircase, predict_staircase, with_rows
from lean_finetune.memory.advice.plan_memory import ALLOCATORS, replay, sample_micro_batches
from lean_finetune.memory.advice.planned_run import replanned
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.predict.deep_events import step_events
from lean_finetune.step.batches import BatchShape
from tests.memory.common import llama
from tests.plan.common import index_of

PLAYED = 24
"""Micro-batches that are played here."""
CASES: dict[str, list[str]] = {
    "fixed rows": ["train.method=lora", "bucket.mode=fixed", "bucket.fixed_rows=2", "train.grad_ckpt=false"],
    "bucketed": ["train.method=qlora"],
    "packed": ["train.method=full", "bucket.mode=packed"],
    "one micro-batch a step": ["train.method=full", "train.optimizer_in_backward=true", "train.max_grad_norm=null"],
}


def run_of(tmp_path: Path, flags: list[str], tokens_per_step: int = 4096) -> Run:
    llama(hidden_size=512, intermediate_size=1536, vocab_size=8192, num_attention_heads=8).save_pretrained(tmp_path)
    usual = [f"model.name={tmp_path}", "hardware.gpu=24GiB", "data.max_length=1024", "bucket.max_tokens=2048"]
    if "train.optimizer_in_backward=true" in flags:
        usual += ["bucket.mode=fixed", "bucket.fixed_rows=1"]
        tokens_per_step = 1
    p = with_flags(load_params(COMMON_PARAMS), [*usual, f"train.tokens_per_step={tokens_per_step}", *flags])
    lengths = of_quantiles("p50=120,p99=900,max=1024")[::40]
    return with_rows(fit_run(p), index_of(lengths, lengths - 1))


@pytest.mark.parametrize("case", ["fixed rows", *(pytest.param(c, marks=pytest.mark.slow) for c in [*CASES][1:])])
def test_reserved_memory_is_that_of_traced_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str):
    """Stairs of other sizes than the run's own micro-batches make."""
    monkeypatch.setattr(length_staircase, "MOST_EVENTS", 1)
    monkeypatch.setattr(length_staircase, "LEAST_MICRO_BATCHES", PLAYED)
    run = run_of(tmp_path, CASES[case])
    prediction, found = predict_staircase(run)
    assert prediction.by_phase == run.predict().by_phase and run.planned is not None
    plan, lengths = run.planned.own_plan, run.planned.lengths
    steps: dict[int, list[BatchShape]] = {}
    for number in sample_micro_batches(plan, lengths, prediction.steps_of_peak, PLAYED):
        micro_batch = plan.micro_batch(number)
        steps.setdefault(micro_batch.step, []).append(BatchShape.of(micro_batch, lengths))
    traced = tuple(map(tuple, steps.values()))
    events, _ = step_events(run.model, traced)
    for kind, expandable in ALLOCATORS.items():
        real = replay(events, traced, expandable=expandable, capacity_bytes=None)
        made = found.memory.unlimited[kind]
        assert found.memory.steps == tuple(steps) and len(made.steps) == len(real.steps) > 2
        for made_step, real_step in zip(made.steps, real.steps, strict=True):
            assert made_step.reserved_peak_bytes == pytest.approx(real_step.reserved_peak_bytes, rel=0.01)
        assert made.allocated_peak_bytes == pytest.approx(real.allocated_peak_bytes, rel=0.001)


@pytest.fixture(scope="module")
def stairs(tmp_path_factory: pytest.TempPathFactory) -> Staircase:
    # The model's and peft's code, whose micro-batches need more memory: the first step does not reserve all of it.
    flags = [*CASES["fixed rows"], "train.lora.joined=none", "train.fused_norms=none"]
    return predict_staircase(run_of(tmp_path_factory.mktemp("model"), flags))[1]


def test_the_text_has_each_stair_and_the_json_each_step(stairs: Staircase):
    """A stair without its step or its cause, or figures that differ between text and JSON."""
    lines = list(staircase_lines(stairs))
    content = stairs.as_json()
    rises = stairs.stairs("native")
    assert len(rises) > 1 and [size for _, size, _, _ in rises] == sorted(size for _, size, _, _ in rises)
    steps = {row["step"]: row for row in content["steps"]}
    for number, size, shape, _ in rises:
        assert steps[number]["reserved_bytes_native"] == size and steps[number]["tokens_per_row"] == shape.length
    assert lines[0].startswith("staircase            reserved with fixed segments, ") and "2 rows of " in lines[1]
    assert sum(line.startswith("  step ") for line in lines) == len(rises) and len(rises) < 10
    assert max(len(line) for text in lines for line in text.splitlines()) <= 80
    assert content["settled_step"]["native"] == rises[-1][0]
    assert content["random_order_reserved_bytes"] == stairs.shuffled.reserved_peak_bytes > 0


def test_a_staircase_that_does_not_fit_fails_at_its_step(stairs: Staircase):
    """A verdict by the first step, of a run that needs more hours later."""
    reserved = [step.reserved_peak_bytes for step in stairs.memory.unlimited["native"].steps]
    assert reserved[-1] > reserved[0] and stairs.memory.failing_step("native") is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["hardware.num_gpus=2", "train.sharding=ddp"], "needs one GPU"),
        (["train.method=full", "train.offload=parameters"], r"not known with train\.offload=parameters"),
        pytest.param(
            ["hardware.gpu=auto"], "needs a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
        ),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path: Path, flags: list[str], expected: str):
    with pytest.raises(UserError, match=expected):
        run_of(tmp_path, flags)


def test_advice_plans_the_rows_anew(tmp_path: Path):
    """Advice that looks for a file of rows which does not exist."""
    run = run_of(tmp_path, CASES["bucketed"])
    bucket = run.bucket.model_copy(update={"max_tokens": 1024})
    changed = replanned(run, replace(run, bucket=bucket))
    assert changed.planned is not None and changed.planned.plan.padded_tokens.max() <= 1024
