"""Directories of unfinished work: one for each key of `token_inputs`, locked by the process that works in it.

They are in the user's checkout because DVC deletes a stage's outputs before it runs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lean_finetune.core.atomic_files import repo_root, write_errors
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory


def scratch_root() -> Path:
    """The directory of all unfinished work of tokenize. Temporary experiments share the checkout's."""
    return repo_root() / "scratch" / "tokenize"


@contextmanager
def work_directory(root: Path, key: str, notify: Callable[[str], None]) -> Iterator[Path]:
    """The directory `root/key`, locked; it is removed when the block succeeds.

    After an error it stays if it has a finished shard. Directories of other keys are removed unless they are locked:
    they belong to other data, parameters or code. `notify` is called when another process has to be waited for.

    Raises:
        UserError: the disk cannot be written.
    """
    directory = root / key
    with write_errors(directory):
        lock = _lock(directory, notify)
        try:
            _remove_stale(root, key)
            yield directory
            clear(directory)
        except BaseException:
            if not any((directory / "done").glob("*.json")):
                clear(directory)
            raise
        finally:
            unlock_directory(directory, lock)


@contextmanager
def locked_directory(directory: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Let no other process of tokenize work in a directory during the block.

    Raises:
        UserError: the disk cannot be written.
    """
    with write_errors(directory):
        lock = _lock(directory, notify)
        try:
            yield
        finally:
            os.close(lock)


def _lock(directory: Path, notify: Callable[[str], None]) -> int:
    """The descriptor of the directory's lock; waits until it is free."""
    lock = lock_directory(directory, lambda: notify(f"another tokenize works in {directory}; waiting for it to end"))
    assert lock is not None, "lock_directory waits"
    return lock


def _remove_stale(root: Path, key: str) -> None:
    for other in sorted(root.iterdir()):
        if other.name != key and other.is_dir():
            lock = lock_directory(other)
            if lock is not None:
                clear(other)
                unlock_directory(other, lock)
