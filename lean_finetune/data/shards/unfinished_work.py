"""Directories of unfinished work: one for each key of `token_inputs`, locked by the process that works in it.

They are in the user's checkout because DVC deletes a stage's outputs before it runs.
"""

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
    they belong to other data, parameters or code. Raises UserError if the disk cannot be written.
    """
    directory = root / key
    with locked_directory(directory, notify):
        try:
            _remove_stale(root, key)
            yield directory
            clear(directory)
        except BaseException:
            if not any((directory / "done").glob("*.json")):
                clear(directory)
            raise


@contextmanager
def locked_directory(directory: Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Let no other process of tokenize work in a directory during the block. An empty directory is then removed.

    `notify` is called before waiting for another process. Raises UserError if the disk cannot be written.
    """
    with write_errors(directory):
        lock = lock_directory(
            directory, lambda: notify(f"another tokenize works in {directory}; waiting for it to end")
        )
        assert lock is not None, "lock_directory waits"
        try:
            yield
        finally:
            unlock_directory(directory, lock)


def _remove_stale(root: Path, key: str) -> None:
    for other in sorted(root.iterdir()):
        if other.name != key and other.is_dir() and (lock := lock_directory(other)) is not None:
            clear(other)
            unlock_directory(other, lock)
