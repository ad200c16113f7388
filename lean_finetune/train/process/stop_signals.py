"""Stop training on SIGTERM, Ctrl-C and similar signals: between two micro-batches, or immediately on a second one."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from lean_finetune.core.parent_death import PARENT_ENDED
from lean_finetune.core.signals import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, PARENT_ENDED)
SAME_REQUEST_SECONDS = 1.0
"""A signal this soon after the first is the same request: a process group and its leader are often signalled both."""
Item = TypeVar("Item")


class Stopped(Interrupted):
    """Training stops because of a signal or because the parent process ended."""


class StopRequest:
    """Records that a signal arrived, and raises `Stopped` where stopping is safe."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """The signal that arrived first; None before."""
        self.deferred_now = False
        """Whether a signal waits for `check`."""

    def request(self, number: int) -> None:
        """Handle the first signal: raise `Stopped` now, or at the next `check` inside `deferred`."""
        if self.signal_number is None:
            self.signal_number = number
            if not self.deferred_now:
                self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal_number is not None:
            raise Stopped(self.signal_number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Make signals inside the block wait for `check`."""
        self.deferred_now = True
        try:
            yield
        finally:
            self.deferred_now = False

    def between(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items; check for a request before each."""
        for item in items:
            self.check()
            yield item


@contextmanager
def handle_signals(stop: StopRequest, acknowledge: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Pass signals inside the block to `stop`, except those the process ignores. Call in the main thread.

    `acknowledge` gets the name of the first signal at once, in another thread, if it waits for `StopRequest.check`.

    Raises:
        SystemExit: with the signal's exit code, once `Stopped` has left the block.
    """

    def handler(number: int, _: FrameType | None) -> None:
        stop.request(number)

    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    # Python runs handlers between two operations of the main thread, and a backward pass is one operation. A thread
    # therefore acknowledges the first signal and waits for a second one, which ends the process immediately.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def first_signal(number: int) -> None:
        if stop.deferred_now:
            acknowledge(Stopped(number).name)

    thread = threading.Thread(target=_watch_signals, args=(read_end, first_signal), name="signals", daemon=True)
    thread.start()
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers_before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    except Stopped as reason:
        raise SystemExit(reason.exit_code) from None
    finally:
        for number, before in handlers_before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(wakeup_before)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def _watch_signals(read_end: int, first_signal: Callable[[int], None]) -> None:
    """Read the numbers of signals as they arrive, until the pipe is closed; exit at the second request."""
    first: float | None = None
    while number := os.read(read_end, 1):
        if number[0] not in SIGNALS or (first is not None and number[0] == PARENT_ENDED):
            continue
        now = time.monotonic()
        if first is None:
            first = now
            first_signal(number[0])
        elif now - first >= SAME_REQUEST_SECONDS:
            os._exit(128 + number[0])
