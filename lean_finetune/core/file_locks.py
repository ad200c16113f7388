"""A directory held by one process at a time, whichever way that process ends."""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOCK_FILE = "lock"


def hold(directory: Path, waits: Callable[[], object] | None = None, *, shared: bool = False) -> int | None:
    """An open and locked handle of the directory's lock file; the lock goes with the handle or the process.

    Args:
        directory: made where it is missing.
        waits: called before another process is waited for; None = not to wait.
        shared: several processes may hold the directory so; one that holds it alone excludes them.

    Returns:
        The handle, to be closed; None where another process holds the directory and is not waited for.

    Raises:
        OSError: the disk refused.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / LOCK_FILE
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # Its last holder removed the directory just now.
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
    """Remove all but the lock from a directory that is held; one that somebody removed is clear."""
    with suppress(FileNotFoundError):
        for left in directory.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            elif left.name != LOCK_FILE:
                left.unlink()


def leave(directory: Path, handle: int) -> None:
    """Let go of a directory; if it is clear, remove it."""
    # The lock goes before the directory and after all else: another process may take a directory without one at once,
    # and then the directory is no longer empty.
    with suppress(OSError):
        if [left.name for left in directory.iterdir()] == [LOCK_FILE]:
            (directory / LOCK_FILE).unlink()
            directory.rmdir()
    os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    """Whether the lock of an open file could be had at once."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, handle: int) -> bool:
    """Whether an open file is the one that the path names, not one that was removed while its lock was awaited."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
