"""The callbacks of every training run: warnings of growth and of slow steps, curves, the progress bar."""

import csv
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from tqdm import tqdm

from cuda_memory.growth import OWN, RESIDENT, Cause, classify
from cuda_memory.units import GIB, counted, readable_size
from lean_finetune.core.atomic_files import write_csv
from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.core.progress import LOG_SECONDS, progress_bar
from lean_finetune.train.callbacks.callback import Callback, Row, RunInfo, Tracker, curve_columns
from lean_finetune.train.callbacks.trackers import TRACKERS
from lean_finetune.train.monitor.growth_advice import check_is_due, growth_line
from lean_finetune.train.monitor.memory_monitor import make_counters


class GrowthWarnings(Callback):
    """Writes one line to stderr for each cause of growth, once in a process."""

    def on_start(self) -> None:
        """Start without warnings."""
        self._reported: set[Cause] = {"jump", "steady", "unclear", "too_short"}
        self._counters = make_counters(self.info.device)

    def on_step(self, row: Row) -> None:
        """Check the curves if a check is due."""
        if not check_is_due(len(self.info.curves)):
            return
        for growth in classify(self.info.curves):
            if growth.cause not in self._reported:
                on_host = growth.series in (OWN, RESIDENT)
                free = free_host_bytes()[0] if on_host else self._counters.left_bytes()
                line = growth_line(growth, self.info.curves, free, self.info.parameters)
                tqdm.write(f"warning: {line}", file=sys.stderr)
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

    def on_step(self, row: Row) -> None:
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
            tqdm.write(
                f"warning: steps take {ratio:.0f} times as long as at the start. {os.cpu_count()} cores have a load of "
                f"{os.getloadavg()[0]:.1f}: if `top` or `nvidia-smi` shows another program, stop it or train later",
                file=sys.stderr,
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
        self.active = bool(self.info.directories)
        if self.active:
            self._path, self._started = self.info.directories[0] / CURVES, False

    def log(self, row: Row) -> None:
        """Append a row; the first time, write those of all finished steps."""
        if not self._started:
            write_csv(self._path, curve_columns(self.info.curves), self.info.curves)
            self._started = True
            return
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, fieldnames=curve_columns([row]), lineterminator="\n").writerow(row)


FORMAT = "{desc} {bar:6} {n_fmt}/{total_fmt}{postfix}, {remaining} left"
"""Fits 80 columns with 5-digit step counts."""


class ProgressBar(Callback):
    """A progress bar on stderr, and one line per held-out loss on stdout.

    Memory is what the limit applies to: reserved memory of a GPU, the process's resident memory on a CPU.
    """

    def on_start(self) -> None:
        """Open the bar; say what follows."""
        info = self.info
        self._limit_gib = make_counters(info.device).limit_bytes() / GIB
        self._column = "reserved_bytes" if info.device.type == "cuda" else "rss_bytes"
        if info.show_progress:
            tqdm.write(self._outlook(), file=sys.stderr)
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
            text += f", predicted peak {readable_size(info.predicted_peak_bytes)}"
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
        pause = LOG_SECONDS if now - self._step_began < LOG_SECONDS or not sys.stderr.isatty() else 0.0
        if self.info.show_progress and now - self._shown >= pause:
            self._shown = now
            self._bar.set_postfix_str(f"micro-batch {number + 1}/{count}")

    def on_step(self, row: Row) -> None:
        """Advance the bar, and print both losses where there are two."""
        text = f"loss {row['loss']:.4g}, {row['tokens'] / row['seconds']:,.0f} tok/s"
        if row[self._column] is not None:
            text += f", {row[self._column] / GIB:.3g}/{self._limit_gib:.3g} GiB"
        if row["alloc_retries"]:
            text += f", {row['alloc_retries']} retries"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        if "heldout_loss" in row:
            self._bar.write(f"step {row['step'] + 1}: loss {row['loss']:.4f}, held-out loss {row['heldout_loss']:.4f}")

    def on_end(self, peak_bytes: int | None) -> None:
        """Close the bar."""
        self._bar.close()

    def on_fault(self, error: BaseException) -> None:
        """Close the bar."""
        self._bar.close()


CALLBACKS: list[type[Callback]] = [GrowthWarnings, SlowSteps, LiveCurves, ProgressBar]
"""Of every run, called in this order."""


def make_callbacks(info: RunInfo, trackers: Sequence[str], *, leads: bool) -> list[Callback]:
    """Create the callbacks of a run; none on other processes than the first."""
    return [create(info) for create in (*CALLBACKS, *(TRACKERS[name] for name in trackers))] if leads else []
