"""Progress reports of long work within a process, so that a watchdog does not think that it hangs.

Code that reads, writes, hashes or quantizes much data calls `report` after each part, from any thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
