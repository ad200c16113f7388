"""Peak memory on a CUDA machine, by phase, against the prediction of the same commit made in the same run.

`python -m benchmarks.gpu.memory` writes its file after each configuration and goes on where it stopped, so that it can
run in short stretches. It needs no network, data, weights or DVC: only PyTorch, transformers, peft, bitsandbytes and
pydantic. `--device cpu` shows on small models that it works. Three tiers: tensors (max_memory_allocated), reserved (by
the caching allocator), process (all that the driver counts, CUDA's context included).
"""

import os
import time
from pathlib import Path
from statistics import mean
from typing import Any

import click
import psutil
import torch

from benchmarks.form import RESULTS, Row, commit, format_table, machine, versions
from benchmarks.gpu.cases import LAYOUTS, MODELS, GpuCase, cases, small_cases
from benchmarks.gpu.run import Run, measure_case
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.memory.allocator.reserved_memory import reserve
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.gpus import Device
from lean_finetune.memory.predict.peak import Prediction, predict
from lean_finetune.memory.predict.peak_explanation import trace_origins
from lean_finetune.memory.trace.cuda_kernels import target_of

OUT = RESULTS / "gpu_memory.json"
SPARE_SHARE = 0.04
"""Of the device, left for what is not predicted: a configuration that needs more is not tried."""
BARS = {"tensors": (1.5, 3.0), "reserved": (3.0, 6.0)}
"""Mean and worst error of a tier, in percent, that are promised."""
PHASES_MEASURED = ("forward", "backward", "clip", "optimizer")


@click.command(help=__doc__)
@click.option("--device", "device_name", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--minutes", type=float, default=8.0, show_default=True, help="Begin no configuration after these.")
@click.option("--out", type=Path, default=OUT, show_default=True)
@click.option("--commit", "known_commit", help="What is measured, where the machine has no git.")
def main(device_name: str, minutes: float, out: Path, known_commit: str | None) -> None:
    """Measure what is not in the file yet."""
    start = time.monotonic()
    device = torch.device(device_name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("--device: no CUDA device here; run it where there is one, or try --device cpu")
    wanted = list(cases() if device.type == "cuda" else small_cases())
    done = Results(out, known_commit or commit())
    for case in wanted:
        if case.name in done.rows:
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        row = compare(case, device)
        done.add(case.name, row)
        click.echo(format_table([{key: value for key, value in row.items() if not isinstance(value, dict)}]))
    click.echo(format_table(done.summary()))
    left = sum(case.name not in done.rows for case in wanted)
    click.echo(f"{out}: {len(done.rows)} configurations" + (f", {left} left: run it again" if left else ", all done"))


class Results:
    """The file: rows of one commit by name."""

    def __init__(self, path: Path, of_commit: str | None):
        """Read what the same commit measured before; figures of another one are measured again."""
        self._path, self._commit = path, of_commit
        before = read_json(path) if path.exists() else {}
        same = before.get("commit") == of_commit and before.get("versions") == versions()
        self.rows: dict[str, Row] = {row["name"]: row for row in before["rows"]} if same else {}

    def add(self, name: str, row: Row) -> None:
        """Keep a row, in the file too."""
        self.rows[name] = row
        content: dict[str, Any] = {"name": "gpu_memory", "commit": self._commit, "machine": machine()}
        content |= {"versions": versions(), "rows": list(self.rows.values()), "summary": self.summary()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, content)

    def summary(self) -> list[Row]:
        """Mean and worst error of each tier, with its bars."""
        found: list[Row] = []
        for tier, (mean_bar, worst_bar) in BARS.items():
            errors = [abs(row[f"{tier}_error_percent"]) for row in self.rows.values() if f"{tier}_error_percent" in row]
            if errors:
                within = mean(errors) <= mean_bar and max(errors) <= worst_bar
                spread = {"mean_percent": mean(errors), "worst_percent": max(errors), "within_bars": within}
                found.append({"tier": tier, "configurations": len(errors), **spread})
        return found


def compare(case: GpuCase, device: torch.device) -> Row:
    """A configuration predicted, then measured; or why it was not measured."""
    here = _device_here(device)
    target = target_of(here)
    config, steps = MODELS[case.model], LAYOUTS[case.layout]
    predicted = predict(config, case.setting, steps, target)
    row: dict[str, Any] = {"name": case.name, "tensors_predicted_bytes": predicted.peak.bytes}
    if predicted.peak.bytes > (1 - SPARE_SHARE) * here.memory_bytes:
        return {**row, "skipped": "predicted not to fit this device"}
    if here.kind == "cuda":
        reserved = reserve(
            trace_origins(config, case.setting, steps, target), expandable=_expandable(), capacity_bytes=None
        )
        row["reserved_predicted_bytes"] = reserved.peak_bytes
    try:
        run = measure_case(case, device)
    except torch.OutOfMemoryError as error:
        return {**row, "out_of_memory": str(error).splitlines()[0]}
    return {**row, **_measured(row, predicted, run)}


def _measured(row: Row, predicted: Prediction, run: Run) -> Row:
    """What was counted, beside what was predicted; loading is apart, for these weights are not loaded."""
    counted = {phase: run.peaks.peak_bytes_by_phase[phase] for phase in PHASES_MEASURED}
    tensors = max(counted.values())
    found: dict[str, Any] = {
        "tensors_measured_bytes": tensors,
        "tensors_error_percent": _error_percent(predicted.peak.bytes, tensors),
        "how": run.peaks.how,
        "phases": {
            phase: {"predicted_bytes": predicted.by_phase[phase].bytes, "measured_bytes": size}
            for phase, size in counted.items()
        },
    }
    if run.peaks.peak_reserved_bytes is not None:
        found |= {
            "reserved_measured_bytes": run.peaks.peak_reserved_bytes,
            "reserved_error_percent": _error_percent(row["reserved_predicted_bytes"], run.peaks.peak_reserved_bytes),
            "reserved_after_load_bytes": run.reserved_after_load_bytes,
            "process_measured_bytes": run.process_bytes,
            "expandable_segments": _expandable(),
        }
    return found


def _error_percent(predicted: int, measured: int) -> float:
    """How far a prediction is off; above zero where it is too high."""
    return 100 * (predicted / measured - 1)


def _device_here(device: torch.device) -> Device:
    """The GPU of this machine, or its RAM as the CPU's tests see it."""
    if device.type == "cuda":
        return resolve_gpu("auto")[0]
    return Device(name="cpu", kind="cpu", memory_bytes=psutil.virtual_memory().total, compute_capability=(0, 0))


def _expandable() -> bool:
    """Whether PyTorch was told to expand segments."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower()


if __name__ == "__main__":
    main()
