"""Recordings of real training steps against traces of the same steps, allocation by allocation.

The steps are traced with this project's trace and its rules for CUDA, from their shapes and the order of their
operations. An allocation of a recording is explained if the trace has one of the same bytes at its place in the
sequence. `--traces DIR` has recordings under the names of `STEPS`; at least tinyllama_qlora_1x1000 (QLoRA), the only
one that --quick compares. Others are left out where DIR lacks them.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch

from benchmarks.cuda_ops import autocast_step, plain_step, qlora_step
from benchmarks.cuda_ops.traced_step import Allocation, trace_phases
from benchmarks.harness import Measured, Row, at_least, at_most, benchmark
from cuda_memory.recording import Recording, read_table
from cuda_memory.snapshot_file import read_snapshot
from lean_finetune.core.errors import UserError

EXPLAINED_PERCENT = 99.0
WORST_PEAK_PERCENT = 0.1


@dataclass(frozen=True, kw_only=True)
class Step:
    """A recorded step, and how it is traced."""

    file: str
    build: Callable
    gpu: str
    workspaces_exist: bool


COURSE = "kkaitlyn111+cs336-a2-systems__memory_files+memory_ctx{}_fullstep_.pickle"
SMALLER = "Wedsonlin+assignment2-systems__results+medium_{}_training_memory_snapshot.pickle"


def plain(file: str, tokens: int, *, workspaces_exist: bool = True) -> Step:
    """Full training of the transformer of 3 B parameters."""
    build = partial(plain_step.build, tokens)
    return Step(file=file, build=build, gpu="H100", workspaces_exist=workspaces_exist)


def smaller(file: str, tokens: int, dtype: torch.dtype) -> Step:
    """Full training of the smaller transformer. Its allocations are the same on all GPUs tried."""
    build = partial(autocast_step.build, tokens, dtype)
    return Step(file=file, build=build, gpu="RTX-4090", workspaces_exist=True)


STEPS = (
    Step(file="tinyllama_qlora_1x1000.csv.gz", build=qlora_step.build, gpu="RTX-4090", workspaces_exist=True),
    plain("transformer_2b_full_step_ctx128.csv.gz", 128, workspaces_exist=False),
    plain(COURSE.format(256), 256),
    plain(COURSE.format(512), 512),
    smaller("transformer_medium_training_ctx512.csv.gz", 512, torch.bfloat16),
    smaller(SMALLER.format(1024), 1024, torch.bfloat16),
    smaller(SMALLER.format(128), 128, torch.float32),
    smaller(SMALLER.format(256), 256, torch.float32),
)


def measure(quick: bool, traces: Path) -> Measured:
    """Trace each step and compare; with `quick` only the QLoRA step."""
    rows: list[Row] = []
    bars = []
    if not (traces / STEPS[0].file).exists():
        raise UserError(f"--traces: {traces / STEPS[0].file} is missing; name the directory of the recordings")
    for step in STEPS[:1] if quick else STEPS:
        path = traces / step.file
        if not path.exists():
            continue
        recorded = recorded_changes(read_snapshot(path)[0] if path.suffix == ".pickle" else read_table(path))
        traced = trace_phases(step.build, step.gpu, workspaces_exist=step.workspaces_exist)
        found = list(compared(step.file.split(".")[0], recorded, traced))
        rows += [*found, _summary(found, recorded, traced)]
        total = rows[-1]
        bars += [
            at_least(f"{total['recording']}: bytes explained, percent", total["explained_percent"], EXPLAINED_PERCENT),
            at_most(
                f"{total['recording']}: error of the peak, percent",
                abs(total["peak_error_percent"]),
                WORST_PEAK_PERCENT,
            ),
        ]
    return Measured(rows=rows, bars=bars)


def recorded_changes(recording: Recording) -> list[Allocation]:
    """Allocations and releases of a recording; the operation is the innermost frame, if known."""
    changes = []
    for event in recording.events:
        if event.action == "alloc":
            frame = None if event.stack is None else recording.stacks[event.stack][0]
            operation = "unknown" if frame is None else f"{Path(frame.file).name}:{frame.line} {frame.function}"
            changes.append(Allocation(bytes=event.bytes, operation=operation))
        elif event.action == "free_completed":
            changes.append(Allocation(bytes=-event.bytes, operation=""))
    return changes


def compared(name: str, recorded: Sequence[Allocation], traced: Sequence[Allocation]) -> Iterator[Row]:
    """A row for each operation of the trace that explains allocations, and for each class that none explains."""
    theirs = [change for change in recorded if change.bytes > 0]
    ours = [change for change in traced if change.bytes > 0]
    matcher = difflib.SequenceMatcher(None, [x.bytes for x in theirs], [x.bytes for x in ours], autojunk=False)
    explained, counts = Counter[str](), Counter[str]()
    missing, missing_counts = Counter[str](), Counter[str]()
    extra = 0
    for tag, start, end, first, last in matcher.get_opcodes():
        if tag == "equal":
            for change in ours[first:last]:
                explained[change.operation] += change.bytes
                counts[change.operation] += 1
            continue
        extra += sum(change.bytes for change in ours[first:last])
        for change in theirs[start:end]:
            place = f"{change.bytes:,} bytes at {change.operation}"
            missing[place] += change.bytes
            missing_counts[place] += 1
    for operation, count in explained.most_common():
        yield _row(name, operation, counts[operation], count, count)
    for place, count in missing.most_common():
        yield _row(name, f"not explained: {place}", missing_counts[place], count, 0)
    if extra:
        yield _row(name, "only in the trace", None, 0, extra)


def _row(name: str, operation: str, count: int | None, recorded: int, explained: int) -> Row:
    return {
        "recording": name,
        "operation": operation,
        "allocations": count,
        "recorded_bytes": recorded,
        "explained_bytes": explained,
    }


def _summary(rows: Sequence[Row], recorded: Sequence[Allocation], traced: Sequence[Allocation]) -> Row:
    """All allocations, and the peak of what the step adds to the memory in use before it."""
    counted = [row for row in rows if row["allocations"] is not None]
    total, explained = (sum(row[key] for row in counted) for key in ("recorded_bytes", "explained_bytes"))
    peaks = [peak_of(recorded), peak_of(traced)]
    return {
        **_row(rows[0]["recording"], "all", sum(row["allocations"] for row in counted), total, explained),
        "explained_percent": 100 * explained / total,
        "peak_recorded_bytes": peaks[0],
        "peak_traced_bytes": peaks[1],
        "peak_error_percent": 100 * (peaks[1] / peaks[0] - 1),
    }


def peak_of(changes: Sequence[Allocation]) -> int:
    """The most that a sequence adds to the memory in use."""
    now = highest = 0
    for change in changes:
        now += change.bytes
        highest = max(highest, now)
    return highest


if __name__ == "__main__":
    directory = click.Path(exists=True, file_okay=False, path_type=Path)
    option = click.Option(
        ["--traces"], type=directory, default="../shared/facts/cuda_traces", help="Directory of recordings."
    )
    benchmark("cuda_ops", measure, [option])()
