"""The first columns of `dvc exp show` are the results that people compare."""

import json

import pytest

from tests.pipeline.clone import Clone
from tests.pipeline.conftest import FirstRun

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
