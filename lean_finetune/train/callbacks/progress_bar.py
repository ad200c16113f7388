"""Show progress, loss, throughput and memory on the terminal."""

import sys
import time

from tqdm import tqdm

from cuda_memory.units import GIB, counted, readable_size
from lean_finetune.core.progress_bar import LOG_SECONDS, progress_bar
from lean_finetune.train.callbacks.callback import Callback, Row
from lean_finetune.train.monitor.memory_monitor import make_counters

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
