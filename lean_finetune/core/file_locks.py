"""Lock a directory. The lock ends with the process, however that ends."""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOCK_FILE = "lock"


def lock_directory(directory: Path, waits: Callable[[], object] | None = None, *, shared: bool = False) -> int | None:
    """Lock a directory by a file in it.

    Args:
        directory: created if it is missing.
        waits: called before waiting for another process. None means not to wait.
        shared: take a lock that other shared locks do not exclude.

    Returns:
        The open file descriptor of the lock, which the caller closes; None if another process has the lock and `waits`
        is None.

    Raises:
        OSError: the directory or the file could not be created.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / LOCK_FILE
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # Another process has just removed the directory.
            continue
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            if not _try_lock(handle, kind):
                if waits is None:
                    os.close(handle)
                    return None
                waits()
                fcntl.flock(handle, kind)
        except BaseException:
            os.close(handle)
            raise
        if _is_still(path, handle):
            return handle
        os.close(handle)


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
    # The lock file is removed last but before the directory: another process may then lock the directory at once, and
    # rmdir fails because it is no longer empty.
    with suppress(OSError):
        if [left.name for left in directory.iterdir()] == [LOCK_FILE]:
            (directory / LOCK_FILE).unlink()
            directory.rmdir()
    os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    """Lock an open file without waiting; False if another process has the lock."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, handle: int) -> bool:
    """Whether a path still names this open file, which another process may have removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
