"""Progress of long work: reports within a process, and bars of all stages."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from cuda_memory.terminal import visible_line

# Reports, so that a watchdog does not think that this process hangs. Code that reads, writes, hashes or quantizes
# much data calls `report` after each part, from any thread.

_listeners: list[Callable[[], None]] = []


def report() -> None:
    """Report progress to all listeners."""
    for listener in _listeners:
        listener()


@contextmanager
def callback(function: Callable[[], None]) -> Iterator[None]:
    """Call `function` at every progress report while the block runs. It must be fast."""
    _listeners.append(function)
    try:
        yield
    finally:
        _listeners.remove(function)


# Bars: one line on a terminal, a line every ten seconds in a log.

tqdm.monitor_interval = 0  # Its thread lowers `miniters`, which is 1 here; without memory for a thread it warns.
LOG_SECONDS = 10.0
"""Least time between two lines where standard error is no terminal."""


class _Lines:
    """A stream that ends each update of a bar with a new line."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        """Write an update without the control characters that redraw a bar."""
        if text := text.strip("\r\n "):
            self._stream.write(f"{text}\n")

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def write_line(text: str) -> None:
    """Write a line to standard error, above the bar if there is one."""
    tqdm.write(visible_line(text), file=sys.stderr)


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Return a bar on standard error with the options of tqdm.

    In a log it has no bar, and nothing is written if the work takes less than `LOG_SECONDS`.
    """
    options["miniters"] = 1
    if not sys.stderr.isatty():
        options["bar_format"] = options.get("bar_format", "{l_bar}{r_bar}").replace(
            "{bar:3}", "{desc} {percentage:.0f}%"
        )
        options |= {"file": _Lines(sys.stderr), "mininterval": LOG_SECONDS, "delay": LOG_SECONDS}
    return tqdm(iterable, **options)
