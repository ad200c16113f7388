"""End a stage cleanly on SIGTERM, Ctrl-C or the end of its parent: no partial output, no workers left, one line.

Every entry imports this module first. From then on, Ctrl-C causes no traceback during the import of torch.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lean_finetune.core.systems import end_after, refuse_stages

# End a stage when its parent process ends, so that nothing runs on after dvc or torchrun was killed.
#
# Only stages that DVC or torchrun started watch their parent. For `python -m stages.train` by hand, the usual means
# (`nohup`, `setsid`, SIGHUP) decide whether it outlives the shell.
#
# A thread compares the parent's process id once a second with the one at the start. It does not compare with 1,
# because DVC may be process 1 of a container. A parent that ended before this module was imported is not noticed.
#
# Alternatives are worse: PR_SET_PDEATHSIG also reacts to the end of the *thread* that started this process, and a
# pidfd needs Linux 5.3 and is refused by some containers.

if sys.platform == "win32":
    PARENT_ENDED = signal.SIGBREAK
else:
    PARENT_ENDED = signal.SIGUSR1
"""The signal that this process then sends itself. It is not one that stops a process group."""
LAUNCHER = "LEAN_FINETUNE_LAUNCHER"
"""Environment variable with the process id of the launcher, if one of our processes started this one."""
PARENT_WATCH = "parent_watch"
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
    threading.Thread(target=_watch, args=(parent, _parent_of_shell(parent)), name=PARENT_WATCH, daemon=True).start()


def _watch(parent: int, grandparent: int | None) -> None:
    """Poll until the parent or the shell's parent changes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Only the main thread handles signals.
    if sys.platform == "linux":
        with suppress(OSError):  # Without the name, tokenize starts new interpreters instead of forks.
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(PARENT_WATCH)
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


# Stop signals, and how the process then exits.

ENDINGS = (signal.SIGINT, signal.SIGTERM, PARENT_ENDED)
GRACE_SECONDS = 8
"""Time after which a stopped stage is killed, in case a library swallows the exception."""
FIRST_OF_SIGNALS = 128
"""The exit code after a signal is this plus the signal's number."""
_exit_codes: list[int] = []
"""The exit code of this process once it is decided."""
_deferred: list[int | None] = []
"""For each open `defer_signals` block, outer ones first: the signal that arrived in it, or None."""


class Interrupted(BaseException):
    """A signal stops this process. Not an `Exception`, so that no error handler catches it."""

    def __init__(self, number: int):
        """`number` is the signal."""
        by_parent = number == PARENT_ENDED and parent_ended()
        self.name = "the end of its parent" if by_parent else signal.Signals(number).name
        self.exit_code = FIRST_OF_SIGNALS + number
        """The exit code that a shell reports for this signal."""
        super().__init__(self.name)


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Handle the stop signals with `handler`. Signals that this process ignores (`nohup`) stay ignored."""
    before = {number: old for number in ENDINGS if (old := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def raised() -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first stop signal in the block. A second one kills the process."""

    def end(number: int, _: FrameType | None) -> None:
        for each in ENDINGS:
            if signal.getsignal(each) is end:
                # A signal to the process group also ends the parent. That is the same request, not a second one.
                signal.signal(each, signal.SIG_IGN if each == PARENT_ENDED else signal.SIG_DFL)
        end_after(GRACE_SECONDS)
        if not _deferred:
            raise Interrupted(number)
        _deferred[0] = number

    with handled_by(end):
        try:
            yield
        finally:
            end_after(0)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer stop signals to the end of the block, which must be short. Has no effect outside the main thread.

    Raises Interrupted at the end of the outermost block, if a signal arrived in it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _deferred.append(None)
    try:
        yield
    finally:
        number = _deferred.pop()
        if number is not None:
            raise Interrupted(number)


@contextmanager
def default_signal_actions() -> Iterator[None]:
    """Let signals kill the process while the block waits in C++, where no Python handler can run.

    The block must not need any cleanup.
    """
    with handled_by(signal.SIG_DFL):
        yield


def _is_a_stage() -> bool:
    """Whether this process is `python -m stages.…`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("stages.")


def end_soon(code: int) -> None:
    """Make a stage exit with `code` after its threads and exit handlers: tearing down PyTorch's modules takes 1.4 s."""
    _exit_codes.append(code)


def _exit_soon() -> None:
    """Exit handler that runs last."""
    if not _exit_codes:
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed from the start.
        try:
            stream.flush()
        except (OSError, ValueError):  # The reader is gone. Unless a signal stopped this process, Python reports it.
            if _exit_codes[-1] <= FIRST_OF_SIGNALS:
                return
    os._exit(_exit_codes[-1])


if _is_a_stage():
    refuse_stages()
    watch_parent()
    atexit.register(_exit_soon)  # Registered first, so called last.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
