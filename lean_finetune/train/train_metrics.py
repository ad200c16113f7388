"""Compute the figures of a training run from its curves and measured peaks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cuda_memory.growth import classify
from cuda_memory.units import GIB
from lean_finetune.model.experts.expert_adapters import trained_in_experts
from lean_finetune.model.experts.experts_forward import has_experts
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, Row
from lean_finetune.train.monitor.growth_advice import growth_line
from lean_finetune.train.monitor.measured_peak import MeasuredPeaks
from lean_finetune.train.train_job import TrainJob, TrainResult

LAST_SHARE = 0.1
"""Share of the steps, at the end, over which the training loss and the load of experts are averaged."""
WARM_UP_STEPS = 1
"""Steps that are not part of the throughput: the first one allocates and is measured."""


def train_metrics(job: TrainJob, result: TrainResult, measured: MeasuredPeaks) -> dict[str, Any]:
    """Return data/train/figures.json: losses, throughput, size, memory; None for what the device cannot measure."""
    curves = result.curves
    last = curves[-max(1, round(LAST_SHARE * len(curves))) :]
    timed = [row for row in curves[WARM_UP_STEPS:] if not row["measured"]] or curves
    seconds = sum(row["seconds"] for row in timed)
    peak, growth = measured.step_peak_bytes, classify(curves)[0]
    skipped = {} if result.skipped_steps is None else {"skipped_steps": result.skipped_steps}
    splits = {} if result.oom_splits is None else {"oom_splits": dict(result.oom_splits)}
    by_rank = {"peak_bytes_measured_by_rank": list(measured.peak_bytes_by_rank)} if measured.peak_bytes_by_rank else {}
    return {
        "train_loss": sum(row["loss"] for row in last) / len(last),
        "heldout_loss_last": curves[-1].get("heldout_loss"),
        "tokens_per_second": sum(row["tokens"] for row in timed) / seconds,
        "supervised_tokens_per_second": sum(row["supervised_tokens"] for row in timed) / seconds,
        "train_seconds": sum(row["seconds"] for row in curves),
        "trained_parameters": sum(math.prod(shape) for shape in result.parallel.trained_shapes().values()),
        **_experts(result.model, last),
        **skipped,
        **splits,
        "peak_bytes_measured": peak,
        "peak_gib_measured": None if peak is None else peak / GIB,
        **by_rank,
        "measured_by_phase": measured.peak_bytes_by_phase,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "peak_measured_how": measured.how,
        "memory_by_phase": result.memory_by_phase,
        "load_host_peak_bytes": result.load_host.peak_bytes,
        "load_host_added_bytes": result.load_host.added_bytes,
        "growth": {
            "summary": growth_line(growth, curves, None, job.settings),
            "cause": growth.cause,
            "series": growth.series,
            "slope_bytes_per_step": growth.slope_bytes_per_step,
            "confidence": growth.confidence,
        },
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
    }


def _experts(model: nn.Module, last: Sequence[Row]) -> dict[str, Any]:
    """Figures of a mixture of experts; `last` are the curves' last rows."""
    if not has_experts(model):
        return {}
    rows = [row for row in last if EXPERT_COLUMNS[0] in row]
    load = {name: sum(row[name] for row in rows) / len(rows) for name in EXPERT_COLUMNS if rows}
    return {"trained_expert_parameters": trained_in_experts(model), **load}
