"""Room on the disk for what a training will write, looked for before its first step: a full disk is found in time."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.core.units import readable_size
from lean_finetune.train.checkpoint.training_state import Running


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the end of a training writes, and where."""

    out: Path
    """The directory of the trained weights."""
    merged_bytes: int
    """Of the merged model, 0 where none is written."""
    enforce: bool
    """Whether a run that has no room is refused (estimate.enforce)."""
    told: Callable[[str], None]
    """Gets a line for the user."""

    def check(self, checkpoints: Path, *, trained_bytes: int, checkpoint_bytes: int, there: int, most: int) -> None:
        """Refuse a run whose end has no room, tell of one whose checkpoints have none. For the first process.

        Training keeps up to `most` checkpoints at a time (one is whole before the oldest goes); its end keeps one, and
        then writes the weights.

        Args:
            checkpoints: their directory.
            trained_bytes: of the weights that are saved.
            checkpoint_bytes: of each.
            there: checkpoints that are there already, of an earlier process.
            most: checkpoints at a time.

        Raises:
            UserError: with the figures.
        """
        weights = trained_bytes + self.merged_bytes
        free, free_at_out = _free_bytes(checkpoints), _free_bytes(self.out)
        one = _device(checkpoints) == _device(self.out)
        last = checkpoint_bytes * (1 - there)  # Those before the last go first, and leave room.
        if self.enforce and (weights + (last if one else 0) > free_at_out or last > free):
            elsewhere = "" if one else f" there and {readable_size(free)} for {checkpoints}"
            raise UserError(
                f"{self.out}: the disk must have room for the end of training: {readable_size(weights)} of weights and "
                f"{readable_size(checkpoint_bytes)} of a last checkpoint; {readable_size(free_at_out)} are free"
                f"{elsewhere}; free space, then rerun, or set estimate.enforce=false"
            )
        if checkpoint_bytes * (most - there) > free:
            self.told(
                f"warning: run.keep_checkpoints: up to {most} checkpoints of {readable_size(checkpoint_bytes)} are on "
                f"the disk at a time, {there} of them already, and {readable_size(free)} are free for {checkpoints}; "
                "one that finds no room is left out and the one before it is kept; free space, or lower it"
            )


def trained_bytes(run: Running) -> int:
    """Of all trained weights, as they are saved."""
    pairs = zip(run.parallel.trained_parameters(), run.parallel.slices(), strict=True)
    return sum(math.prod(piece.full_shape) * parameter.element_size() for (_, parameter), piece in pairs)


def _free_bytes(path: Path) -> int:
    """Free where a path is, or will be."""
    return shutil.disk_usage(_there(path)).free


def _device(path: Path) -> int:
    """The file system of a path that is, or will be."""
    return _there(path).stat().st_dev


def _there(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
