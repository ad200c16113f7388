"""Where unfinished work is kept: below the user's checkout, since DVC deletes a stage's outputs before it runs.

One directory for each key of all that decides the bytes, locked by the process that works in it.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.files import repo_root, told_in_one_line

LOCK_FILE = "lock"


def scratch_root() -> Path:
    """The directory of all unfinished work of tokenize; runs in temporary copies share the checkout's."""
    return repo_root() / "scratch" / "tokenize"


@contextmanager
def workplace(root: Path, key: str, told: Callable[[str], None]) -> Iterator[Path]:
    """The directory `root/key`, held by this process alone; it is removed when the block ends well.

    After a fault it stays if it holds a finished shard. Directories of other keys that no living process holds are
    removed: what was begun with other data, parameters or code is of no use. `told` gets a note when another process
    has to be waited for.

    Raises:
        UserError: the disk refused.
    """
    directory = root / key
    with told_in_one_line(directory):
        held = _hold(directory, told)
        try:
            _remove_stale(root, key)
            yield directory
            shutil.rmtree(directory)
        except BaseException:
            if not any((directory / "done").glob("*.json")):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            os.close(held)


@contextmanager
def held_alone(directory: Path, told: Callable[[str], None]) -> Iterator[None]:
    """Let no other process of tokenize work in a directory during the block.

    Raises:
        UserError: the disk refused.
    """
    with told_in_one_line(directory):
        held = _hold(directory, told)
        try:
            yield
        finally:
            os.close(held)


def _hold(directory: Path, told: Callable[[str], None]) -> int:
    """An open and locked handle of the directory's lock file; the lock goes with the process, however it ends."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / LOCK_FILE
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # its last holder removed the directory just now
            continue
        if not _lock(handle):
            told(f"another tokenize works in {directory}; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        if _is_still(path, handle):
            return handle
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    """Whether an open file is the one that the path names, not one that was removed while its lock was awaited."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _lock(handle: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(root: Path, key: str) -> None:
    """Remove the unfinished work of other keys, but for that of living processes."""
    for other in sorted(root.iterdir()):
        if other.name == key or not other.is_dir():
            continue
        try:
            handle = os.open(other / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:  # another process removed it first
            continue
        try:
            if _lock(handle):
                shutil.rmtree(other)
        finally:
            os.close(handle)
