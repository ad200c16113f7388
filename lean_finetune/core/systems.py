"""What differs between Linux, macOS and Windows. Only Linux is tested on real machines."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_POLL_SECONDS = 0.2
STAGES_NEED = (
    "error: stages of the pipeline do not run on Windows, which lacks signals and shared file locks that they use; "
    "run them in WSL2 or on Linux; `lean-finetune` itself works here"
)


def refuse_stages() -> None:
    """Exit with one line where stages cannot run."""
    if sys.platform == "win32":
        print(STAGES_NEED, file=sys.stderr)
        sys.exit(1)


def try_lock(handle: int, *, shared: bool) -> bool:
    """Lock an open file; False if another process has it. Windows has exclusive locks only."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # The second one is Windows'.
        return False
    return True


def wait_for_lock(handle: int, *, shared: bool) -> None:
    """Lock an open file as soon as no other process has it."""
    if sys.platform == "win32":
        while not try_lock(handle, shared=shared):  # LK_LOCK gives up after ten seconds.
            time.sleep(LOCK_POLL_SECONDS)
    else:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Flush a file's bytes or a directory's entries to the disk. Windows cannot open directories."""
    windows = sys.platform == "win32"
    if windows and os.path.isdir(path):
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def end_after(seconds: int) -> None:
    """Kill this process after some seconds unless this is called again; 0 = never. Has no effect on Windows."""
    if sys.platform != "win32":
        signal.alarm(seconds)


def malloc_function(name: str) -> Callable[..., Any] | None:
    """A function of glibc's malloc; None on other systems."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity, where the system has one."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
