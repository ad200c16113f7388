"""The report's own numbers: how far the prediction was off, and what training changed."""

from collections.abc import Iterator
from typing import Any

from stages.report.inputs import Inputs, in_order

GIB = 2**30
MIB = 2**20

MEMORY_COLUMNS = ("step", "measured_gib", "predicted_gib")


def error_percent(predicted_bytes: int, measured_bytes: int | None) -> float | None:
    """How far a prediction lies above (+) or below (-) the measurement, in percent of it; None where there is none."""
    return None if measured_bytes is None else round(100 * (predicted_bytes / measured_bytes - 1), 4)


def reading_unit(count: int) -> tuple[int, str]:
    """The unit in which so many bytes are best read, and its name."""
    return (MIB, "MiB") if count < GIB // 10 else (GIB, "GiB")


def report_metrics(inputs: Inputs) -> dict[str, Any]:
    """metrics/report.json: the prediction's error, overall and by phase, and the change in loss and exact match."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    evaluate = inputs.evaluate
    base, tuned = evaluate["base_exact_match_percent"], evaluate["tuned_exact_match_percent"]
    return {
        "predicted_error_percent": error_percent(
            inputs.estimate["peak_bytes_predicted"], inputs.train["peak_bytes_measured"]
        ),
        "error_percent_by_phase": {
            phase: error_percent(predicted[phase], measured[phase])
            for phase in in_order(predicted)
            if phase in measured
        },
        "heldout_loss_change": round(evaluate["tuned_loss"] - evaluate["base_loss"], 6),
        "exact_match_change_points": None if base is None else round(tuned - base, 3),
    }


def memory_records(inputs: Inputs) -> Iterator[dict[str, float]]:
    """Peak memory of each optimizer step that was measured, beside the predicted peak of the run; GiB."""
    predicted_gib = inputs.estimate["peak_bytes_predicted"] / GIB
    for record in inputs.curves:
        if record["allocated_bytes"]:
            yield {
                "step": int(record["step"]),
                "measured_gib": int(record["allocated_bytes"]) / GIB,
                "predicted_gib": predicted_gib,
            }
