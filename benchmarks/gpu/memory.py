"""Measure peak memory on a device by phase, beside the prediction of the same commit.

Three tiers: tensors (max_memory_allocated), reserved (by the caching allocator), process (everything that the driver
counts, with CUDA's context).
"""

import os
from collections.abc import Mapping
from statistics import mean
from typing import Any

import psutil
import torch

from benchmarks.gpu.cases import LAYOUTS, MODELS, GpuCase
from benchmarks.gpu.random_model import free_cached, random_model
from benchmarks.harness import Bar, Row, at_most
from benchmarks.specs import Trainer, random_batch
from lean_finetune.memory.allocator.replay import replay
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.peak_explanation import trace_origins
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.train.monitor.measured_peak import make_meter

SPARE_SHARE = 0.04
"""Share of the device left for what is not predicted: a case that needs more is skipped."""
LIMITS = {"tensors": (1.5, 3.0), "reserved": (3.0, 6.0)}
"""Limits of the mean and the worst error of a tier, in percent."""
PHASES = ("forward", "backward", "clip", "optimizer")


def compare(case: GpuCase, device: torch.device) -> Row:
    """Predict and measure a case, or say why it was not measured."""
    here = _this_device(device)
    target = target_of(here)
    config, steps = MODELS[case.model], LAYOUTS[case.layout]
    predicted = predict(config, case.setting, steps, target)
    row: dict[str, Any] = {"name": case.name, "tensors_predicted_bytes": predicted.peak.bytes}
    if predicted.peak.bytes > (1 - SPARE_SHARE) * here.memory_bytes:
        return {**row, "skipped": "predicted not to fit this device"}
    if here.kind == "cuda":
        trace = trace_origins(config, case.setting, steps, target)
        replayed = replay(trace, steps, expandable=_expandable(), capacity_bytes=None)
        row["reserved_predicted_bytes"] = replayed.reserved_peak_bytes
    try:
        return {**row, **run_case(case, device, predicted, row.get("reserved_predicted_bytes"))}
    except torch.OutOfMemoryError as error:
        return {**row, "out_of_memory": str(error).splitlines()[0]}


def run_case(case: GpuCase, device: torch.device, predicted: Prediction, reserved_bytes: int | None) -> Row:
    """Load random weights, run the steps of a case, and return the columns of what was measured.

    Loading does not count, since these weights are not loaded from files. `reserved_bytes` is the prediction.
    """
    free_cached(device)
    cuda = device.type == "cuda"
    config = MODELS[case.model]
    meter = make_meter(device)
    with meter.window("run"):
        with meter.phase("load"):
            trainer = Trainer.of(random_model(config, case.setting.model, device), case.setting, device)
            free_cached(device)
        loaded = torch.cuda.memory_reserved(device) if cuda else None
        vocabulary = config.get_text_config().vocab_size
        for shapes in LAYOUTS[case.layout]:
            batches = (random_batch(shape, vocabulary, device) for shape in shapes)
            trainer.step(batches, sum(shape.supervised for shape in shapes), meter.phase)
        free, total = torch.cuda.mem_get_info(device) if cuda else (0, 0)
    peaks = meter.result()
    by_phase = {phase: peaks.peak_bytes_by_phase[phase] for phase in PHASES}
    tensors = max(by_phase.values())
    found: dict[str, Any] = {
        "tensors_measured_bytes": tensors,
        "tensors_error_percent": _error_percent(predicted.peak.bytes, tensors),
        "how": peaks.how,
        "phases": {
            phase: {"predicted_bytes": predicted.by_phase[phase].bytes, "measured_bytes": size}
            for phase, size in by_phase.items()
        },
    }
    if peaks.peak_reserved_bytes is not None and reserved_bytes is not None:
        found |= {
            "reserved_measured_bytes": peaks.peak_reserved_bytes,
            "reserved_error_percent": _error_percent(reserved_bytes, peaks.peak_reserved_bytes),
            "reserved_after_load_bytes": loaded,
            "process_measured_bytes": total - free,  # On a machine without other processes on the device.
            "expandable_segments": _expandable(),
        }
    return found


def summary(rows: Mapping[str, Row]) -> list[Row]:
    """The bars of each tier that was measured."""
    bars: list[Bar] = []
    for tier, (mean_limit, worst_limit) in LIMITS.items():
        errors = [abs(row[f"{tier}_error_percent"]) for row in rows.values() if f"{tier}_error_percent" in row]
        if errors:
            bars.append(at_most(f"{tier}: mean of {len(errors)} errors, percent", mean(errors), mean_limit))
            bars.append(at_most(f"{tier}: worst error, percent", max(errors), worst_limit))
    return [bar.as_json() for bar in bars]


def _error_percent(predicted: int, measured: int) -> float:
    """Error of a prediction; positive where it is too high."""
    return 100 * (predicted / measured - 1)


def _this_device(device: torch.device) -> Device:
    """The GPU of this machine, or its RAM as a CPU device."""
    if device.type == "cuda":
        return resolve_gpu("auto")[0]
    return Device(name="cpu", kind="cpu", memory_bytes=psutil.virtual_memory().total, compute_capability=(0, 0))


def _expandable() -> bool:
    """Whether PyTorch's allocator is set to expandable segments."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower()
