"""Lock a directory. The lock ends with the process, however that ends."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cuda_memory.errors import write_errors
from lean_finetune.core.systems import try_lock, wait_for_lock

LOCK_FILE = "lock"


def lock_directory(directory: Path, waits: Callable[[], object] | None = None, *, shared: bool = False) -> int | None:
    """Lock a directory, created if it is missing, by a file in it; return the file's descriptor, to be closed later.

    If another process has the lock, `waits` is called before waiting for it; without `waits` the result is None. Shared
    locks do not exclude each other. Raises OSError if the directory or the file could not be created.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / LOCK_FILE
        with suppress(FileNotFoundError), ExitStack() as opened:  # Another process may remove the directory.
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
            opened.callback(os.close, handle)
            if not try_lock(handle, shared=shared):
                if waits is None:
                    return None
                waits()
                wait_for_lock(handle, shared=shared)
            if os.path.samestat(path.stat(), os.fstat(handle)):
                opened.pop_all()
                return handle


def clear(directory: Path) -> None:
    """Remove everything except the lock from a locked directory."""
    with suppress(FileNotFoundError):
        for left in directory.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK_FILE:
                left.unlink()


def unlock_directory(directory: Path, handle: int) -> None:
    """Unlock a directory, and remove it if it is empty."""
    if sys.platform == "win32":  # It removes no open files.
        os.close(handle)
    # The lock file is removed last but before the directory: another process may then lock the directory at once, and
    # rmdir fails because it is no longer empty.
    with suppress(OSError):
        if [left.name for left in directory.iterdir()] == [LOCK_FILE]:
            (directory / LOCK_FILE).unlink()
            directory.rmdir()
    if sys.platform != "win32":
        os.close(handle)


@contextmanager
def locked_directory(parent: Path, name: str, *, shared: bool) -> Iterator[Path]:
    """The directory `name` in `parent`, locked in the block; first remove the others that no process has locked.

    Raises UserError if it cannot be written.
    """
    with write_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.iterdir():
            if other.is_dir() and (ended := lock_directory(other)) is not None:
                clear(other)
                unlock_directory(other, ended)
        lock = lock_directory(parent / name, shared=shared)
    try:
        yield parent / name
    finally:
        if lock is not None:
            os.close(lock)
