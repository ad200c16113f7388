"""Write the results of stage estimate: data/estimate and metrics/estimate.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import FIGURES, atomic_directory, write_csv, write_json
from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.one_change_sweep import SweepPoint, as_advice
from lean_finetune.memory.advice.search import ADVICE_COLUMNS
from lean_finetune.memory.advice.verdict import Answer
from lean_finetune.memory.allocator.plan_memory import RESERVED_COLUMNS, PlanMemory, tiers_metrics
from lean_finetune.memory.estimate.planned_inputs import EstimateInputs
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import TIMELINE_COLUMNS, Explanation
from lean_finetune.memory.predict.state_formulas import closed_form
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.memory_trace import Peak

RESULTS = ("fits", "peak_gib_predicted")
"""Figures in metrics/estimate.json, by which runs are compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimateResults:
    """Everything that the stage reports on a run."""

    prediction: Prediction
    explanation: Explanation
    by_phase: Mapping[str, Peak]
    """Peaks of the step's phases and of loading, evaluation and saving."""
    switches: Sequence[SweepPoint]
    memory: PlanMemory | None
    replayed: str | None
    """How much of the plan was replayed, or why nothing was."""
    answer: Answer
    inverse: Mapping[str, Any]
    process: Mapping[str, Any] | None
    reserved: Mapping[str, Any] | None


def publish(
    inputs: EstimateInputs, results: EstimateResults, out: Path, metrics: Path, *, auto_precision: bool
) -> None:
    """Write the directory `out` atomically, then the file `metrics`."""
    verdict, device = results.answer.verdict, inputs.planned.device
    states = list(closed_form(inputs.config, inputs.setting, target_of(device)))
    figures = _figures(inputs, results)
    with atomic_directory(out) as aside:
        write_json(aside / "verdict.json", verdict.as_json(inputs.precision if auto_precision else None))
        write_json(aside / "breakdown.json", breakdown(results.by_phase, results.prediction.peak))
        write_json(aside / "explanation.json", {**results.explanation.as_json(), "states": states})
        write_json(aside / "tiers.json", results.reserved)
        write_json(aside / "process.json", results.process)
        write_json(aside / "what_fits.json", results.inverse)
        _write_tables(aside, results)
        write_json(aside / FIGURES, figures)
    write_json(metrics, {name: figures[name] for name in RESULTS})


def breakdown(by_phase: Mapping[str, Peak], highest: Peak) -> dict[str, dict[str, int]]:
    """Content of breakdown.json: bytes by category at the peak of each phase, and of the training step as `peak`."""
    phases = {phase: dict(peak.by_category) for phase, peak in by_phase.items()}
    return {**phases, "peak": dict(highest.by_category)}


def _figures(inputs: EstimateInputs, results: EstimateResults) -> dict[str, Any]:
    """Content of data/estimate/figures.json."""
    prediction, verdict, device = results.prediction, results.answer.verdict, inputs.planned.device
    return {
        "peak_bytes_predicted": prediction.peak.bytes,
        "peak_gib_predicted": round(prediction.peak.bytes / GIB, 6),
        "offloaded_bytes_predicted": prediction.offloaded_bytes,
        "predicted_by_phase": {phase: peak.bytes for phase, peak in results.by_phase.items()},
        "worst_phase": prediction.worst_phase,
        "fits": verdict.fits,
        "verdict": verdict.state,
        "layers_traced": prediction.layers_traced,
        "gpu": device.name,
        "gpu_reason": inputs.device_reason,
        "capacity_gib": round(device.memory_bytes / GIB, 2),
        **tiers_metrics(results.reserved, expandable=inputs.planned.expandable),
        "attention": inputs.attention,
        "host_bytes_predicted": None if results.process is None else results.process["host_needed_bytes"],
        "reserved_replayed": results.replayed,
        **({} if results.memory is None else results.memory.metrics()),
    }


def _write_tables(aside: Path, results: EstimateResults) -> None:
    """Write the advice and the data of the plots."""
    write_json(aside / "advice.json", {**results.answer.as_json(), "single_changes": as_advice(results.switches)})
    write_csv(aside / "advice.csv", ADVICE_COLUMNS, [remedy.as_row() for remedy in results.answer.remedies])
    # DVC cannot plot an empty file.
    alone = [{"step": 0, "allocated_gib": round(results.prediction.peak.bytes / GIB, 6)}]
    write_csv(aside / "reserved.csv", RESERVED_COLUMNS, results.memory.rows() if results.memory else alone)
    write_csv(aside / "timeline.csv", TIMELINE_COLUMNS, results.explanation.timeline)
    rows = [{"switch": switch.label, "peak_gib": round(switch.peak_bytes / GIB, 6)} for switch in results.switches]
    write_csv(aside / "switches.csv", ["switch", "peak_gib"], rows)
