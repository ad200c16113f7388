"""SIGTERM, Ctrl-C and the parent's end end a stage in order: no half-written output, no workers left, one line.

Every entry imports this first: libraries such as torch take seconds to import, and from here on Ctrl-C ends the process
without a traceback of that. They take seconds to take down as well, for which nobody waits who asked a process to end.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lean_finetune.core.parent_death import PARENT_ENDED, parent_ended, watch_parent

ENDINGS = (signal.SIGINT, signal.SIGTERM, PARENT_ENDED)
GRACE_SECONDS = 8
"""After which a stage that was asked to end is killed, should a library keep what was raised to itself."""


FIRST_OF_SIGNALS = 128
"""Exit codes above it are of signals: it, and the signal's number."""
_asked: list[int] = []
"""The exit code of this process, once a signal has decided it."""
_held_back: list[int | None] = []
"""For each block not to be left in the middle, outer ones first: the signal that came in it; None for none yet."""


class Interrupted(BaseException):
    """A signal asked this process to end. No `Exception`: nothing that mends faults may take it for one."""

    def __init__(self, number: int):
        """By the signal of this number."""
        ended = number == PARENT_ENDED and parent_ended()
        self.name = "the end of its parent" if ended else signal.Signals(number).name
        self.exit_code = FIRST_OF_SIGNALS + number
        """The shell's code of a process that a signal ended."""
        super().__init__(self.name)


@contextmanager
def raised() -> Iterator[None]:
    """Inside, the first signal to end raises `Interrupted` in the main thread, and a second one ends the process.

    A signal that this process was told to ignore (`nohup`, a shell's background job) stays ignored.
    """
    before = {number: signal.getsignal(number) for number in ENDINGS}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, _: FrameType | None) -> None:
        for each in heeded:
            # A signal to the whole group ends the parent as well: that is the same request, not a second one.
            signal.signal(each, signal.SIG_IGN if each == PARENT_ENDED else signal.SIG_DFL)
        signal.alarm(GRACE_SECONDS)
        if not _held_back:
            raise Interrupted(number)
        _held_back[0] = number

    for number in heeded:
        signal.signal(number, end)
    try:
        yield
    finally:
        signal.alarm(0)
        for number in heeded:
            signal.signal(number, before[number])


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, a signal to end waits for the end of the block: for what takes no time and must not be left half done.

    Signals come to the main thread: in another one this does nothing.

    Raises:
        Interrupted: at the end of the outermost block, where a signal came inside.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held_back.append(None)
    try:
        yield
    finally:
        number = _held_back.pop()
        if number is not None:
            raise Interrupted(number)


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, a signal ends the process there and then: for calls that wait in C++, where no handler of ours can run.

    Nothing may be under way that a stage would have to tidy.
    """
    before = {number: signal.getsignal(number) for number in ENDINGS}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def _is_a_stage() -> bool:
    """Whether this process is `python -m stages.…`, whose signals are ours to handle."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("stages.")


def end_soon(code: int) -> None:
    """Have this process, if it is a stage, end with `code` once its threads have ended and what is to run at exit has.

    What is left out is the interpreter's taking down of modules, which holds nothing that is not the system's to free.
    """
    _asked.append(code)


def _end_if_asked() -> None:
    """Be the last that runs at exit."""
    if not _asked:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Whoever read it is gone.
            stream.flush()
    os._exit(_asked[-1])


if _is_a_stage():
    watch_parent()
    atexit.register(_end_if_asked)  # Registered first, so called last.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
