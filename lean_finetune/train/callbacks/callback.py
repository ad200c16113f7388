"""Hooks of the training loop. A callback is one class with the hooks it needs, listed in `run_callbacks.CALLBACKS`."""

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from lean_finetune.core.atomic_files import write_text
from lean_finetune.train.monitor.memory_monitor import MEMORY_COLUMNS

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
    *MEMORY_COLUMNS,
    "measured",
    "seconds",
)
RUN_NAME = "run_name.txt"
"""In the directory of an unfinished run."""
EXPERT_COLUMNS = ("expert_load_max", "idle_experts_share")
"""Further columns of a mixture of experts."""
Row = Mapping[str, Any]
"""One optimizer step of the curves; keys `CURVE_COLUMNS` and, of a mixture, `EXPERT_COLUMNS`."""


def curve_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of a run's curves."""
    return [*CURVE_COLUMNS, *(name for name in EXPERT_COLUMNS if name in rows[-1])]


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
    curves: Sequence[Row]
    """Rows of all finished steps. It grows while training runs; a resumed run starts with the checkpoint's rows."""
    directories: Sequence[Path]
    """The unfinished run's directory, then that of the run it resumes if that is another; empty without checkpoints."""

    @cached_property
    def run_name(self) -> str:
        """The name under which trackers know the run; a resumed run has that of its first process."""
        if self.first_step > 0:
            for directory in self.directories:
                if (directory / RUN_NAME).exists():
                    return (directory / RUN_NAME).read_text(encoding="utf-8")
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

    def on_step(self, row: Row) -> None:
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

    def log(self, row: Row) -> None:
        """Send one optimizer step; after `open`."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what was sent to the disk; called with each checkpoint, from which a resumed run continues."""

    def close(self, *, failed: bool) -> None:
        """End the run; `failed`: training ended with an error or was stopped."""

    def on_start(self) -> None:
        """See the base class."""
        self._try(self.open)

    def on_step(self, row: Row) -> None:
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
            tqdm.write(f"warning: {self.name} is off from here on, training continues: {reason}", file=sys.stderr)
