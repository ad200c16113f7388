"""Compute the report's figures: error of the prediction, and changes by training."""

from collections.abc import Iterator
from typing import Any

from cuda_memory.units import GIB
from lean_finetune.report.report_inputs import Inputs, in_order

CPU = "cpu"
"""Device name of stages estimate and train without a GPU."""

RESULTS = ("predicted_error_percent",)
"""Figures in metrics/report.json, by which runs are compared."""

MEMORY_COLUMNS = ("step", "measured_gib", "predicted_gib")


def comparable(inputs: Inputs) -> bool:
    """Whether prediction and measurement are both for a CPU or both for a GPU.

    A run may be planned for a GPU and trained on a CPU, whose kernels and allocator need other amounts.
    """
    return (inputs.estimate["gpu"] == CPU) == (inputs.train["device"] == CPU)


def error_percent(predicted_bytes: int | None, measured_bytes: int | None) -> float | None:
    """Return the error of a prediction in percent of the measurement; None if one is missing."""
    if predicted_bytes is None or measured_bytes is None:
        return None
    return round(100 * (predicted_bytes / measured_bytes - 1), 4)


def errors_by_phase(inputs: Inputs) -> dict[str, float | None]:
    """Return the error of the prediction in every phase."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    known = comparable(inputs)
    return {
        phase: error_percent(predicted.get(phase), measured.get(phase)) if known else None
        for phase in in_order({**predicted, **measured})
    }


def errors_by_tier(inputs: Inputs) -> dict[str, float | None]:
    """Return the error of the predicted peak of tensors and of reserved memory, which only GPUs have."""
    estimate, train, known = inputs.estimate, inputs.train, comparable(inputs)
    pairs = {
        "tensors": (estimate["peak_bytes_predicted"], train["peak_bytes_measured"]),
        "reserved": (estimate["reserved_bytes_predicted"], train["peak_reserved_bytes"]),
    }
    return {tier: error_percent(*pair) if known else None for tier, pair in pairs.items()}


def report_metrics(inputs: Inputs) -> dict[str, Any]:
    """Return figures.json: errors of the prediction; change of loss and exact match.

    `predicted_error_percent` is that of the tier by which the run was judged.
    """
    evaluate, by_tier = inputs.evaluate, errors_by_tier(inputs)
    base, tuned = evaluate["base_exact_match_percent"], evaluate["tuned_exact_match_percent"]
    return {
        "predicted_error_percent": by_tier[inputs.estimate["deciding_tier"]],
        "error_percent_by_tier": by_tier,
        "error_percent_by_phase": errors_by_phase(inputs),
        "heldout_loss_change": _change(evaluate["base_loss"], evaluate["tuned_loss"], 6),
        "exact_match_change_points": _change(base, tuned, 3),
    }


def _change(before: float | None, after: float | None, digits: int) -> float | None:
    """Return a difference; None if nothing was evaluated."""
    return None if before is None or after is None else round(after - before, digits)


def memory_records(inputs: Inputs) -> Iterator[dict[str, float]]:
    """Yield the measured peak of each step and the predicted peak of the run, in GiB."""
    predicted_gib = inputs.estimate["peak_bytes_predicted"] / GIB
    for record in inputs.curves:
        if record["allocated_bytes"]:
            yield {
                "step": int(record["step"]),
                "measured_gib": int(record["allocated_bytes"]) / GIB,
                "predicted_gib": predicted_gib,
            }
