"""No training without the process that asked for it: when dvc dies, so does the training it started. Linux only."""

import ctypes
import os
import select
import signal
import sys
import threading

import psutil

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that this process gets when its parent ends."""
PARENT_ENDED = signal.SIGUSR1
"""That signal: none that a group of processes is sent, so that it is never taken for a second request to stop."""


def end_with_parent(parent: int | None = None) -> None:
    """Get `PARENT_ENDED` when the parent ends, which saves and stops. Elsewhere than on Linux this does nothing.

    DVC runs commands through a shell, and some shells stay beside the command: such a parent outlives DVC, so who
    started it is watched as well.

    Args:
        parent: the number of the process that started this one, which may have ended; None = the parent there is.

    Raises:
        OSError: the system refused.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(PARENT_ENDED), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    try:
        shell = psutil.Process(parent)
        if shell.cmdline()[1:2] == ["-c"]:
            watched = os.pidfd_open(shell.ppid())
            threading.Thread(target=_wait_for_end, args=(watched,), name="parent", daemon=True).start()
    except (psutil.NoSuchProcess, ProcessLookupError):  # It ended just now.
        os.kill(os.getpid(), PARENT_ENDED)
    if os.getppid() != parent:  # It ended before the system was told.
        os.kill(os.getpid(), PARENT_ENDED)


def _wait_for_end(process: int) -> None:
    """Wait until a process, given as a file descriptor, ends."""
    select.select([process], [], [])
    os.kill(os.getpid(), PARENT_ENDED)
