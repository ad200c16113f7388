"""The table of experiments: figures of the experiment itself, and the change of the loss."""

import sys
from typing import Any

from lean_finetune.report.compare_experiments import rows_of, table
from tests.conftest import ROOT
from tests.printed_table import printed_cells
from tests.processes import run_bounded

ALL = {f"metrics/{stage}.json" for stage in ("estimate", "train", "evaluate", "report")}
PARAMS = {
    "seed": 17,
    "model": {"name": "a"},
    "data": {"max_rows": None},
    "train": {"lora": {"rank": 16}},
    "run": {"progress": True},
}


def revision(rev: str, loss: float | None = 0.5, **sections: dict[str, Any]) -> dict[str, Any]:
    """A commit as `dvc exp show --json` has it: files that do not exist have an error."""
    metrics = {
        "metrics/estimate.json": {"data": {"fits": True, "peak_gib_predicted": 0.0507373}},
        "metrics/train.json": {"data": {"peak_gib_measured": 0.05, "tokens_per_second": 4000.5}},
        "metrics/evaluate.json": {"data": {"tuned_loss": loss, "tuned_exact_match_percent": 43.125}},
        "metrics/report.json": {"error": {"type": "FileNotFoundError", "msg": ""}},
    }
    data = {"params": {"params.yaml": {"data": PARAMS | sections}}, "metrics": metrics}
    return {"rev": rev, "name": None, "data": data, "error": None, "experiments": None}


def experiment(name: str, state: str | None = "success", **changes: Any) -> dict[str, Any]:
    return {"name": name, "executor": state and {"state": state}, "revs": [revision(name, **changes)]}


def shown(*experiments: dict[str, Any], own: Any = lambda *_: ALL) -> dict[str, dict[str, str]]:
    """The cells of the table by experiment and column."""
    commits = [revision("workspace"), {**revision("c0ffee"), "experiments": list(experiments)}]
    return printed_cells(table(list(rows_of(commits, own))))


def test_figures_of_stages_that_did_not_run_are_empty():
    """`dvc exp run --queue -S train.lora.rank=8 estimate`: the baseline's measured peak passes for that of rank 8."""
    found = shown(
        experiment("rank-8", train={"lora": {"rank": 8}}),
        experiment("here", state=None),
        own=lambda rev, _: {"metrics/estimate.json"} if rev == "rank-8" else ALL,
    )
    assert list(found) == ["workspace", "baseline", "rank-8", "here"]
    assert found["rank-8"]["peak_gib_predicted"] == "0.05074" and found["rank-8"]["train.lora.rank"] == "8"
    absent = ("peak_gib_measured", "tokens_per_second", "tuned_loss", "loss_change", "tuned_exact_match_percent")
    assert {found["rank-8"][name] for name in absent} == {""}
    assert "" not in {found["here"][name] for name in absent}


def test_experiments_that_have_not_finished_have_no_figures():
    """DVC shows the baseline's figures for them."""
    damaged = {"rev": "f00", "name": None, "data": None, "error": {"msg": "?"}}
    gone = {"name": "lost", "executor": None, "revs": [damaged]}
    found = shown(*(experiment(state, state) for state in ("queued", "running", "failed")), gone)
    for name in ("queued", "running", "failed"):
        assert found[name]["state"] == name and found[name]["peak_gib_predicted"] == found[name]["tuned_loss"] == ""
    assert found["lost"]["state"] == "not readable" and found["baseline"]["state"] == ""
    assert "state" not in shown(experiment("done"))["done"]


def test_change_is_relative_to_the_baseline():
    """A change from the workspace, whose settings nobody knows. Losses of other models and data are not subtracted."""
    found = shown(
        experiment("better", loss=0.25),
        experiment("unknown", loss=None),
        experiment("model", model={"name": "b"}),
        experiment("rows", data={"max_rows": 9}),
    )
    assert [row["loss_change"] for row in found.values()] == ["+0", "+0", "-0.25", "", "", ""]


def test_columns_are_results_then_parameters_that_differ():
    found = shown(experiment("x", seed=18, run={"progress": False}))["x"]
    results = ["peak_gib_predicted", "peak_gib_measured", "tokens_per_second", "tuned_loss", "loss_change"]
    assert list(found) == ["Experiment", *results, "seed", "tuned_exact_match_percent"]


def test_figures_of_pairs_are_columns_that_other_rows_leave_empty():
    pairs = experiment("dpo", train={"objective": "dpo", "lora": {"rank": 16}})
    metrics = pairs["revs"][0]["data"]["metrics"]["metrics/evaluate.json"]["data"]
    metrics |= {"tuned_reward_accuracy": 0.94488, "tuned_reward_margin": 4.911428, "tuned_logp_chosen": -52.5}
    found = shown(pairs)
    assert list(found["dpo"])[5:8] == ["loss_change", "tuned_reward_accuracy", "tuned_reward_margin"]
    assert [found[row]["tuned_reward_accuracy"] for row in ("dpo", "baseline")] == ["0.9449", ""]
    assert [found[row]["tuned_reward_margin"] for row in ("dpo", "baseline")] == ["4.911", ""]
    assert "tuned_logp_chosen" not in found["dpo"]


def test_nothing_to_compare_is_one_line():
    """A traceback after DVC's own error message."""
    command = [sys.executable, "-m", "lean_finetune.report.compare_experiments"]
    done = run_bounded(command, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: dvc exp show: printed no experiments")
