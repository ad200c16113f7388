"""SIGTERM, Ctrl-C and their like: the first stops training between two micro-batches, a later one ends it at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from lean_finetune.core.parent_death import PARENT_ENDED
from lean_finetune.core.signals import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, PARENT_ENDED)
AGAIN_SECONDS = 1.0
"""A signal so soon after the first is the same request: a group and its leader are often signalled one by one."""
Item = TypeVar("Item")


class Stopped(Interrupted):
    """A signal asked to stop, or the parent's end did."""


class Stop:
    """Remembers that a signal came, and raises `Stopped` where it is safe to."""

    def __init__(self) -> None:
        """Nobody asked yet."""
        self._number: int | None = None
        self._waits = False

    @property
    def number(self) -> int | None:
        """The signal that came; None before."""
        return self._number

    @property
    def asked(self) -> bool:
        """Whether somebody asked."""
        return self._number is not None

    def ask(self, number: int) -> None:
        """What the first signal does: raise at once, or wait for `check`.

        Raises:
            Stopped: nothing is under way that has to come to its end first.
        """
        if self._number is None:
            self._number = number
            if not self._waits:
                self.check()

    def check(self) -> None:
        """Stop here if it was asked.

        Raises:
            Stopped: it was.
        """
        if self._number is not None:
            raise Stopped(self._number)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a signal waits for `check`."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def between(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; asked to stop, the next one is not begun.

        Raises:
            Stopped: it was asked.
        """
        for item in items:
            self.check()
            yield item


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Inside, signals ask to stop, but for those that the process was told to ignore. Call in the main thread.

    Raises:
        SystemExit: with the code of the signal, once `Stopped` has left the block.
    """

    def asked(number: int, _: FrameType | None) -> None:
        stop.ask(number)

    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    # Python runs handlers between two operations of the main thread, and a backward pass is one: a second signal, which
    # ends the process at once, is waited for by a thread.
    out, into = os.pipe()
    os.set_blocking(into, False)
    watch = threading.Thread(target=_end_when_asked_again, args=(out,), name="signals", daemon=True)
    watch.start()
    woken = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    before = {number: signal.signal(number, asked) for number in heeded}
    try:
        yield
    except Stopped as reason:
        raise SystemExit(reason.exit_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        os.close(into)
        watch.join()
        os.close(out)


def _end_when_asked_again(out: int) -> None:
    """Read the numbers of signals as they come, until the pipe is closed."""
    first: float | None = None
    while number := os.read(out, 1):
        if number[0] not in SIGNALS or (first is not None and number[0] == PARENT_ENDED):
            continue
        now = time.monotonic()
        first = now if first is None else first
        if now - first >= AGAIN_SECONDS:
            os._exit(128 + number[0])
