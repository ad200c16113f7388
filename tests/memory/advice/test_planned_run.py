"""Changed runs are judged by the verdict's own rule, with the plan that the change leads to."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from lean_finetune.config.load import with_flags
from lean_finetune.memory.advice.planned_run import replanned, with_plan
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.verdict import confirmed
from lean_finetune.plan.batch_plan import read_plan
from lean_finetune.plan.optimizer_steps import read_index
from lean_finetune.plan.planned_rows import PlannedRows
from lean_finetune.plan.planner import PlanSettings
from stages.bucket import main as bucket
from stages.estimate import main as estimate
from tests.memory.common import card, card_for, llama, pin
from tests.memory.workloads import workload
from tests.plan.common import batch_settings_of
from tests.token_files import write_index
from tests.workspace import invoke, lay_out

LENGTHS = (250, 241, 190, 188, 170, 163, 140, 101, 99, 73, 64, 40)
CONFIG = llama(num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=256, tie_word_embeddings=True)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    write_index(tmp_path / "index.arrow", [([3] * length, [1, length], None) for length in LENGTHS])
    return tmp_path / "index.arrow"


def planned_run(index: Path, *, memory_bytes: int, mode: Any = "bucketed", **setting: Any) -> Run:
    """A run on a card of this size, with a plan as stage bucket makes it."""
    settings = PlanSettings(
        micro_batches=batch_settings_of(mode=mode, max_tokens=1024, fixed_rows=4),
        seed=1,
        epochs=2,
        tokens_per_step=1200,
        weights=(1.0,),
    )
    run = workload(config=CONFIG, mode=mode, tokens_per_step=1200, **setting)
    flags = ["estimate.headroom_percent=0", "train.expandable_segments=false"]
    run = replace(run, params=with_flags(run.params, flags), device=card(memory_bytes, capability=(9, 0)))
    plan = settings.plan(read_index(index, (1.0,)))
    return with_plan(run, PlannedRows(plan=plan, lengths=np.array(LENGTHS, np.int32), index=index, settings=settings))


def peak_if_it_fits(run: Run, changed: Run) -> int | None:
    prediction = confirmed(run, Candidate(options=(), run=changed, slowdown=1.0), 0)
    return None if prediction is None else prediction.peak.bytes


def resized(run: Run, **sizes: int) -> Run:
    """The run with other sizes in section bucket."""
    return replace(run, bucket=run.bucket.model_copy(update=sizes))


@pytest.mark.parametrize(("mode", "changes"), [("bucketed", {"max_tokens": 512}), ("fixed", {"fixed_rows": 2})])
def test_a_smaller_budget_is_judged_by_the_plan_that_it_leads_to(index, tmp_path, monkeypatch, mode, changes):
    """Half of the worst micro-batch taken for the worst of the plan that stage bucket makes."""
    run = planned_run(index, memory_bytes=1, mode=mode)
    anew = replanned(run, resized(run, **changes)).planned
    assert anew is not None and run.planned is not None
    found = anew.plan
    monkeypatch.chdir(tmp_path)
    values = {
        f"bucket__{key}": value for key, value in {"mode": mode, "max_tokens": 1024, "fixed_rows": 4, **changes}.items()
    }
    lay_out(tmp_path, train__tokens_per_step=1200, train__epochs=2, **values)
    parameters = (tmp_path / "params.yaml").read_text().replace("\nseed: 17", "\nseed: 1")
    (tmp_path / "params.yaml").write_text(parameters)
    assert invoke(bucket, "--index", str(index), "--out", "batches").exit_code == 0
    made = read_plan(Path("batches/plan.arrow"))
    for column in ("step", "rows", "bounds", "length", "supervised"):
        assert np.array_equal(getattr(found, column), getattr(made, column)), column
    assert len(made) > len(run.planned.plan)


def test_gpus_of_tensor_parallelism_train_the_same_rows(index):
    """A change judged by the plan of more ranks than it leaves."""
    run = planned_run(index, memory_bytes=2**30)
    changed = replace(run, setting=replace(run.setting.with_train(tensor_parallel=2), gpus=4))
    anew = replanned(run, changed).planned
    assert anew is not None and anew.plan.ranks == 2


def test_a_budget_below_the_longest_row_does_not_fit(index):
    """Advice that stage bucket refuses."""
    run = planned_run(index, memory_bytes=2**30)
    assert peak_if_it_fits(run, resized(run, max_tokens=128)) is None


def test_a_run_whose_blocks_do_not_fit_does_not_fit(index):
    """Advice whose tensors fit, but not the blocks that the allocator reserves for them."""
    setting = {"method": "lora", "loss_chunk": None}
    roomy = planned_run(index, memory_bytes=2**30, **setting)
    peak_bytes = peak_if_it_fits(roomy, roomy)
    assert peak_bytes is not None
    tight = planned_run(index, memory_bytes=peak_bytes + roomy.device.context.max_bytes, **setting)
    assert peak_if_it_fits(tight, tight) is None


@pytest.mark.slow
def test_advice_for_auto_steps_is_that_for_their_number(index, tmp_path, small_llama, monkeypatch):
    """Changes of a run judged by steps of 65,536 tokens, or by none."""
    monkeypatch.chdir(tmp_path)
    pin(tmp_path, small_llama)
    write_index(index, [([3] * length, [1, length], None) for length in LENGTHS * 20])
    limits = {"bucket__max_tokens": 4096, "train__method": "full", "train__loss_chunk": None}
    values = {**limits, "train__expandable_segments": False}
    free, _ = estimated(tmp_path, gpu="24GiB", train__tokens_per_step="auto", **values)
    gpu = card_for(0.8 * free["peak_bytes_predicted"])
    auto = estimated(tmp_path, gpu=gpu, **values, train__tokens_per_step="auto")
    tokens = json.loads((tmp_path / "batches/figures.json").read_text())["tokens_per_step"]
    assert auto == estimated(tmp_path, gpu=gpu, **values, train__tokens_per_step=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0.99, 0.8, 0.6])
def test_the_stage_accepts_what_it_advised(index, tmp_path, small_llama, monkeypatch, spare):
    """Advice that fits in the search and not in the stage."""
    monkeypatch.chdir(tmp_path)
    pin(tmp_path, small_llama)
    write_index(index, [([3] * length, [1, length], None) for length in LENGTHS * 20])
    limits = {"bucket__max_tokens": 32768, "train__tokens_per_step": 40000}  # Much beside a context on the card.
    values = {"train__method": "full", "train__loss_chunk": None, "train__expandable_segments": False, **limits}
    free, _ = estimated(tmp_path, gpu="24GiB", **values)
    gpu = card_for(spare * free["peak_bytes_predicted"])
    metrics, commands = estimated(tmp_path, gpu=gpu, **values)
    assert metrics["verdict"] != "fits" and commands
    for command in commands:
        again, _ = estimated(tmp_path, gpu=gpu, **{**values, **changes_of(command)})
        assert again["verdict"] == "fits", command


def estimated(directory: Path, *, gpu: str, **values: Any) -> tuple[dict[str, Any], list[str]]:
    """Figures and advised commands of a run, after stages bucket and estimate."""
    common = {"bucket__max_tokens": 1024, "data__max_length": 256, "train__tokens_per_step": 1200, "train__epochs": 2}
    lay_out(directory, hardware__gpu=gpu, estimate__headroom_percent=0.0, **{**common, **values})
    assert invoke(bucket, "--index", "index.arrow", "--out", "batches").exit_code == 0
    paths = {"plan": "batches/plan.arrow", "model-lock": "model.json", "out": "estimate"}
    paths |= dict.fromkeys(("index", "heldout-index"), "index.arrow")
    flags = [part for key, value in {**paths, "metrics": "estimate.json"}.items() for part in (f"--{key}", value)]
    result = invoke(estimate, *flags)
    assert result.exit_code == 0, result.output
    remedies = json.loads((directory / "estimate" / "advice.json").read_text())["remedies"]
    return json.loads((directory / "estimate/figures.json").read_text()), [remedy["command"] for remedy in remedies]


def changes_of(command: str) -> dict[str, Any]:
    """What a line sets, as `lay_out` takes it."""
    pairs = [flag.strip().split("=") for flag in command.split("-S ")[1:]]
    return {key.replace(".", "__"): YAML(typ="safe").load(value) for key, value in pairs}
