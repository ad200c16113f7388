"""SIGTERM and Ctrl-C end a stage in order: what it began to write is removed, its workers end, one line is told.

Every entry imports this first: libraries such as torch take seconds to import, and from here on Ctrl-C ends the process
without a traceback of that.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDINGS = (signal.SIGINT, signal.SIGTERM)
GRACE_SECONDS = 8
"""After which a stage that was asked to end is killed, should a library keep what was raised to itself."""


class Interrupted(BaseException):
    """A signal asked this process to end. No `Exception`: nothing that mends faults may take it for one."""

    def __init__(self, number: int):
        """By the signal of this number."""
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number
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
            signal.signal(each, signal.SIG_DFL)
        signal.alarm(GRACE_SECONDS)
        raise Interrupted(number)

    for number in heeded:
        signal.signal(number, end)
    try:
        yield
    finally:
        signal.alarm(0)
        for number in heeded:
            signal.signal(number, before[number])


def _is_a_stage() -> bool:
    """Whether this process is `python -m stages.…`, whose signals are ours to handle."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("stages.")


if _is_a_stage() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
