"""What stage estimate writes of a prediction: breakdown.json, and its part of data/estimate/figures.json."""

from collections.abc import Mapping
from typing import Any

from lean_finetune.core.units import GIB
from lean_finetune.memory.advice.verdict import Verdict
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.trace.memory_trace import Peak


def breakdown(by_phase: Mapping[str, Peak], highest: Peak) -> dict[str, dict[str, int]]:
    """Bytes by category at the peak of each phase, and at the highest of the training step as `peak`."""
    phases = {phase: dict(peak.by_category) for phase, peak in by_phase.items()}
    return {**phases, "peak": dict(highest.by_category)}


def metrics_of(
    prediction: Prediction,
    by_phase: Mapping[str, Peak],
    device: Device,
    reason: str,
    *,
    verdict: Verdict,
) -> dict[str, Any]:
    """The content of data/estimate/figures.json, tiers apart."""
    return {
        "peak_bytes_predicted": prediction.peak.bytes,
        "peak_gib_predicted": round(prediction.peak.bytes / GIB, 6),
        "offloaded_bytes_predicted": prediction.offloaded_bytes,
        "predicted_by_phase": {phase: peak.bytes for phase, peak in by_phase.items()},
        "worst_phase": prediction.worst_phase,
        "fits": verdict.fits,
        "verdict": verdict.state,
        "layers_traced": prediction.layers_traced,
        "gpu": device.name,
        "gpu_reason": reason,
        "capacity_gib": round(device.memory_bytes / GIB, 2),
    }
