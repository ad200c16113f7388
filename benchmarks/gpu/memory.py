"""Measure peak memory on a device by phase, beside the prediction of the same commit.

Three tiers: tensors (max_memory_allocated), reserved (by the caching allocator), process (everything that the driver
counts, with CUDA's context).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import torch

from benchmarks.gpu.cases import LAYOUTS, MemoryCase
from benchmarks.gpu.model_configs import MODELS
from benchmarks.harness import Bar, Row, at_most
from cuda_memory.gpus import Device
from lean_finetune.memory.advice.plan_memory import replay
from lean_finetune.memory.predict.deep_events import step_events
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model.allocator_settings import use_segments
from lean_finetune.train.monitor.measured_peak import CudaMeter, Meter
from tests.kit.random_model import free_cached, random_model
from tests.kit.specs import Trainer, random_batch

SPARE_SHARE = 0.04
"""Share of the device left for what is not predicted: a case that needs more is skipped."""
LIMITS = {"tensors": (1.5, 3.0), "reserved": (3.0, 6.0)}
"""Limits of the mean and the worst error of a tier, in percent."""
MAX_EVENTS = 200_000
"""Latest actions of the allocator in a snapshot: more than any case has, three per tensor."""


def predicted(case: MemoryCase, gpu: Device) -> Row:
    """The predicted peaks, of the run and by phase; needs no GPU."""
    target, config, steps = target_of(gpu), MODELS[case.model], LAYOUTS[case.layout]
    peaks = predict(TracedModel(config, case.setting, target), steps)
    phases = {phase: {"tensors_predicted_bytes": peak.bytes} for phase, peak in peaks.by_phase.items()}
    row = {"tensors_predicted_bytes": peaks.peak.bytes, "phases": phases}
    if peaks.peak.bytes > (1 - SPARE_SHARE) * gpu.memory_bytes:
        return {**row, "skipped": "predicted not to fit this device"}
    if gpu.kind == "cuda":
        events, _ = step_events(TracedModel(config, case.setting, target), steps)
        replayed = replay(events, steps, expandable=case.expandable, capacity_bytes=None)
        row["reserved_predicted_bytes"] = replayed.reserved_peak_bytes
        for phase, size in replayed.reserved_by_phase.items():
            phases[phase]["reserved_predicted_bytes"] = size
    return row


def measured(case: MemoryCase, device: torch.device, meter: Meter, snapshot: Path | None = None) -> Row:
    """Load random weights, run the steps of a case, and return the columns of what was measured.

    Loading does not count, since these weights are not loaded from files. `snapshot` is a file for the allocator's
    history since the start, written also if memory ends.
    """
    use_segments(case.expandable, device)
    if snapshot is not None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_EVENTS)
    try:
        return _steps(case, device, meter)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    finally:
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(snapshot))


def _steps(case: MemoryCase, device: torch.device, meter: Meter) -> Row:
    """Run the steps in one window of the meter."""
    config, cuda, phases = MODELS[case.model], isinstance(meter, CudaMeter), defaultdict[str, dict[str, int]](dict)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with meter.phase(name):
            yield
            if cuda:  # Segments are reserved until the end, so no phase has less than an earlier one.
                phases[name]["reserved_measured_bytes"] = torch.cuda.max_memory_reserved(device)

    with meter.window("run"):
        with meter.phase("load"):
            trainer = Trainer.of(random_model(config, case.setting.train, device), case.setting, device)
            if cuda:
                free_cached()
        loaded = torch.cuda.memory_reserved(device) if cuda else None
        vocabulary = config.get_text_config().vocab_size
        for shapes in LAYOUTS[case.layout]:
            batches = (random_batch(shape, vocabulary, device) for shape in shapes)
            trainer.step(batches, sum(shape.supervised for shape in shapes), phase)
    peaks = meter.result()
    for name, size in peaks.peak_bytes_by_phase.items():
        if name != "load":
            phases[name]["tensors_measured_bytes"] = size
    found = {"tensors_measured_bytes": peaks.step_peak_bytes, "how": peaks.how, "phases": dict(phases)}
    if cuda:
        free, total = torch.cuda.mem_get_info(device)
        found |= {
            "reserved_measured_bytes": peaks.peak_reserved_bytes,
            "reserved_after_load_bytes": loaded,
            "process_measured_bytes": total - free,  # On a machine without other processes on the device.
        }
    return found


def compared(predicted: Row, measured: Row) -> Row:
    """Both, with the error of each tier in percent; positive where the prediction is too high."""
    row = {**predicted, **measured}
    if "phases" in measured:
        row["phases"] = {
            phase: {**predicted.get("phases", {}).get(phase, {}), **sizes}
            for phase, sizes in measured["phases"].items()
        }
    for tier in LIMITS:
        if f"{tier}_measured_bytes" in row and f"{tier}_predicted_bytes" in row:
            ratio = row[f"{tier}_predicted_bytes"] / row[f"{tier}_measured_bytes"]
            row[f"{tier}_error_percent"] = 100 * (ratio - 1)
    return row


def bars(rows: Mapping[str, Row]) -> list[Bar]:
    """The bars of each tier that was measured."""
    found: list[Bar] = []
    for tier, (mean_limit, worst_limit) in LIMITS.items():
        errors = [abs(row[f"{tier}_error_percent"]) for row in rows.values() if f"{tier}_error_percent" in row]
        if errors:
            found.append(at_most(f"{tier}: mean of {len(errors)} errors, percent", mean(errors), mean_limit))
            found.append(at_most(f"{tier}: worst error, percent", max(errors), worst_limit))
    return found
