"""The table of experiments: figures from DVC, and the change of the loss."""

import sys

from lean_finetune.report.compare_experiments import table, with_change
from tests.conftest import ROOT
from tests.processes import run_bounded

ROWS = [
    {"Experiment": "", "peak_gib_measured": "0.0507373", "tuned_loss": "0.38495", "train.grad_ckpt": "True"},
    {"Experiment": "", "peak_gib_measured": "0.0912", "tuned_loss": "0.38495", "train.grad_ckpt": "False"},
    {"Experiment": "warm-hare", "peak_gib_measured": "0.02", "tuned_loss": "0.40145", "train.grad_ckpt": "False"},
    {"Experiment": "cold-hare", "peak_gib_measured": "", "tuned_loss": "", "train.grad_ckpt": "False"},
]


def test_change_is_relative_to_the_baseline():
    """A change from the workspace, whose settings nobody knows."""
    found = list(with_change(ROWS))
    assert [row["Experiment"] for row in found] == ["workspace", "baseline", "warm-hare", "cold-hare"]
    assert [row["loss_change"] for row in found] == ["+0", "+0", "+0.0165", ""]
    assert list(found[0]) == ["Experiment", "peak_gib_measured", "tuned_loss", "loss_change", "train.grad_ckpt"]
    assert list(next(with_change([{"Experiment": "", "x_percent": "1", "seed": "1", "tuned_loss": "2."}]))) == [
        *("Experiment", "tuned_loss", "loss_change", "seed", "x_percent")
    ]
    assert found[0]["peak_gib_measured"] == "0.05074" and found[3]["tuned_loss"] == ""
    assert [row["Experiment"] for row in with_change([{"tuned_loss": "2."}] * 2)] == ["workspace", "baseline"]


def test_losses_of_other_models_and_data_are_not_subtracted():
    """A larger model's lower loss passes for an improvement by a switch."""
    base = {"Experiment": "", "tuned_loss": "2.5", "model.name": "a", "data.max_rows": "", "train.lr": "1e-3"}
    rows = [
        base,
        base,
        {**base, "Experiment": "m", "model.name": "b"},
        {**base, "Experiment": "d", "data.max_rows": "9"},
    ]
    rows.append({**base, "Experiment": "lr", "train.lr": "2e-3", "tuned_loss": "2.25"})
    assert [row["loss_change"] for row in with_change(rows)] == ["+0", "+0", "", "", "-0.25"]


def test_a_table_is_aligned():
    lines = table(list(with_change(ROWS))).splitlines()
    assert (
        len({line.index(column) for line, column in zip(lines, ["train", "True", "False", "False"], strict=False)}) == 1
    )


def test_nothing_to_compare_is_one_line():
    """A traceback after DVC's own error message."""
    command = [sys.executable, "-m", "lean_finetune.report.compare_experiments"]
    done = run_bounded(command, cwd=ROOT)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: dvc exp show: printed no experiments")
