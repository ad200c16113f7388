"""End a stage when its parent process ends, so that nothing runs on after dvc or torchrun was killed.

Only stages that DVC or torchrun started watch their parent. For `python -m stages.train` by hand, the usual means
(`nohup`, `setsid`, SIGHUP) decide whether it outlives the shell.

A thread compares the parent's process id once a second with the one at the start. It does not compare with 1, because
DVC may be process 1 of a container. A parent that ended before this module was imported is not noticed.

Alternatives are worse: PR_SET_PDEATHSIG also reacts to the end of the *thread* that started this process, and a pidfd
needs Linux 5.3 and is refused by some containers.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PARENT_ENDED = signal.SIGUSR1
"""The signal that this process then sends itself. It is not one that stops a process group."""
LAUNCHER = "LEAN_FINETUNE_LAUNCHER"
"""Environment variable with the process id of the launcher, if one of our processes started this one."""
THREAD = "parent_watch"
"""Linux name of the thread. It takes no lock, so a process with it can fork safely."""
POLL_SECONDS = 1.0

_ended = threading.Event()


def parent_ended() -> bool:
    """Whether the parent process has ended."""
    return _ended.is_set()


def watch_parent() -> None:
    """Watch the parent process if it is DVC or torchrun."""
    if "DVC_STAGE" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Send this process `PARENT_ENDED` once its parent has ended, or DVC, if a shell runs between them."""
    parent = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_watch, args=(parent, _parent_of_shell(parent)), name=THREAD, daemon=True).start()


def _watch(parent: int, grandparent: int | None) -> None:
    """Poll until the parent or the shell's parent changes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Only the main thread handles signals.
    if sys.platform == "linux":
        with suppress(OSError):  # Without the name, tokenize starts new interpreters instead of forks.
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
    while os.getppid() == parent and _parent_of_shell(parent) == grandparent:
        time.sleep(POLL_SECONDS)
    _ended.set()
    os.kill(os.getpid(), PARENT_ENDED)


def _parent_of_shell(process: int) -> int | None:
    """The parent of a shell that runs one command; None for other processes, or without /proc."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if b"-c" not in words[1:4]:  # bash --noprofile --norc -c command
            return None
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
