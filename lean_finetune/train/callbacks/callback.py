"""Callbacks of the training loop: their hooks, and those of every run. One is a class with the hooks that it needs.

A run has those of `CALLBACKS` and the trackers of `run.trackers` (`trackers.py`).
"""

import csv
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch

from cuda_memory.growth import OWN, RESIDENT, Cause, classify
from cuda_memory.units import GIB, counted, readable_size
from lean_finetune.core.atomic_files import write_csv, write_text
from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.core.progress import LOG_SECONDS, progress_bar, write_line
from lean_finetune.core.regular_files import read_regular
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.step_loss import FIGURES
from lean_finetune.train.monitor.growth_advice import check_is_due, growth_line
from lean_finetune.train.monitor.memory_monitor import MEMORY_COLUMNS, make_counters

CURVE_COLUMNS = (
    "step",
    "epoch",
    "loss",
    "heldout_loss",
    "lr",
    "grad_norm",
    "tokens",
    "supervised_tokens",
    "padded_tokens",
    "micro_batches",
    "largest_micro_batch_tokens",
    "longest_row",
    "kernel_shapes",
    *MEMORY_COLUMNS,
    "measured",
    "seconds",
)
RUN_NAME = "run_name.txt"
"""In the directory of an unfinished run."""
EXPERT_COLUMNS = ("expert_load_max", "idle_experts_share")
"""Further columns of a mixture of experts."""
PREFERENCE_COLUMNS = (*FIGURES, *(f"heldout_{name}" for name in FIGURES))
"""Further columns of preferences."""
CurveRow = dict[str, Any]
"""One optimizer step of the curves; keys `CURVE_COLUMNS`, and `EXPERT_COLUMNS` or `PREFERENCE_COLUMNS`."""


def curve_row(
    planned: Sequence[MicroBatch],
    lengths: np.ndarray,
    measured: bool,
    kernel_shapes: int | None,
    figures: Mapping[str, float],
    more: Mapping[str, float],
) -> CurveRow:
    """A step's row without the columns of memory and the held-out loss.

    Args:
        planned: the step's micro-batches by plan.
        lengths: tokens of every training row.
        measured: whether the step's peak was measured.
        kernel_shapes: as `KernelShapes` counts them.
        figures: loss, lr, grad_norm and seconds.
        more: `EXPERT_COLUMNS` of a mixture, `step_loss.FIGURES` of preferences; empty for other runs.
    """
    return {
        "step": planned[0].step,
        "epoch": planned[0].epoch,
        "loss": figures["loss"],
        "lr": figures["lr"],
        "grad_norm": figures["grad_norm"],
        "tokens": sum(int(lengths[one.rows].sum()) for one in planned),
        "supervised_tokens": sum(one.supervised for one in planned),
        "padded_tokens": sum(one.padded_tokens for one in planned),
        "micro_batches": len(planned),
        "largest_micro_batch_tokens": max(one.padded_tokens for one in planned),
        "longest_row": max(int(lengths[one.rows].max(initial=0)) for one in planned),
        "kernel_shapes": kernel_shapes,
        "measured": measured,
        "seconds": figures["seconds"],
        **more,
    }


def curve_columns(rows: Sequence[CurveRow]) -> list[str]:
    """Return the columns of a run's curves."""
    more = (*EXPERT_COLUMNS, *PREFERENCE_COLUMNS)
    return [*CURVE_COLUMNS, *(name for name in more if any(name in row for row in rows))]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a callback knows of the run it is created for."""

    total_steps: int
    first_step: int
    """First optimizer step of this process; above 0 if it resumes a checkpoint."""
    parameters: Mapping[str, Any]
    """Parameters of the run by dotted name."""
    predicted_peak_bytes: int | None
    """Peak tensor memory predicted by stage estimate; None without a prediction."""
    predicted_duration: str | None
    """How long all steps take as predicted by stage estimate; None without a prediction."""
    device: torch.device
    show_progress: bool
    curves: Sequence[CurveRow]
    """Rows of all finished steps. It grows while training runs; a resumed run starts with the checkpoint's rows."""
    directories: Sequence[Path]
    """The unfinished run's directory, then that of the run it resumes if that is another; empty without checkpoints."""

    @cached_property
    def run_name(self) -> str:
        """The name under which trackers know the run; a resumed run has that of its first process."""
        if self.first_step > 0:
            for directory in self.directories:
                with suppress(OSError, UnicodeDecodeError):  # Missing or damaged: it is only a name.
                    return read_regular(directory / RUN_NAME).decode()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        for directory in self.directories[:1]:
            write_text(directory / RUN_NAME, name)
        return name


class Callback:
    """Base class of callbacks. Every hook does nothing; an exception in a hook ends the run."""

    def __init__(self, info: RunInfo):
        """Create it before the model is loaded, on the first process of a run only."""
        self.info = info

    def on_start(self) -> None:
        """Called before the model is loaded."""

    def on_micro_batch(self, number: int, count: int) -> None:
        """Called before each micro-batch of this process, `number` from 0 of `count` in the step."""

    def on_step(self, row: CurveRow) -> None:
        """Called after each optimizer step.

        `row["allocated_bytes"]` is its measured peak, None if not measured; `row["heldout_loss"]` exists if computed.
        """

    def on_checkpoint(self, step: int) -> None:
        """Called when a checkpoint of `step` finished steps was started."""

    def on_end(self, peak_bytes: int | None) -> None:
        """Called after the last step; `peak_bytes` is the measured peak of the run's steps on this process."""

    def on_fault(self, error: BaseException) -> None:
        """Called instead of `on_end` if training ends with an error or is stopped by a signal."""


class Tracker(Callback):
    """A callback that never ends a run: after its first error it prints one warning and does nothing more."""

    name: ClassVar[str]
    """In `run.trackers`, and in the warning."""
    package: ClassVar[str]
    """The module that it imports, in `open`."""
    install: ClassVar[str]
    """What pip has to install for it."""

    def __init__(self, info: RunInfo):
        super().__init__(info)
        self.active = True

    def open(self) -> None:
        """Start the run `self.info.run_name`, or continue it where the library can."""
        raise NotImplementedError

    def log(self, row: CurveRow) -> None:
        """Send one optimizer step; after `open`."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what was sent to the disk; called with each checkpoint, from which a resumed run continues."""

    def close(self, *, failed: bool) -> None:
        """End the run; `failed`: training ended with an error or was stopped."""

    def on_start(self) -> None:
        """See the base class."""
        self._try(self.open)

    def on_step(self, row: CurveRow) -> None:
        """See the base class."""
        self._try(self.log, row)

    def on_checkpoint(self, step: int) -> None:
        """See the base class."""
        self._try(self.flush)

    def on_end(self, peak_bytes: int | None) -> None:
        """See the base class."""
        self._try(self.close, failed=False)

    def on_fault(self, error: BaseException) -> None:
        """See the base class."""
        self._try(self.close, failed=True)

    def _try(self, hook: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call a hook unless an earlier one failed."""
        if not self.active:
            return
        try:
            hook(*arguments, **options)
        except Exception as error:  # Of any library; training is worth more than its record.
            self.active = False
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            write_line(f"warning: {self.name} is off from here on, training continues: {reason}")


# The callbacks of every training run: warnings of growth and of slow steps, curves, the progress bar.


class GrowthWarnings(Callback):
    """Writes one line to stderr for each cause of growth, once in a process."""

    def on_start(self) -> None:
        """Start without warnings."""
        # These call for no warning.
        self._reported: set[Cause] = {"jump", "kernels", "steady", "unclear", "too_short"}
        self._counters = make_counters(self.info.device)

    def on_step(self, row: CurveRow) -> None:
        """Check the curves if a check is due."""
        if not check_is_due(len(self.info.curves)):
            return
        for growth in classify(self.info.curves):
            if growth.cause not in self._reported:
                on_host = growth.series in (OWN, RESIDENT)
                free = free_host_bytes()[0] if on_host else self._counters.left_bytes()
                line = growth_line(growth, self.info.curves, free, self.info.parameters)
                write_line(f"warning: {line}")
            self._reported.add(growth.cause)


WINDOW = 5
"""Steps whose median speed counts."""
SLOWER = 10.0
"""Steps are so much slower when, for example, another training takes the same cores."""


class SlowSteps(Callback):
    """Writes one line to stderr when steps take `SLOWER` times as long per token as at the start of this process."""

    def on_start(self) -> None:
        """Start without speeds."""
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._steps, self._warned = 0, False

    def on_step(self, row: CurveRow) -> None:
        """Compare the last steps with the first ones, without the very first, which also loads kernels."""
        self._steps += 1
        if self._steps == 1 or self._warned:
            return
        seconds = row["seconds"] / row["padded_tokens"]
        if len(self._first) < WINDOW:
            self._first.append(seconds)
            return
        self._last.append(seconds)
        ratio = median(self._last) / median(self._first)
        if len(self._last) == WINDOW and ratio >= SLOWER:
            self._warned = True
            write_line(
                f"warning: steps take {ratio:.0f} times as long as at the start. {os.cpu_count()} cores have a load of "
                f"{os.getloadavg()[0]:.1f}: if `top` or `nvidia-smi` shows another program, stop it or train later; on "
                "a CPU, OMP_WAIT_POLICY=passive in the environment keeps threads that wait from taking a core"
            )


CURVES = "curves.csv"


class LiveCurves(Tracker):
    """Appends each step to `curves.csv` in the directory of the unfinished run, below scratch/train.

    The rows are those of `data/train/curves.csv`, which is written when training ends: DVC removes a stage's outputs
    before it runs. A resumed run starts with the checkpoint's rows, so no step is in the file twice.
    """

    name = CURVES

    def open(self) -> None:
        """See the base class."""
        # A run without checkpoints has no directory.
        self.active = bool(self.info.directories)
        if self.active:
            self._path, self._started = self.info.directories[0] / CURVES, False

    def log(self, row: CurveRow) -> None:
        """Append a row; the first time, write those of all finished steps."""
        if not self._started:
            write_csv(self._path, curve_columns(self.info.curves), self.info.curves)
            self._started = True
            return
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, fieldnames=curve_columns([row]), lineterminator="\n").writerow(row)


FORMAT = "{bar:3} {n_fmt}/{total_fmt}{postfix}, {remaining} left"
"""Fits 80 columns with 5-digit step counts."""


class ProgressBar(Callback):
    """A progress bar on stderr, and one line per held-out loss on stdout.

    Memory is what the limit applies to: reserved memory of a GPU, the process's resident memory on a CPU.
    """

    def on_start(self) -> None:
        """Open the bar; say what follows."""
        info = self.info
        self._limit_gib = make_counters(info.device).limit_bytes() / GIB
        self._on_terminal = sys.stderr.isatty()
        on_gpu = info.device.type == "cuda"
        self._column, self._counts = ("reserved_bytes", "reserved") if on_gpu else ("rss_bytes", "process")
        if info.show_progress:
            write_line(self._outlook())
        self._bar = progress_bar(
            total=info.total_steps,
            initial=info.first_step,
            desc="train",
            bar_format=FORMAT,
            disable=not info.show_progress,
        )

    def _outlook(self) -> str:
        """What the run does first, and on a GPU how long it takes."""
        info = self.info
        resumed = f" from step {info.first_step + 1:,} on" if info.first_step else ""
        tokens = info.parameters["train.tokens_per_step"]
        steps = counted(info.total_steps, "step")
        text = f"train: loads the model, then runs {steps} of up to about {tokens:,} tokens{resumed}"
        if info.device.type != "cuda":
            return f"{text} on the CPU"
        text += f" on a GPU of {self._limit_gib:.4g} GiB"
        if info.predicted_peak_bytes is not None:
            text += f", predicted tensor peak {readable_size(info.predicted_peak_bytes)}"
        if info.predicted_duration is not None:
            text += f". All steps: {info.predicted_duration}"
        return (
            f"{text}. The first step is the largest and also loads kernels: if it succeeds, later ones do. The time "
            "left is measured from then on."
        )

    def on_micro_batch(self, number: int, count: int) -> None:
        """Show the micro-batches of a step that takes long."""
        now = time.monotonic()
        if number == 0:
            self._step_began = self._shown = now
        # Short steps show none of their micro-batches, and a log file gets few lines.
        pause = LOG_SECONDS if now - self._step_began < LOG_SECONDS or not self._on_terminal else 0.0
        if self.info.show_progress and now - self._shown >= pause:
            self._shown = now
            self._bar.set_postfix_str(f"micro-batch {number + 1}/{count}")

    def on_step(self, row: CurveRow) -> None:
        """Advance the bar, and print both losses where there are two, of pairs with the share in the right order."""
        text = f"loss {row['loss']:.4g}, {row['tokens'] / row['seconds']:,.0f} tok/s"
        if row[self._column] is not None:
            text += f", {self._counts} {row[self._column] / GIB:.3g}/{self._limit_gib:.3g} GiB"
        if row["alloc_retries"]:
            text += f", {row['alloc_retries']} retries"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if "heldout_loss" in row:
            line = f"step {row['step'] + 1}: loss {row['loss']:.4f}, held-out loss {row['heldout_loss']:.4f}"
            if (accuracy := row.get("heldout_reward_accuracy")) is not None:
                line += f", held-out accuracy {accuracy:.4f}"
            self._bar.write(line)

    def on_end(self, peak_bytes: int | None) -> None:
        """Close the bar."""
        self._bar.close()

    def on_fault(self, error: BaseException) -> None:
        """Close the bar."""
        self._bar.close()


CALLBACKS: list[type[Callback]] = [GrowthWarnings, SlowSteps, LiveCurves, ProgressBar]
"""Of every run, called in this order."""
