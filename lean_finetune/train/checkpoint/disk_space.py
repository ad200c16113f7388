"""Check free disk space for checkpoints and weights before the first step, not when the disk is full."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cuda_memory.units import counted, readable_size
from lean_finetune.step.offload.state_file import DiskFault
from lean_finetune.train.checkpoint.training_state import TrainingRun


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """What a training writes at its end, and where."""

    out: Path
    """Directory of the trained weights."""
    merged_bytes: int
    """Size of the merged model; 0 if none is written."""
    enforce: bool
    """Refuse a run without enough space (estimate.enforce)."""
    notify: Callable[[str], None]
    """Gets a line for the user."""

    def check(self, checkpoints: Path, *, trained_bytes: int, checkpoint_bytes: int, there: int, most: int) -> None:
        """Refuse a run whose last outputs do not fit; warn if `most` checkpoints do not. For the first process.

        The end of training keeps one checkpoint and then writes the weights.

        Args:
            checkpoints: their directory.
            trained_bytes: size of the saved weights.
            checkpoint_bytes: size of one checkpoint.
            there: existing checkpoints of an earlier process.
            most: checkpoints on disk at the same time: a new one is complete before the oldest is removed.
        """
        weights = trained_bytes + self.merged_bytes
        here, at_out = _existing(checkpoints), _existing(self.out)
        free, free_at_out = shutil.disk_usage(here).free, shutil.disk_usage(at_out).free
        same_disk = here.stat().st_dev == at_out.stat().st_dev
        last = checkpoint_bytes * (1 - there)  # Older ones are removed first and free their space.
        if self.enforce and (weights + (last if same_disk else 0) > free_at_out or last > free):
            elsewhere = "" if same_disk else f" there and {readable_size(free)} for {checkpoints}"
            raise DiskFault(
                f"{self.out}: the disk has too little free space for the end of training: {readable_size(weights)} of "
                f"weights and {readable_size(checkpoint_bytes)} of a last checkpoint; {readable_size(free_at_out)} are "
                f"free{elsewhere}; free space, then rerun, or set estimate.enforce=false"
            )
        if checkpoint_bytes * (most - there) > free:
            self.notify(
                f"warning: run.keep_checkpoints: up to {counted(most, 'checkpoint')} of "
                f"{readable_size(checkpoint_bytes)} can be on the disk at a time, {there} already, and "
                f"{readable_size(free)} are free for {checkpoints}; a checkpoint that does not fit is skipped and the "
                "previous one stays; free space, or lower it"
            )


def trained_bytes(run: TrainingRun) -> int:
    """Return the size of all trained weights as they are saved."""
    pairs = zip(run.parallel.trained_parameters(), run.parallel.slices(), strict=True)
    return sum(math.prod(piece.full_shape) * parameter.element_size() for (_, parameter), piece in pairs)


def _existing(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
