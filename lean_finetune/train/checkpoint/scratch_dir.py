"""Where unfinished trainings are kept, and who holds such a place."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import repo_root, told_in_one_line, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, hold, leave
from lean_finetune.core.units import readable_size

RECORD = "run.json"
"""In a training's directory: what decides its result, see `unfinished`."""
FINISHED = "finished"
"""In the directory of a training that has published its outputs: the MD5 by which DVC records its metrics."""
DVC_LOCK = Path("dvc.lock")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where a run works; `unfinished` chooses."""

    directory: Path
    earlier: Path | None = None
    """The directory of another run that it resumes; None: it goes on with its own, or begins."""
    record: Mapping[str, Any] | None = None
    """What decides its result, for `RECORD`; None: nothing is written."""


def scratch_root() -> Path:
    """The directory of all unfinished trainings; runs in temporary copies share the checkout's."""
    return repo_root() / "scratch" / "train"


@contextmanager
def held_alone(directory: Path, told: Callable[[str], None], record: Mapping[str, Any] | None = None) -> Iterator[None]:
    """A training's directory, held for the length of the block and emptied where that ends well.

    One marked as finished inside stays until the next training begins: DVC has yet to record the outputs, and removes
    them if it is killed before. What nobody needs any more of other trainings is removed now.

    Args:
        directory: named by the record.
        told: gets lines for the user.
        record: written to `RECORD`; None = no such file.

    Raises:
        UserError: another process holds it, or the disk refused.
    """
    with told_in_one_line(directory):
        held = hold(directory)
    if held is None:
        raise UserError(
            f"{directory}: one process at a time may train the same run, and another one does; wait for its end, or "
            "end it: the same command then goes on from its checkpoint"
        )
    try:
        with told_in_one_line(directory):
            _begin(directory)
            _remove_useless(directory)
        if record is not None:
            write_json(directory / RECORD, record)
        _tell_of_others(directory, told)
        yield
        if not (directory / FINISHED).exists():
            clear(directory)
    finally:
        if not list(directory.glob("*step-*")):
            clear(directory)
        leave(directory, held)


@contextmanager
def held_by_us(directory: Path | None) -> Iterator[None]:
    """The directory of another run from which this one is resumed: as it is, and nobody else's for the block.

    Raises:
        UserError: another process trains it.
    """
    if directory is None:
        yield
        return
    held = hold(directory)
    if held is None:
        raise UserError(
            f"{directory}: the run that is resumed must not be training; another process trains it; wait for its end, "
            "or set run.resume=exact"
        )
    try:
        yield
    finally:
        leave(directory, held)


def mark_finished(directory: Path, metrics: Path) -> None:
    """Have the directory's checkpoint stay until the next training begins.

    Raises:
        UserError: the disk refused.
    """
    with told_in_one_line(directory):
        (directory / FINISHED).write_text(_md5(metrics), encoding="ascii")


def _begin(directory: Path) -> None:
    """A training that was finished begins once more: with its checkpoint, unless DVC has recorded its outputs."""
    marker = directory / FINISHED
    if not marker.exists():
        return
    if DVC_LOCK.is_file() and marker.read_text(encoding="ascii") in DVC_LOCK.read_text(encoding="utf-8"):
        clear(directory)  # Who runs it again wants it to be trained again.
    marker.unlink(missing_ok=True)


def _remove_useless(own: Path) -> None:
    """Remove other directories of trainings that are finished, or were broken off without a checkpoint."""
    for path in own.parent.glob(f"*/{RECORD}"):
        other = path.parent
        if other != own and _is_useless(other) and (held := hold(other)) is not None:
            if _is_useless(other):
                clear(other)
            leave(other, held)


def _is_useless(directory: Path) -> bool:
    """Whether nobody resumes from it."""
    return (directory / FINISHED).exists() or not list(directory.glob("*step-*"))


def _md5(path: Path) -> str:
    """As DVC names a file's content."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _tell_of_others(directory: Path, told: Callable[[str], None]) -> None:
    """Say what else lies beside a run's directory: nobody else removes the checkpoints of runs that were given up."""
    others = [path for path in directory.parent.iterdir() if path != directory and list(path.glob("step-*"))]
    if others:
        size = sum(file.stat().st_size for path in others for file in path.glob("step-*/*"))
        told(
            f"note: {directory.parent} holds checkpoints of {len(others)} other unfinished trainings "
            f"({readable_size(size)}); delete those you no longer need"
        )
