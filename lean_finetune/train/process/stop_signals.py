"""Stop signals, and output that cannot be written: neither may cost finished steps."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO, TypeVar, cast

from lean_finetune.core.signals import ENDINGS, PARENT_ENDED, Interrupted
from lean_finetune.train.monitor.memory_monitor import RunPosition

WRITE_ERRORS = (OSError, ValueError)
"""A ValueError is raised by a closed stream, and by one that cannot encode a character."""


class BestEffortStream:
    """A text stream that ignores write errors, as the handlers of `logging` do.

    Output files are written elsewhere, and their write errors do end the run.
    """

    def __init__(self, stream: TextIO | None):
        """Write to `stream`; None if it was closed before the process started."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Try to write; always return the number of characters."""
        if self._stream is not None:
            with suppress(*WRITE_ERRORS):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Try to flush."""
        if self._stream is not None:
            with suppress(*WRITE_ERRORS):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Delegate to the stream: a progress bar inspects its terminal."""
        return getattr(self._stream, name)


def ignore_output_errors() -> None:
    """Replace stdout and stderr for the rest of the process, including the interpreter's last flush."""
    sys.stdout, sys.stderr = cast(TextIO, BestEffortStream(sys.stdout)), cast(TextIO, BestEffortStream(sys.stderr))


# Stop training on SIGTERM, Ctrl-C and similar signals: between two micro-batches, or immediately on a second one.

SIGNALS = ENDINGS if sys.platform == "win32" else (*ENDINGS, signal.SIGHUP)
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
        # A step may take minutes, more than a scheduler waits after SIGTERM.
        for item in items:
            self.check()
            yield item


def stopping_line(name: str, position: RunPosition, processes: int) -> str:
    """What happens after the first stop signal, called `name`, in one of the `processes` of a run."""
    single = {"heldout": "the held-out losses", "checkpoint": "this checkpoint", "optimizer": "this update"}
    after = "this step" if processes > 1 else single.get(position.phase_name, "this micro-batch")
    return f"train: {name}: stopping after {after}, with a checkpoint of the finished steps; again to stop now"


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
