"""Directories of unfinished training runs: one per run, locked by the process that trains it."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_memory.units import counted, readable_size
from lean_finetune.core.atomic_files import repo_root, write_errors, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory

RECORD = "run.json"
"""In a run's directory: the fingerprint of the run, see `resume_run`."""
FINISHED = "finished"
"""In the directory of a run that has published its outputs: MD5 of its metrics file, as in dvc.lock."""
DVC_LOCK = Path("dvc.lock")


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Where a run keeps its checkpoints; `resume_run` chooses it."""

    directory: Path
    earlier: Path | None = None
    """Directory of another run to resume from; None: use its own checkpoints, or start at the first step."""
    record: Mapping[str, Any] | None = None
    """Content of `RECORD`; None: nothing is written."""


def scratch_root() -> Path:
    """Return the directory of all unfinished runs; runs in temporary copies share the checkout's."""
    return repo_root() / "scratch" / "train"


@contextmanager
def lock_run_directory(
    directory: Path,
    notify: Callable[[str], None],
    record: Mapping[str, Any] | None = None,
    *,
    starts_over: bool | None = None,
) -> Iterator[bool]:
    """Lock a run's directory for the block, and clear it if the block succeeds.

    A directory that is marked finished inside keeps its checkpoint until the next run starts: DVC has yet to record
    the outputs, and removes them if it is killed before. Finished or empty directories of other runs are removed now.

    Args:
        directory: the run's directory.
        notify: gets lines for the user.
        record: what is written to `RECORD`; None = nothing.
        starts_over: on a node with its own disk, what this yielded on node 0, which has dvc.lock; None on node 0.

    Yields:
        Whether there is no checkpoint, so that the run starts at the first step.

    Raises:
        UserError: another process has locked it, or the disk refused.
    """
    with write_errors(directory):
        lock = lock_directory(directory)
    if lock is None:
        raise UserError(
            f"{directory}: another process trains the same run; wait until it ends, or stop it: the same command then "
            "resumes from its checkpoint"
        )
    try:
        with write_errors(directory):
            _restart_finished(directory, record, starts_over)
            _remove_finished_runs(directory)
        if record is not None:
            write_json(directory / RECORD, record)
        _report_other_runs(directory, notify)
        yield not list(directory.glob("*step-*"))
        if not (directory / FINISHED).exists():
            clear(directory)
    finally:
        if not list(directory.glob("*step-*")):
            clear(directory)
        unlock_directory(directory, lock)


@contextmanager
def lock_earlier_run(directory: Path | None) -> Iterator[None]:
    """Lock the directory of another run from which this one resumes, and leave it unchanged."""
    if directory is None:
        yield
        return
    lock = lock_directory(directory)
    if lock is None:
        raise UserError(
            f"{directory}: another process trains the run to resume from; wait until it ends, or set run.resume=exact"
        )
    try:
        yield
    finally:
        unlock_directory(directory, lock)


def metrics_digest(metrics: Path) -> str:
    """The MD5 of a run's metrics file, as in dvc.lock."""
    return hashlib.md5(metrics.read_bytes(), usedforsecurity=False).hexdigest()


def mark_finished(directory: Path, digest: str) -> None:
    """Keep the directory's checkpoint until the next training starts; `digest` is that of the run's metrics."""
    with write_errors(directory):
        (directory / FINISHED).write_text(digest, encoding="ascii")


def _restart_finished(directory: Path, record: Mapping[str, Any] | None, starts_over: bool | None) -> None:
    """Run a finished training again, from its checkpoint.

    It starts at the first step if DVC has recorded its outputs, or if GPUs shared it in another way: resumed at its
    end, the run would execute no step in this way, and measure no memory.
    """
    marker = directory / FINISHED
    if not marker.exists():
        return
    if starts_over is None:
        digest = marker.read_text(encoding="ascii")  # Empty after a power failure.
        recorded = bool(digest) and DVC_LOCK.is_file() and digest in DVC_LOCK.read_text(encoding="utf-8")
        starts_over = recorded or (record is not None and _sharing_of(directory) != record["sharing"])
    if starts_over:
        for path in directory.glob("*step-*"):  # Before the marker: without it the checkpoint would be resumed.
            shutil.rmtree(path)
        clear(directory)
    marker.unlink(missing_ok=True)


def _sharing_of(directory: Path) -> Any:
    """How GPUs shared the run; None if its record has none, is damaged, or is missing, as after a kill in `clear`."""
    with suppress(FileNotFoundError, ValueError, AttributeError):
        return json.loads((directory / RECORD).read_text(encoding="utf-8")).get("sharing")
    return None


def _remove_finished_runs(own: Path) -> None:
    """Remove directories of other runs that are finished or have no checkpoint."""
    for path in own.parent.glob(f"*/{RECORD}"):
        other = path.parent
        if other != own and _is_removable(other) and (lock := lock_directory(other)) is not None:
            if _is_removable(other):
                clear(other)
            unlock_directory(other, lock)


def _is_removable(directory: Path) -> bool:
    """Whether no run would resume from it."""
    return (directory / FINISHED).exists() or not list(directory.glob("*step-*"))


def _report_other_runs(directory: Path, notify: Callable[[str], None]) -> None:
    """Report checkpoints of other unfinished runs: nothing removes those of abandoned runs."""
    others = [path for path in directory.parent.iterdir() if path != directory and list(path.glob("step-*"))]
    if others:
        size = sum(file.stat().st_size for path in others for file in path.glob("step-*/*"))
        notify(
            f"note: {directory.parent} has checkpoints of {counted(len(others), 'other unfinished training')} "
            f"({readable_size(size)}); delete the ones you no longer need"
        )
