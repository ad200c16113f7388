"""A stage ends with the process that started it: no orphan computes on after dvc or torchrun was killed.

Only stages that DVC or torchrun started watch their parent. A person who runs `python -m stages.train` by hand decides
with the usual means (`nohup`, `setsid`, a terminal's SIGHUP) whether it outlives the shell.

The parent's number is compared with the one at the start, never with 1: in a container DVC may be process 1. A parent
that ended before this module was imported, in the first hundredths of a second, is not noticed.

A thread looks once a second. Linux's PR_SET_PDEATHSIG reacts at once, but also to the end of the *thread* that started
this process; a pidfd needs Linux 5.3 and is refused by some containers.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PARENT_ENDED = signal.SIGUSR1
"""What this process then sends itself: none that a group of processes is sent when it is asked to stop."""
LAUNCHER = "LEAN_FINETUNE_LAUNCHER"
"""Variable of the environment with the number of the process that started this one, where that is one of ours."""
THREAD = "parent_watch"
"""Name that Linux knows the thread by. It holds no lock, so a process that has it can be forked."""
LOOK_SECONDS = 1.0

_ended = threading.Event()


def parent_ended() -> bool:
    """Whether the process that started this one was seen to have ended."""
    return _ended.is_set()


def watch_parent() -> None:
    """Watch the process that started this one, if that is DVC or torchrun."""
    if "DVC_STAGE" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Send this process `PARENT_ENDED` once its parent has ended.

    DVC runs commands through a shell. Most shells become the command; where one stays beside it, DVC is watched, too.
    """
    parent = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_watch, args=(parent, _parent_of_shell(parent)), name=THREAD, daemon=True).start()


def _watch(parent: int, grandparent: int | None) -> None:
    """Look until the parent, or that of the shell between, is another one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Signals are the main thread's.
    if sys.platform == "linux":
        with suppress(OSError):  # Without its name tokenize makes no forks of this process, but new interpreters.
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD)
    while os.getppid() == parent and _parent_of_shell(parent) == grandparent:
        time.sleep(LOOK_SECONDS)
    _ended.set()
    os.kill(os.getpid(), PARENT_ENDED)


def _parent_of_shell(process: int) -> int | None:
    """The parent of a process that is a shell running one command; None for any other, and elsewhere than on Linux."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if b"-c" not in words[1:4]:  # bash --noprofile --norc -c command
            return None
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
