"""The pipeline through DVC, in a clone without remote or identity: which stages run, and their outputs."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import load_file

from tests.conftest import ROOT
from tests.pipeline.clone import Clone, commit_all, is_up_to_date, stages_run
from tests.pipeline.conftest import FirstRun
from tests.pipeline.queue import run_queued

STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
WEIGHTS = "data/tuned/adapter_model.safetensors"


def losses(clone: Clone) -> list[str]:
    """The loss column of the curves, as text: equal means equal to the last bit."""
    with open(clone.root / "data/train/curves.csv") as file:
        return [row["loss"] for row in csv.DictReader(file)]


def rows_by_step(clone: Clone) -> list[set[int]]:
    """The training rows of each optimizer step in the plan."""
    with pa.memory_map(str(clone.root / "data/batches/plan.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    steps: dict[int, set[int]] = {}
    for step, rows in zip(table["step"].to_pylist(), table["rows"].to_pylist(), strict=True):
        steps.setdefault(step, set()).update(rows)
    return [steps[step] for step in sorted(steps)]


def test_one_command_runs_every_stage_and_a_second_runs_none(finished: tuple[Clone, FirstRun]):
    clone, first = finished
    # The pins are committed; where the copy's parameters equal them, DVC need not run them again.
    assert [s for s in stages_run(first.output) if not s.startswith("pin")] == [s for s in STAGES if s[:3] != "pin"]
    assert stages_run(clone.dvc("repro")) == []
    assert is_up_to_date(clone)


def test_params_listed_in_dvc_yaml_are_exactly_those_read(finished: tuple[Clone, FirstRun]):
    """A listed key that no code reads reruns a stage. An unlisted one is refused when it is read."""
    clone, first = finished
    params = YAML(typ="safe").load((clone.root / "params.yaml").read_text())

    def leaves(dotted: str) -> set[str]:
        value = params
        for key in dotted.split("."):
            value = value[key]
        return {leaf for key in value for leaf in leaves(f"{dotted}.{key}")} if isinstance(value, dict) else {dotted}

    for path in first.reads.glob("*.json"):
        listed = {leaf for key in STAGES[path.stem].get("params", []) for leaf in leaves(key)}
        assert set(json.loads(path.read_text())) == listed, path.stem
    assert len(list(first.reads.glob("*.json"))) >= 6


def test_the_prediction_is_close_to_the_measurement(finished: tuple[Clone, FirstRun]):
    clone, _ = finished
    predicted = clone.json("data/estimate/figures.json")["peak_bytes_predicted"]
    measured = clone.json("data/train/figures.json")["peak_bytes_measured"]
    assert predicted == pytest.approx(measured, rel=0.01)
    assert clone.json("metrics/report.json")["predicted_error_percent"] == pytest.approx(
        100 * (predicted / measured - 1), abs=0.01
    )


@pytest.mark.slow
def test_grad_ckpt_reruns_estimate_train_report_and_changes_no_weight(clone: Clone):
    """Checkpointing changes memory only: evaluate is not rerun because the weights are the same bytes."""
    weights, column = clone.sha256(WEIGHTS), losses(clone)
    predicted = clone.json("data/estimate/figures.json")["peak_bytes_predicted"]
    output = clone.dvc("exp", "run", "-S", "train.grad_ckpt=true")
    assert stages_run(output) == ["estimate", "train", "report"]
    assert clone.sha256(WEIGHTS) == weights and losses(clone) == column
    assert clone.json("data/estimate/figures.json")["peak_bytes_predicted"] < predicted


@pytest.mark.slow
def test_token_budget_changes_memory_and_no_step(clone: Clone):
    """Micro-batches change memory only: not the rows of a step, nor the weights beyond rounding."""
    rows, column, weights = rows_by_step(clone), losses(clone), load_file(clone.root / WEIGHTS)
    micro_batches = clone.json("data/batches/figures.json")["micro_batches"]
    output = clone.dvc("exp", "run", "-S", "bucket.max_tokens=256", "train")
    assert stages_run(output) == ["bucket", "estimate", "train"]
    assert clone.json("data/batches/figures.json")["micro_batches"] > micro_batches
    assert rows_by_step(clone) == rows
    assert [float(loss) for loss in losses(clone)] == pytest.approx([float(loss) for loss in column], rel=1e-5)
    other = load_file(clone.root / WEIGHTS)
    for name, value in weights.items():
        # Adam divides by the size of the gradient, so rounding shows where that is near zero. Compare norms.
        assert np.linalg.norm(value - other[name]) <= 2e-3 * np.linalg.norm(value), name


@pytest.mark.slow
def test_same_params_give_the_same_bytes(clone: Clone):
    """Otherwise runs cannot be compared."""
    outputs = ["data/tokens/train/00000.arrow", "data/tokens/heldout/00000.arrow", "data/batches/plan.arrow", WEIGHTS]
    before, column = [clone.sha256(path) for path in outputs], losses(clone)
    output = clone.dvc("repro", "--force", "--single-item", "tokenize", "bucket", "train")
    assert stages_run(output) == ["tokenize", "bucket", "train"]
    assert [clone.sha256(path) for path in outputs] == before and losses(clone) == column


@pytest.mark.slow
@pytest.mark.parametrize("flag, stages", [("hardware.gpu=24GiB", ["estimate"]), ("run.cpu_threads=2", [])])
def test_another_gpu_or_number_of_threads_does_not_retrain(clone: Clone, flag: str, stages: list[str]):
    assert stages_run(clone.dvc("exp", "run", "-S", flag, "train")) == stages


@pytest.mark.slow
def test_a_comment_reruns_nothing_and_a_constant_the_stages_that_use_it(clone: Clone):
    """A comment in a module that all stages import must not retrain."""
    errors = clone.root / "cuda_memory/errors.py"
    errors.write_text(errors.read_text().replace("class UserError", "# A comment.\nclass UserError"))
    assert stages_run(clone.dvc("repro")) == []
    markdown = clone.root / "lean_finetune/report/pages.py"
    markdown.write_text(markdown.read_text() + "\nADDED = 1\n")
    assert stages_run(clone.dvc("repro")) == ["report"]


@pytest.mark.slow
def test_a_temporary_run_uses_the_code_of_its_copy(clone: Clone):
    """The installed package is another checkout, whose code an experiment must not run."""
    before = clone.json("metrics/estimate.json")["peak_gib_predicted"]
    units = clone.root / "cuda_memory/units.py"
    units.write_text(units.read_text().replace("GIB = 2**30", "GIB = 2**29"))
    commit_all(clone)
    try:
        clone.dvc("exp", "run", "--temp", "-n", "edited-temp", "-S", "seed=8", "estimate")
        refs = clone.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
        (temporary,) = (ref for ref in refs if ref.endswith("/edited-temp"))
        metrics = json.loads(clone.run("git", "show", f"{temporary}:metrics/estimate.json"))
    finally:
        clone.run("git", "reset", "--hard", "HEAD~1")
    assert metrics["peak_gib_predicted"] > 1.5 * before


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_by_train(clone: Clone):
    """Stage estimate succeeds; stage train refuses the run in one line with the breakdown."""
    changes = {"hardware.gpu": "0.6GiB", "bucket.max_tokens": 8192, "train.tokens_per_step": 8192}
    flags = [part for dotted, value in changes.items() for part in ("-S", f"{dotted}={value}")]
    output = clone.dvc("exp", "run", *flags, ok=False)
    assert clone.json("metrics/estimate.json")["fits"] is False
    line = next(line for line in output.splitlines() if line.startswith("error: "))
    assert "predicted peak" in line and "-S " in line and "git restore" not in line
    assert " D " not in clone.run("git", "status", "--porcelain"), "DVC deletes a stage's metrics before it runs"


@pytest.mark.slow
def test_an_edited_source_reruns_what_follows(clone: Clone):
    source = clone.root / "data/raw/sample.jsonl"
    text = source.read_text()
    source.write_text(text.replace('"content": "', '"content": "Please. ', 1))
    assert "pin_data" in clone.dvc("status")
    assert stages_run(clone.dvc("repro", "bucket")) == ["pin_data", "tokenize", "bucket"]


@pytest.mark.slow
def test_a_held_out_source_is_watched_and_no_held_out_row_reaches_the_report(clone: Clone, tmp_path: Path):
    lines = (clone.root / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)
    heldout = tmp_path / "test.jsonl"
    heldout.write_text("".join(lines[-12:]))
    clone.set_params(data__heldout_fraction=0, data__heldout_source=str(heldout))
    clone.dvc("repro", "tokenize")
    assert clone.json("data/tokens/figures.json")["heldout_rows"] <= 12
    heldout.write_text("".join(lines[-8:]))
    assert "tokenize" in stages_run(clone.dvc("repro", "tokenize"))
    assert clone.json("data/tokens/figures.json")["heldout_rows"] <= 8
    clone.set_params(data__heldout_source=None, train__heldout_every_steps=None, evaluate__generate_rows=0)
    assert "report" in stages_run(clone.dvc("repro"))
    assert clone.json("metrics/evaluate.json")["tuned_loss"] is None
    assert "no rows are held out" in (clone.root / "data/report/report.md").read_text()
    clone.dvc("plots", "show", "--out", str(tmp_path / "plots"))


@pytest.mark.slow
def test_an_edited_template_reruns_tokenize(clone: Clone):
    """DVC tracks the path in data.chat_template; only the pin tracks the content of the file."""
    tiny = clone.root / "lean_finetune/tiny/chat_template.jinja"
    mine = clone.root / "mine.jinja"
    mine.write_text(tiny.read_text())
    clone.dvc("repro", "pin_data")
    clone.set_params(data__chat_template="mine.jinja")
    assert "tokenize" in stages_run(clone.dvc("repro", "tokenize"))
    mine.write_text(mine.read_text() + "{# edited #}")
    assert stages_run(clone.dvc("repro", "tokenize")) == ["pin_data", "tokenize"]
    clone.run("git", "clean", "-fdq", "mine.jinja", "locks")


@pytest.mark.slow
def test_a_relative_source_outside_works_in_a_temporary_run(clone: Clone):
    """A --temp run has another working directory, but ../ must still be relative to the user's checkout."""
    outside = clone.root.parent / "outside.jsonl"
    lines = (clone.root / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)
    outside.write_text("".join(lines[300:420]))
    output = clone.dvc("exp", "run", "--temp", "-n", "outside", "-S", "data.source=../outside.jsonl", "bucket")
    assert stages_run(output) == ["pin_data", "tokenize", "bucket"]


def queued_metric(clone: Clone, experiments: dict[str, list[str]], stage: str, metric: str) -> dict[str, float]:
    """A metric of a stage, by name of the queued experiment."""
    run_queued(clone, {name: [*sets, stage] for name, sets in experiments.items()})
    found = {}
    for row in json.loads(clone.dvc("exp", "show", "--json", "--no-pager")):
        for experiment in row.get("experiments") or []:
            data = experiment["revs"][0]
            if data.get("name") in experiments:
                found[data["name"]] = data["data"]["metrics"][f"metrics/{stage}.json"]["data"][metric]
    return found


@pytest.mark.slow
def test_a_queued_grid_predicts_memory(clone: Clone):
    """Each experiment runs in a temporary copy, by a worker in the background."""
    experiments = {
        f"grid-{grad_ckpt}-{tokens}": ["-S", f"train.grad_ckpt={grad_ckpt}", "-S", f"bucket.max_tokens={tokens}"]
        for grad_ckpt in ("true", "false")
        for tokens in (256, 512)
    }
    peaks = queued_metric(clone, experiments, "estimate", "peak_gib_predicted")
    assert len(peaks) == 4 and peaks["grid-true-256"] < peaks["grid-false-256"] < peaks["grid-false-512"]


@pytest.mark.slow
def test_deleted_source_can_be_pinned_again(clone: Clone):
    """DVC fails on the link to a deleted source; the remedy of the README must work."""
    gone = clone.root.parent / "gone.jsonl"
    lines = (clone.root / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)
    gone.write_text("".join(lines[:120]))
    clone.set_params(data__source=str(gone))
    clone.dvc("repro", "pin_data")
    gone.unlink()
    clone.set_params(data__source="data/raw/sample.jsonl")
    assert "locks/watched-data" in clone.dvc("repro", "pin_data", ok=False)
    clone.run(sys.executable, "-m", "stages.pin", "data")
    assert stages_run(clone.dvc("repro", "bucket")) == ["pin_data"]


@pytest.mark.slow
def test_a_failed_pin_leaves_the_locks(clone: Clone):
    """DVC deletes outputs before a run, but a typo in a path must not delete the tracked pins."""
    output = clone.dvc("exp", "run", "-S", "model.name=no/such/model", "pin_model", ok=False)
    assert "error: model.name" in output
    assert clone.run("git", "status", "--porcelain", "locks").strip() == ""
    # The value of -S stays in params.yaml, so the next command would be refused too.
    assert "`git restore params.yaml`" in output
    clone.run("git", "restore", "params.yaml")
    assert stages_run(clone.dvc("repro", "pin_model")) == []


@pytest.mark.slow
def test_stages_run_from_a_subdirectory(clone: Clone):
    """DVC then includes the file in the stage's name."""
    output = clone.run(sys.executable, "-m", "dvc", "--cd", "docs", "repro", "-f", "../dvc.yaml:pin_data")
    assert "Running stage '../dvc.yaml:pin_data'" in output


@pytest.mark.slow
def test_plots_render(clone: Clone, tmp_path: Path):
    output = clone.dvc("plots", "show", "--json")
    shown = json.dumps(json.loads(output.strip().splitlines()[-1]))
    assert "error" not in shown.lower() or '"errors"' not in shown
    clone.dvc("plots", "show", "-o", str(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert "loss" in page and "predicted" in page.lower()


def test_nothing_is_left_untracked(finished: tuple[Clone, FirstRun]):
    """Untracked outputs would be committed by mistake; .gitignore files must name them."""
    clone, _ = finished
    assert clone.run("git", "status", "--porcelain").strip() == ""
    # The checkpoint of a finished run stays until the next run begins.
    finished_runs = {path.parent for path in (clone.root / "scratch/train").glob("*/finished")}
    left = [path for path in (clone.root / "scratch").rglob("*") if path.is_file()]
    assert [path for path in left if not finished_runs & set(path.parents)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("alpaca_en_demo.json", "alpaca"), ("glaive_toolcall_en_demo.json", "sharegpt")]
)
def test_public_data_needs_no_parameter_but_its_source(clone: Clone, public_data: Path, name: str, shape: str):
    """The rows are real, some with tools and function calls."""
    output = clone.dvc("exp", "run", "-S", f"data.source={public_data / name}")
    assert stages_run(output)[-1] == "report"
    assert clone.json("data/tokens/figures.json")["format"] == shape
    assert abs(clone.json("metrics/report.json")["predicted_error_percent"]) < 1
    assert clone.json("metrics/evaluate.json")["tuned_loss"] < clone.json("metrics/evaluate.json")["base_loss"]
