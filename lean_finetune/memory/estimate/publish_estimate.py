"""What stage estimate found, written: data/estimate and metrics/estimate.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import FIGURES, atomic_directory, write_csv, write_json
from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.one_change_sweep import SweepPoint, as_advice
from lean_finetune.memory.advice.search import ADVICE_COLUMNS
from lean_finetune.memory.advice.verdict_with_advice import Answer
from lean_finetune.memory.allocator.plan_memory import RESERVED_COLUMNS, PlanMemory, row_without_replay
from lean_finetune.memory.allocator.reserved_memory import tiers_metrics
from lean_finetune.memory.estimate.output_tables import breakdown, metrics_of
from lean_finetune.memory.estimate.planned_inputs import Asked
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.peak_explanation import TIMELINE_COLUMNS, Explanation
from lean_finetune.memory.predict.state_formulas import closed_form
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.memory_trace import Peak

RESULTS = ("fits", "peak_gib_predicted")
"""The figures in metrics/estimate.json, by which runs are compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """All that the stage says of a run."""

    prediction: Prediction
    explanation: Explanation
    by_phase: Mapping[str, Peak]
    """Also of what runs besides the step."""
    switches: Sequence[SweepPoint]
    memory: PlanMemory | None
    replayed: str | None
    """How much of the plan was replayed, or why none."""
    answer: Answer
    inverse: Mapping[str, Any]
    process: Mapping[str, Any] | None
    reserved: Mapping[str, Any] | None


def publish(asked: Asked, found: Found, out: Path, metrics: Path, *, auto_precision: bool) -> None:
    """Write the directory whole or not at all, then the metrics.

    Args:
        asked: the run.
        found: what is said of it.
        out: the directory.
        metrics: the file of metrics.
        auto_precision: whether the stage chose the precision.
    """
    verdict, device = found.answer.verdict, asked.planned.device
    states = list(closed_form(asked.config, asked.setting, target_of(device)))
    figures = _figures(asked, found)
    with atomic_directory(out) as aside:
        write_json(aside / "verdict.json", verdict.as_json(asked.precision if auto_precision else None))
        write_json(aside / "breakdown.json", breakdown(found.by_phase, found.prediction.peak))
        write_json(aside / "explanation.json", {**found.explanation.as_json(), "states": states})
        write_json(aside / "tiers.json", found.reserved)
        write_json(aside / "process.json", found.process)
        write_json(aside / "what_fits.json", found.inverse)
        _write_tables(aside, found)
        write_json(aside / FIGURES, figures)
    write_json(metrics, {name: figures[name] for name in RESULTS})


def _figures(asked: Asked, found: Found) -> dict[str, Any]:
    """What is predicted, of the run and of its phases."""
    told = metrics_of(
        found.prediction,
        found.by_phase,
        asked.planned.device,
        asked.device_reason,
        verdict=found.answer.verdict,
    )
    told |= tiers_metrics(found.reserved, expandable=asked.planned.expandable)
    told |= {
        "attention": asked.attention,
        "host_bytes_predicted": None if found.process is None else found.process["host_needed_bytes"],
        "reserved_replayed": found.replayed,
    }
    return told if found.memory is None else {**told, **found.memory.metrics()}


def _write_tables(aside: Path, found: Found) -> None:
    """Advice, and the data of the plots."""
    write_json(aside / "advice.json", {**found.answer.as_json(), "single_changes": as_advice(found.switches)})
    write_csv(aside / "advice.csv", ADVICE_COLUMNS, [remedy.as_row() for remedy in found.answer.remedies])
    alone = [row_without_replay(found.prediction.peak.bytes)]
    write_csv(aside / "reserved.csv", RESERVED_COLUMNS, alone if found.memory is None else found.memory.rows())
    write_csv(aside / "timeline.csv", TIMELINE_COLUMNS, found.explanation.timeline)
    rows = [{"switch": switch.label, "peak_gib": round(switch.peak_bytes / GIB, 6)} for switch in found.switches]
    write_csv(aside / "switches.csv", ["switch", "peak_gib"], rows)
