"""What a training run reports."""

from typing import Any

import torch

from lean_finetune.core.units import GIB
from lean_finetune.step.run_optimizer import trained_parameters
from lean_finetune.train.loop import TrainResult
from lean_finetune.train.monitor.growth import Growth, Rows, classify
from lean_finetune.train.monitor.growth_advice import Settings, growth_line
from lean_finetune.train.monitor.measured_peak import LOAD, Measured

LAST_SHARE = 0.1
"""Share of the steps, at the end, over which the reported training loss is averaged."""

WARM_UP_STEPS = 1
"""Steps left out of the speed: the first pays for allocation and, where measured, for the profiler."""


def train_metrics(result: TrainResult, measured: Measured, device: torch.device) -> dict[str, Any]:
    """data/train/figures.json: losses, speed, size, measured peak memory; None where the device cannot measure."""
    curves = result.curves
    last = curves[-max(1, round(LAST_SHARE * len(curves))) :]
    timed = [row for row in curves[WARM_UP_STEPS:] if not row["measured"]] or curves
    seconds = sum(row["seconds"] for row in timed)
    by_phase = measured.peak_bytes_by_phase
    # The prediction is of the steps; what loading needed for a moment stands apart, under its own phase.
    peak = max((size for phase, size in by_phase.items() if phase != LOAD), default=None)
    skipped = {} if result.skipped_steps is None else {"skipped_steps": result.skipped_steps}
    cut = {} if result.oom_splits is None else {"oom_splits": dict(result.oom_splits)}
    by_rank = {"peak_bytes_measured_by_rank": list(measured.peak_bytes_by_rank)} if measured.peak_bytes_by_rank else {}
    return {
        "train_loss": sum(row["loss"] for row in last) / len(last),
        "heldout_loss_last": curves[-1].get("heldout_loss"),
        "tokens_per_second": sum(row["tokens"] for row in timed) / seconds,
        "supervised_tokens_per_second": sum(row["supervised_tokens"] for row in timed) / seconds,
        "train_seconds": sum(row["seconds"] for row in curves),
        "trained_parameters": sum(p.numel() for p in trained_parameters(result.model)),
        **skipped,
        **cut,
        "peak_bytes_measured": peak,
        "peak_gib_measured": None if peak is None else peak / GIB,
        **by_rank,
        "measured_by_phase": by_phase,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "peak_measured_how": measured.how,
        "memory_by_phase": result.memory_by_phase,
        "load_host_peak_bytes": result.load_host.peak_bytes,
        "load_host_added_bytes": result.load_host.added_bytes,
        "growth": growth_figures(classify(curves)[0], curves, result.settings),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def growth_figures(growth: Growth, curves: Rows, settings: Settings) -> dict[str, Any]:
    """What memory did over the run, how sure its cause is, and what helps; how much is left is nothing of the run's."""
    return {
        "told": growth_line(growth, curves, lambda series: None, settings),
        "cause": growth.cause,
        "series": growth.series,
        "slope_bytes_per_step": growth.slope_bytes_per_step,
        "confidence": growth.confidence,
    }
