"""What `dvc exp show` and `make compare` show: results that people compare, of the experiment itself."""

import json

import pytest

from tests.pipeline.clone import Clone
from tests.pipeline.conftest import FirstRun
from tests.pipeline.queue import run_queued
from tests.printed_table import printed_cells

COMPARED = [
    *("fits", "peak_gib_predicted", "peak_gib_measured", "tokens_per_second", "tuned_loss"),
    *("tuned_exact_match_percent", "base_loss", "base_exact_match_percent", "predicted_error_percent"),
]
DVC_COLUMNS = {"Experiment", "rev", "typ", "Created", "parent", "State", "Executor"}
"""DVC's own columns; the last two exist only if an experiment is queued or has failed."""
MOST_METRICS = 40


@pytest.mark.slow
def test_first_columns_are_the_compared_results(finished: tuple[Clone, FirstRun]):
    """Counts of rows in the first columns would hide the peak and the loss."""
    clone, _ = finished
    header = clone.dvc("exp", "show", "--csv").splitlines()[0].split(",")
    columns = [column for column in header if column not in DVC_COLUMNS]
    assert columns[: len(COMPARED)] == COMPARED
    found = [json.loads(path.read_text()) for path in (clone.root / "metrics").iterdir()]
    values = [value for metrics in found for value in metrics.values()]
    assert len(values) <= MOST_METRICS and all(isinstance(value, bool | int | float) for value in values)


@pytest.mark.slow
def test_an_experiment_shows_no_figures_of_an_earlier_run(clone: Clone):
    """A rank that was never trained had the measured peak, the speed and the losses of the baseline."""
    run_queued(
        clone,
        {
            "rank": ["-S", "train.lora.rank=4", "estimate"],
            "gpu": ["-S", "hardware.gpu=T4", "estimate"],
            "lr": ["-S", "train.lr=0.001", "estimate"],
        },
    )
    clone.dvc("exp", "run", "-n", "here", "-S", "train.lora.rank=8", "estimate")
    text = clone.dvc("exp", "show", "--json")
    found = {one["name"]: one["revs"][0]["data"] for commit in json.loads(text) for one in commit["experiments"] or ()}
    committed = {
        name: {path for path, file in data["metrics"].items() if "data" in file} for name, data in found.items()
    }
    everything = {f"metrics/{stage}.json" for stage in ("estimate", "train", "evaluate", "report")}
    assert committed["rank"] == {"metrics/estimate.json"}
    # train depends on the verdict, which another GPU that fits does not change.
    assert committed["gpu"] == everything - {"metrics/report.json"}
    assert committed["lr"] == committed["here"] == everything, "as docs/report.md says"

    table = clone.run("sh", "-c", "dvc exp show --json | python -m lean_finetune.report.compare_experiments")
    assert "an earlier run" in table
    rows = printed_cells(table)
    for name in ("rank", "lr", "here"):
        assert rows[name]["peak_gib_predicted"] and not rows[name]["peak_gib_measured"] + rows[name]["tuned_loss"], name
    for name in ("gpu", "baseline"):
        assert rows[name]["peak_gib_measured"] and rows[name]["tuned_loss"], name
