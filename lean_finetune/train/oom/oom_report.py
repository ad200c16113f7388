"""Write the error message of an out-of-memory error: where, predicted and measured memory, and what would fit."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_memory.diagnosis import analyse
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.units import GIB, MIB, counted, readable_size
from lean_finetune.config.field_types import Method
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.config.schema import Train
from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.train.oom.oom_handler import READING, AddressLimit, Failure, OutOfMemory

MOST_CATEGORIES = 4
MOST_COMMANDS, MOST_PLACES = 3, 3
MOST_CHARACTERS = 160
"""Of the allocator's message: CUDA's continues with figures that the report has itself."""
WHAT_FITS = "lean-finetune fit --gpu"
OWN_SHARE = 1 / 32
"""Share of an address-space limit below which the run is not the cause, and changing it does not help."""
SMALLEST_GPU_BYTES = GIB
"""`lean-finetune fit` refuses smaller GPUs: a CUDA context alone would fill them."""
MORE_MEMORY = ("hardware.gpu", "give the run more memory")
FEWER_BITS: Mapping[Method, str] = {"full": "lora or qlora", "lora": "qlora", "int8_lora": "qlora"}
"""Methods that store weights in fewer bits, by the current method."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Outputs of stage estimate. They are read only after an out-of-memory error and never change a result."""

    metrics: Mapping[str, Any]
    """data/estimate/figures.json."""
    breakdown: Mapping[str, Mapping[str, int]]
    """breakdown.json: bytes by phase and category; empty if the file is missing."""
    advice: Mapping[str, Any]
    """advice.json; empty if the file is missing."""


def read_prediction(metrics: Mapping[str, Any], directory: Path) -> Prediction:
    """Read what `directory` (data/estimate) has."""
    paths = directory / "breakdown.json", directory / "advice.json"
    breakdown, advice = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in paths)
    return Prediction(metrics=metrics, breakdown=breakdown, advice=advice)


def oom_error(
    failure: Failure,
    prediction: Prediction,
    *,
    device: str,
    train: Train,
    can_split: bool,
    record: Path,
    snapshot: Path | None,
) -> OutOfMemory:
    """Return the error that ends the run, and write all details to `record`, a JSON file.

    The method, precision and optimizer of `train` are never proposed. `can_split`: run.oom_recovery=split is
    possible and not set yet. `snapshot` is the file of the allocator's history, if one was written.
    """
    commands = changes_that_fit(failure, prediction)
    split = "or split steps when memory runs out: dvc exp run -S run.oom_recovery=split"
    message = failure.message
    filled, peak = ([], None) if snapshot is None else _explained(snapshot)
    content = {
        "failure": asdict(failure),
        "predicted": _by_phase(failure, prediction),
        "changes": commands,
        "snapshot": peak,
    }
    try:
        write_json(record, content)
        written = f"details: {record}"
    except UserError as error:  # It must not hide the out-of-memory error.
        written = f"no details were written: {error}"
    details = [
        *_predicted_line(failure, prediction),
        _measured_line(failure),
        *filled,
        f"allocator: {message if len(message) <= MOST_CHARACTERS else f'{message[:MOST_CHARACTERS]}…'}",
        *commands,
        *([split] if can_split and failure.can_split else []),
        written,
    ]
    parameter, remedy = _first_remedy(failure, train)
    text = f"{parameter}: {_where(failure, device)}; {remedy}, or change the run as below"
    if failure.addresses is not None:
        text = _address_error(failure, prediction, device, failure.addresses, f"{parameter}: {remedy}")
    return OutOfMemory(text, *details, weights_intact=failure.weights_intact)


def _first_remedy(failure: Failure, train: Train) -> tuple[str, str]:
    """Return the parameter that helps most in the phase that failed, and how to change it."""
    if failure.phase in ("checkpoint", "save"):
        return MORE_MEMORY
    if failure.phase == "load":
        types = "" if train.precision in ("bf16", "pure_bf16", "fp16") else "train.precision=bf16"
        bits = " and ".join(filter(None, (FEWER_BITS.get(train.method), types)))
        return ("train.method", f"store the weights in fewer bits ({bits})") if bits else MORE_MEMORY
    if failure.phase == "clip":
        return ("train.method", "train fewer weights") if train.method == "full" else ("train.lora.rank", "lower it")
    if failure.phase == "optimizer":
        has_state = OPTIMIZERS[train.optimizer].has_state
        return ("train.optimizer", "use one with less state") if has_state else MORE_MEMORY
    if failure.rows == 1 and not failure.joined:
        return "data.max_length", "the micro-batch has only one row; lower it"
    return "bucket.max_tokens", "lower it"


def _address_error(failure: Failure, prediction: Prediction, device: str, limit: AddressLimit, remedy: str) -> str:
    """Return the message for an exhausted address space; `remedy` is what else reduces the run's memory."""
    own_bytes = (failure.live_bytes or 0) + (failure.requested_bytes or 0)
    own_bytes = max(own_bytes, sum(_by_phase(failure, prediction).values()))
    other = f", or {remedy}" if own_bytes >= OWN_SHARE * limit.limit_bytes else ""
    return (
        f"ulimit -v: {_where(failure, device)}: the address space of a process (RLIMIT_AS) has its libraries and files "
        f"too; it is limited to {readable_size(limit.limit_bytes)}, {readable_size(limit.used_bytes)} are in use, "
        f"{readable_size(failure.live_bytes or 0)} of them by the run; raise the limit (ulimit -v unlimited, or in the "
        f"job's settings){other}"
    )


def changes_that_fit(failure: Failure, prediction: Prediction) -> list[str]:
    """Return lines with the cheapest changes that are predicted to fit, or with the command that finds some."""
    advised = prediction.advice.get("remedies", [])
    if not advised and failure.live_bytes is not None and failure.phase != "load":
        # The memory in use at the error is what a change has to fit into. The smallest changes come first.
        changes = prediction.advice.get("single_changes", [])
        advised = [change for change in changes if change["peak_bytes"] <= failure.live_bytes]
    lines = [f"would fit: {one['command']} ({readable_size(one['peak_bytes'])})" for one in advised[:MOST_COMMANDS]]
    if not lines and failure.addresses is None and (failure.live_bytes or 0) >= SMALLEST_GPU_BYTES:
        return [f"to list what would fit, run: {WHAT_FITS} {(failure.live_bytes or 0) // MIB}MiB"]
    return lines


def _where(failure: Failure, device: str) -> str:
    """Name device, phase, step and micro-batch."""
    size = "" if failure.requested_bytes is None else f" allocating {readable_size(failure.requested_bytes)}"
    phase = "between phases" if failure.phase == READING else f"in {failure.phase}"
    where = f"{device} ran out of memory{size} {phase}"
    if failure.step is None:
        return where
    where += f" of optimizer step {failure.step}"
    if failure.number is not None:
        rows = f"{counted(failure.rows, 'row')} joined to" if failure.joined else f"{failure.rows} x"
        where += f", micro-batch {failure.number} of {failure.micro_batches} ({rows} {failure.length} tokens)"
    return where


def _by_phase(failure: Failure, prediction: Prediction) -> Mapping[str, int]:
    """Return predicted bytes by category in the failed phase, or at the peak if that phase has no prediction."""
    return prediction.breakdown.get(failure.phase) or prediction.breakdown.get("peak") or {}


def _predicted_line(failure: Failure, prediction: Prediction) -> list[str]:
    """Return a line with the predicted memory; none without a prediction."""
    by_category = _by_phase(failure, prediction)
    if not by_category:
        return []
    metrics = prediction.metrics
    phase = failure.phase if failure.phase in prediction.breakdown else metrics["worst_phase"]
    device = f"{metrics['gpu']} of {metrics['capacity_gib']:g} GiB"
    total = readable_size(sum(by_category.values()))
    return [f"predicted: {total} of tensors at most in {phase} ({_largest(by_category)}), for {device}"]


def _measured_line(failure: Failure) -> str:
    """Return a line with the measured memory."""
    if failure.live_bytes is None:
        return "measured: unknown, this system has no allocator statistics"
    rest = failure.live_bytes - sum(failure.by_category.values())
    by_category = {**failure.by_category, "activations and all else": max(rest, 0)}
    reserved = "" if failure.reserved_bytes is None else f"; {readable_size(failure.reserved_bytes)} reserved"
    free = ""
    if failure.free_bytes is not None and failure.total_bytes is not None:
        free = f"; {readable_size(failure.free_bytes)} of {readable_size(failure.total_bytes)} free on the device"
    return f"measured: {readable_size(failure.live_bytes)} ({_largest(by_category)}){reserved}{free}"


def _explained(snapshot: Path) -> tuple[list[str], dict[str, Any] | None]:
    """Return lines with what filled the memory when the request failed, and all that was live then."""
    command = shlex.join(["lean-finetune", "snapshot", str(snapshot)])
    try:
        analyses = [analyse(recording) for recording in read_snapshot(snapshot)]
    except Exception as error:  # It must not hide the out-of-memory error.
        return [f"the snapshot could not be explained ({error}); try: {command}"], None
    analysis = max(analyses, key=lambda one: (len(one.failures), one.peak.allocated_bytes))
    places = [f"{one.where} {readable_size(one.bytes)}" for one in analysis.peak.lines[:MOST_PLACES]]
    peak: dict[str, Any] = analysis.as_json()["peak"]
    filled = f"filled by: {_largest(peak['by_category'])}; most of it from {', '.join(places)}"
    return [
        *([filled] if places else []),
        f"more: {command}",
    ], peak  # Without a tensor another process fills the device.


def _largest(by_category: Mapping[str, int]) -> str:
    """List the largest categories, largest first."""
    by_size = sorted((-size, name) for name, size in by_category.items() if size)
    return ", ".join(f"{name} {readable_size(-size)}" for size, name in by_size[:MOST_CATEGORIES])
