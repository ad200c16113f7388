"""What the user is told when memory has ended: where, predicted beside measured, and what would fit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lean_finetune.config.field_types import Method, OptimizerName, Precision
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.core.address_limit import AddressLimit
from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.units import GIB, MIB, readable_size
from lean_finetune.train.oom.oom_state import READING, Failure, OutOfMemory

MOST_CATEGORIES = 4
MOST_COMMANDS = 3
MOST_SAID = 160
"""Characters of what the allocator says: CUDA's goes on with figures that are told here as well."""
WHAT_FITS = "lean-finetune fit --gpu"
OWN_SHARE = 1 / 32
"""Of a limit of addresses. A run that takes less of it is not what met it, and no change of the run helps."""
SMALLEST_ASKED_BYTES = GIB
"""The question above is of a GPU: one that a CUDA context fills is refused, and one of little more fits nothing."""
SMALLER = ("bucket.max_tokens", "lower it")
LIGHTER: Mapping[Method, str] = {"full": "lora or qlora", "lora": "qlora", "int8_lora": "qlora"}
"""Methods that hold fewer bits of weights, by the one that runs."""
MORE_MEMORY = ("hardware.gpu", "give the run more memory")
SPLIT = "dvc exp run -S run.oom_recovery=split"


@dataclass(frozen=True, kw_only=True)
class Running:
    """What of the run decides what can still be changed."""

    method: Method
    precision: Precision
    optimizer: OptimizerName
    can_split: bool
    """run.oom_recovery=split is possible, and is not what runs."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What stage estimate wrote. It is looked at when memory has ended, and decides no result."""

    metrics: Mapping[str, Any]
    """data/estimate/figures.json."""
    breakdown: Mapping[str, Mapping[str, int]]
    """breakdown.json: bytes by category, by phase; empty where the file is not there."""
    advice: Mapping[str, Any]
    """advice.json; empty where the file is not there."""


def read_forecast(metrics: Mapping[str, Any], directory: Path) -> Forecast:
    """What `directory` (data/estimate) holds."""
    found: list[dict[str, Any]] = []
    for name in ("breakdown.json", "advice.json"):
        path = directory / name
        found.append(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
    return Forecast(metrics=metrics, breakdown=found[0], advice=found[1])


def out_of_memory(failure: Failure, forecast: Forecast, *, device: str, running: Running, record: Path) -> OutOfMemory:
    """The fault that ends the run; all that is known is also written to `record`.

    Args:
        failure: where memory ended.
        forecast: of the run.
        device: its name.
        running: what runs: it is never proposed.
        record: a JSON file.
    """
    commands = would_fit(failure, forecast)
    offered = (
        []
        if not (running.can_split and failure.can_be_cut)
        else [f"or let steps be cut smaller when memory ends: {SPLIT}"]
    )
    lines = [
        *_predicted(failure, forecast),
        _measured(failure),
        f"the system said: {_cut_short(failure.message)}",
        *commands,
        *offered,
        _recorded(record, {"failure": asdict(failure), "predicted": _by_phase(failure, forecast), "told": commands}),
    ]
    parameter, remedy = _first_remedy(failure, running)
    told = f"{parameter}: {_where(failure, device)}; {remedy}, or change the run as below"
    if failure.addresses is not None:
        told = _address_fault(failure, forecast, device, failure.addresses, f"{parameter}: {remedy}")
    return OutOfMemory(told, *lines, weights_whole=failure.weights_whole)


def _first_remedy(failure: Failure, running: Running) -> tuple[str, str]:
    """What the fault is told of and what helps first, by phase; where micro-batches are in work it is their size."""
    if failure.phase in ("checkpoint", "save"):
        return MORE_MEMORY
    if failure.phase == "load":
        types = "" if running.precision in ("bf16", "pure_bf16", "fp16") else "train.precision=bf16"
        bits = " and ".join(filter(None, (LIGHTER.get(running.method), types)))
        return ("train.method", f"hold the weights in fewer bits ({bits})") if bits else MORE_MEMORY
    if failure.phase == "clip":
        return ("train.method", "train fewer weights") if running.method == "full" else ("train.lora.rank", "lower it")
    if failure.phase == "optimizer":
        return (
            ("train.optimizer", "take one with less state") if OPTIMIZERS[running.optimizer].has_state else MORE_MEMORY
        )
    alone = failure.rows == 1 and not failure.joined
    return ("data.max_length", "a micro-batch is one row already; lower it") if alone else SMALLER


def _address_fault(failure: Failure, forecast: Forecast, device: str, limit: AddressLimit, remedy: str) -> str:
    """The fault where the limit of addresses ended memory; `remedy` is what else lowers what the run takes."""
    own_bytes = (failure.held_bytes or 0) + (failure.asked_bytes or 0)
    own_bytes = max(own_bytes, sum(_by_phase(failure, forecast).values()))
    other = f", or {remedy}" if own_bytes >= OWN_SHARE * limit.limit_bytes else ""
    return (
        f"ulimit -v: {_where(failure, device)}: the address space of a process (RLIMIT_AS) must hold its libraries and "
        f"files too; it is limited to {readable_size(limit.limit_bytes)}, {readable_size(limit.used_bytes)} are in "
        f"use, {readable_size(failure.held_bytes or 0)} of them by the run; raise the limit (ulimit "
        f"-v unlimited, or in the job's settings){other}"
    )


def would_fit(failure: Failure, forecast: Forecast) -> list[str]:
    """Lines with the cheapest changes that are predicted to fit, or with how to find some, if anything is."""
    advised = forecast.advice.get("remedies", [])
    if not advised and failure.held_bytes is not None and failure.phase != "load":
        # What was there when memory ended is what a change has to do with; those that change least come first.
        changes = forecast.advice.get("single_changes", [])
        advised = [change for change in changes if change["peak_bytes"] <= failure.held_bytes]
    lines = [f"would fit: {one['command']} ({readable_size(one['peak_bytes'])})" for one in advised[:MOST_COMMANDS]]
    if not lines and failure.addresses is None and (failure.held_bytes or 0) >= SMALLEST_ASKED_BYTES:
        return [f"what would fit is told by: {WHAT_FITS} {(failure.held_bytes or 0) // MIB}MiB"]
    return lines


def _where(failure: Failure, device: str) -> str:
    """What the run was doing."""
    asked = "" if failure.asked_bytes is None else f", where {readable_size(failure.asked_bytes)} more were asked for"
    doing = "between phases" if failure.phase == READING else f"in {failure.phase}"
    if failure.step is None:
        return f"memory of {device} ended {doing}{asked}"
    place = f"{doing} of optimizer step {failure.step}"
    if failure.number is not None:
        size = (
            f"{failure.rows} rows joined to {failure.length}"
            if failure.joined
            else f"{failure.rows} x {failure.length}"
        )
        place += f", micro-batch {failure.number} of {failure.micro_batches} ({size} tokens)"
    return f"memory of {device} ended {place}{asked}"


def _by_phase(failure: Failure, forecast: Forecast) -> Mapping[str, int]:
    """Predicted bytes by category in the phase that failed; of the highest one where the phase is no predicted one."""
    return forecast.breakdown.get(failure.phase) or forecast.breakdown.get("peak") or {}


def _predicted(failure: Failure, forecast: Forecast) -> list[str]:
    """The line of what was predicted; none where nothing is known."""
    by_category = _by_phase(failure, forecast)
    if not by_category:
        return []
    metrics = forecast.metrics
    phase = failure.phase if failure.phase in forecast.breakdown else metrics["worst_phase"]
    device = f"{metrics['gpu']} of {metrics['capacity_gib']:g} GiB"
    total = readable_size(sum(by_category.values()))
    return [f"predicted: {total} of tensors at most in {phase} ({_listed(by_category)}), for {device}"]


def _measured(failure: Failure) -> str:
    """The line of what was there."""
    if failure.held_bytes is None:
        return "measured: nothing counts memory on this system"
    rest = failure.held_bytes - sum(failure.by_category.values())
    by_category = {**failure.by_category, "activations and all else": max(rest, 0)}
    reserved = "" if failure.reserved_bytes is None else f"; {readable_size(failure.reserved_bytes)} reserved"
    free = ""
    if failure.free_bytes is not None and failure.total_bytes is not None:
        free = f"; {readable_size(failure.free_bytes)} of {readable_size(failure.total_bytes)} free on the device"
    return f"measured: {readable_size(failure.held_bytes)} ({_listed(by_category)}){reserved}{free}"


def _cut_short(message: str) -> str:
    """As much of a message as a line takes."""
    return message if len(message) <= MOST_SAID else f"{message[:MOST_SAID]}…"


def _listed(by_category: Mapping[str, int]) -> str:
    """The largest categories, largest first."""
    by_size = sorted(by_category.items(), key=lambda item: (-item[1], item[0]))
    shown: Sequence[tuple[str, int]] = [(name, size) for name, size in by_size if size][:MOST_CATEGORIES]
    return ", ".join(f"{name} {readable_size(size)}" for name, size in shown)


def _recorded(record: Path, content: Mapping[str, Any]) -> str:
    """Write the file, and say where it is; a disk that refuses it must not hide that memory ended."""
    try:
        write_json(record, content)
    except UserError as error:
        return f"no details were written: {error}"
    return f"details: {record}"
