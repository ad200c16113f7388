"""Memory that other people measured in other tools, against the traces of these tools' steps.

fms-acceleration (Hugging Face's Trainer on 1, 2 and 4 A100), LitGPT, torchtune, Axolotl, ms-swift. Every row is
printed, misses too. The bars of errors are over rows with known settings, once for all and once without
fms-acceleration, the source of most; LitGPT's config_hub does not say which version ran. A row whose run ran out of
memory has no size: its verdict is checked.
"""

from collections.abc import Sequence
from functools import cache
from statistics import median

import torch

from benchmarks.harness import Bar, Measured, Row, at_least, at_most, benchmark, in_new_processes
from benchmarks.published_configs import PublishedConfig, published_configs
from benchmarks.published_rows import PublishedRow, published_rows
from benchmarks.verdict_counts import count_verdicts
from cuda_memory.gpus import Device
from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.as_tool import replayed_bytes
from lean_finetune.memory.advice.margins import MARGINS, judge_bytes, margin_of
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.tool_step.trace_tool import predict_tool_events
from lean_finetune.memory.trace.memory_trace import INPUTS
from lean_finetune.memory.trace.setting import Setting

CLOSE, LOW = 0.08, 0.10
MAIN_SOURCE = "fms-acceleration"
HEADROOM_PERCENT = load_params(COMMON_PARAMS).estimate.headroom_percent
"""Of `fit`."""
QUICK = 4
PREDICTED = (
    *("tool_bytes", "tool_reserved_bytes", "reserved_error", "error", "phase", "verdict", "here_bytes", "here_verdict"),
)
"""Columns of a row that come from its traces."""


def predicted(name: str) -> Row:
    """Bytes of tensors of a row as its tool runs it, and the verdict."""
    torch.set_num_threads(1)
    row = _rows()[name]
    return _of_config(row) if isinstance(row, PublishedConfig) else _of_run(row)


def _of_config(row: PublishedConfig) -> Row:
    """A configuration of a tool, as `fit --from` predicts it."""
    measured = {row.counts: row.measured_bytes}
    known = {
        "row": row.id,
        "source": row.source,
        "recipe": f"{row.tool}: its configuration",
        "gpus": 1,
        "measured_bytes": measured.get("alloc"),
        "reserved_bytes": measured.get("reserved"),
        "process_bytes": None,
        "ran": True,
        "settings_known": row.settings_known,
    }
    try:
        found = row.predict()
    except UserError as error:
        return {**known, **dict.fromkeys(PREDICTED), "note": str(error)}
    return {
        **known,
        **_errors(found.peak.bytes, found.reserved_bytes, measured.get("alloc"), measured.get("reserved")),
        "phase": found.worst_phase,
        "verdict": found.state,
        "here_bytes": None,
        "here_verdict": None,
        "note": "",
    }


def _errors(tool_bytes: int, held_bytes: int | None, allocated_bytes: int | None, reserved_bytes: int | None) -> Row:
    """The predicted bytes, and their relative errors where the row was measured."""
    return {
        "tool_bytes": tool_bytes,
        "tool_reserved_bytes": held_bytes,
        "reserved_error": held_bytes / reserved_bytes - 1 if held_bytes and reserved_bytes else None,
        "error": None if allocated_bytes is None else tool_bytes / allocated_bytes - 1,
    }


def _of_run(row: PublishedRow) -> Row:
    """A run of a table, whose step is described by its recipe."""
    device, _ = resolve_gpu(row.gpu)
    known = {
        "row": row.id,
        "source": row.source,
        "recipe": row.recipe,
        "gpus": row.gpus,
        "measured_bytes": row.allocated_bytes,
        "reserved_bytes": row.reserved_bytes,
        "process_bytes": row.process_bytes,
        "ran": row.ran,
        "settings_known": row.settings_known,
    }
    try:
        if row.run.train.offload != "none":
            raise UserError("FSDP1's offload to the host is not traced")
        peaks, events = predict_tool_events(row.run)
    except UserError as error:
        return {**known, **dict.fromkeys(PREDICTED), "note": str(error)}
    peaks.pop(INPUTS, None)
    phase = max(peaks, key=lambda name: peaks[name].bytes)
    tool_bytes = peaks[phase].bytes
    held_bytes = None if events is None else replayed_bytes(row.run, events)
    margin = MARGINS["tool_one_gpu" if row.gpus == 1 else "tool_several_gpus"]
    return {
        **known,
        **_errors(tool_bytes, held_bytes, row.allocated_bytes, row.reserved_bytes),
        "phase": phase,
        "verdict": judge_bytes(tool_bytes, device, "tensors", margin, HEADROOM_PERCENT),
        **_here(row, device),
        "note": row.note,
    }


def _here(row: PublishedRow, device: Device) -> Row:
    """Bytes of the same run here, and the verdict of `fit`: of rows on several GPUs, whose margin is large."""
    if row.gpus == 1:
        return {"here_bytes": None, "here_verdict": None}
    train = row.run.train
    changes = {
        "sharding": "zero3" if train.sharding == "none" else train.sharding,
        "loss_chunk": 512 if row.run.step.loss == "liger" else None,
    }
    setting = Setting(train=train.model_copy(update=changes), gpus=row.gpus)
    here = predict(TracedModel(row.run.config, setting, row.run.target), ((row.run.shape,),)).peak.bytes
    margin = margin_of(setting, device)
    return {"here_bytes": here, "here_verdict": judge_bytes(here, device, "tensors", margin, HEADROOM_PERCENT)}


@cache
def _rows() -> dict[str, PublishedRow | PublishedConfig]:
    rows: list[PublishedRow | PublishedConfig] = [*published_rows(), *published_configs()]
    return {row.id: row for row in rows}


def measure(quick: bool) -> Measured:
    """Trace every row; with `quick` the first few."""
    chosen = [*_rows()][: QUICK if quick else None]
    rows = in_new_processes(predicted, chosen, "fork")
    return Measured(rows=rows, bars=[] if quick else bars(rows))


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars over the rows with a measured size and known settings, and over the verdicts of all."""
    errors = [row["error"] for row in rows if row["error"] is not None and row["settings_known"]]
    others = [error for row in rows if not row["source"].startswith(MAIN_SOURCE) for error in _of_known(row)]
    counts = count_verdicts((row["verdict"], row["ran"]) for row in rows if row["verdict"] is not None)
    here = count_verdicts((row["here_verdict"], row["ran"]) for row in rows if row["here_verdict"] is not None)
    print(f"\nAs the tool runs it: {counts.text}\nOn several GPUs, here: {here.text}")
    return [
        at_least("rows with known settings", len(errors), 1),
        at_most("median error of allocated bytes, %", 100 * median(map(abs, errors)), 2),
        at_least("rows within 8 %, %", 100 * sum(abs(error) <= CLOSE for error in errors) / len(errors), 90),
        at_most("rows too low by more than 10 %", sum(error < -LOW for error in errors), 0),
        at_most("the row that is most too low, %", -100 * min(errors), 100 * LOW),
        at_least("rows of other sources", len(others), 1),
        at_most("rows of other sources: median error, %", 100 * median(map(abs, others)), 2),
        at_least("rows of other sources within 8 %, %", 100 * sum(abs(e) <= CLOSE for e in others) / len(others), 90),
        at_most("rows of other sources too low by more than 10 %", sum(error < -LOW for error in others), 0),
        at_least("verdicts 'fits' that were right, %", 100 * counts.share_of_fits, 99),
        at_least("verdicts 'fits' for runs here on several GPUs that were right, %", 100 * here.share_of_fits, 99),
    ]


def _of_known(row: Row) -> list[float]:
    """The error of a row with known settings: of tensors, or of reserved memory where only that was measured."""
    found = row["reserved_error"] if row["error"] is None else row["error"]
    return [found] if found is not None and row["settings_known"] else []


if __name__ == "__main__":
    benchmark("published", measure)()
