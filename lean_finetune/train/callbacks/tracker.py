"""Base class of trackers, which send the figures of a run to a library for experiment tracking."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from tqdm import tqdm

from cuda_memory.units import GIB
from lean_finetune.core.atomic_files import repo_root
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, Callback, Row, RunInfo

PROJECT = "lean-finetune"
"""Name under which services group the runs, unless the service's own environment variable names another."""
MEASURED, PREDICTED, RESERVED = "memory/measured_gib", "memory/predicted_gib", "memory/reserved_gib"


def figures(row: Row, info: RunInfo) -> dict[str, float]:
    """Return the figures of one optimizer step by name; those that are not known are left out."""
    in_bytes = {
        MEASURED: row["allocated_bytes"],
        PREDICTED: info.predicted_peak_bytes,
        RESERVED: row["reserved_bytes"],
        "memory/process_gib": row["rss_bytes"],
    }
    known = {
        **{name: row.get(name) for name in ("loss", "heldout_loss", "lr", "grad_norm", "epoch", *EXPERT_COLUMNS)},
        "tokens_per_second": row["tokens"] / row["seconds"],
        **{name: size / GIB for name, size in in_bytes.items() if size is not None},
    }
    return {name: value for name, value in known.items() if value is not None}


def logs_root() -> Path:
    """Return the directory of the trackers' files; runs in temporary copies share the checkout's."""
    return repo_root() / "logs"


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
