"""Predict the peak of every setting that differs from the run in one switch, for switches.csv and advice.json."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cuda_memory.units import GIB
from lean_finetune.config.schema import Bucket
from lean_finetune.core.errors import UserError
from lean_finetune.core.progress_bar import progress_bar
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import Allowed
from lean_finetune.memory.advice.switch import Support, flag, set_options
from lean_finetune.memory.advice.switches import SWITCHES, different, setting_with
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import halved
from lean_finetune.model.quantize import method_fault

SweepPoint = tuple[tuple[str, ...], int]
"""Overrides for `dvc exp run -S` (none for the run itself), and the predicted peak in bytes."""


def as_rows(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """The lines of switches.csv."""
    labels = [" ".join(flags).partition(".")[2] or "current" for flags, _ in points]
    peaks = [round(peak_bytes / GIB, 6) for _, peak_bytes in points]
    return [{"switch": label, "peak_gib": peak} for label, peak in zip(labels, peaks, strict=True)]


def as_advice(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """`single_changes` in advice.json."""
    changes = ((set_options(flags), peak_bytes) for flags, peak_bytes in points if flags)
    return [{"command": f"dvc exp run {options}", "peak_bytes": peak_bytes} for options, peak_bytes in changes]


def sweep_switches(run: Run, current: Prediction, allowed: Allowed | None = None) -> list[SweepPoint]:
    """Trace every single change over the micro-batches that set the current peak. The current setting comes first.

    Only `allowed` overrides are traced.
    """
    steps, setting, smaller_batch = current.steps_of_peak, run.setting, halving_flag(run.bucket, run.longest)
    support = Support(cuda=run.target.foreach, native_bf16=run.device.native_bf16)
    changes = [
        (flags, changed, steps)
        for flags, changed in single_changes(setting, support)
        if method_fault(run.config, changed.train) is None and (allowed is None or allowed(flags))
    ]
    if smaller_batch is not None and allowed is not None and not allowed((smaller_batch,)):
        smaller_batch = None
    fewer = halved(steps)
    if fewer is not None and smaller_batch is not None and not setting.train.optimizer_in_backward:
        changes.insert(0, ((smaller_batch,), setting, fewer))
    bar = progress_bar(changes, desc="estimate", unit=" switches", disable=not run.params.run.progress)
    points: list[SweepPoint] = [((), current.peak.bytes)]
    for flags, changed, shapes in bar:
        with suppress(UserError):  # The model cannot have this switch: GPT-NeoX-Japanese cannot recompute layers.
            points.append((flags, replace(run, setting=changed, steps=shapes).predict().peak.bytes))
    return points


def halving_flag(bucket: Bucket, longest: int) -> str | None:
    """The override that halves a micro-batch; None if it has one row, or no room for a row of `longest` tokens."""
    if bucket.mode == "fixed":
        return f"bucket.fixed_rows={bucket.fixed_rows // 2}" if bucket.fixed_rows > 1 else None
    return f"bucket.max_tokens={bucket.max_tokens // 2}" if bucket.max_tokens // 2 >= longest else None


def single_changes(setting: Setting, support: Support) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Every setting that differs in one switch, with its overrides."""
    for switch in SWITCHES:
        for variant in switch.shown(setting, support):
            if values := different(setting, variant):
                yield tuple(flag(key, value) for key, value in values.items()), setting_with(setting, values)
