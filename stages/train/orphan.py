"""No training without the process that asked for it: when dvc dies, so does the training it started. Linux only."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that this process gets when its parent ends."""
PARENT_ENDED = signal.SIGUSR1
"""That signal: none that a group of processes is sent, so that it is never taken for a second request to stop."""


def end_with_parent() -> None:
    """Get `PARENT_ENDED` when the parent ends, which saves and stops. Elsewhere than on Linux this does nothing.

    Raises:
        OSError: the system refused.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(PARENT_ENDED), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # It ended before the system was told.
        os.kill(os.getpid(), PARENT_ENDED)
