"""Long work says that it goes on, and whoever listens in this process hears it: nobody, or what others wait for.

What reads, writes, hashes or packs much calls `made` after each part of it, from any thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[], None]] = []


def made() -> None:
    """A part of long work is done."""
    for listener in _listeners:
        listener()


@contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Inside, `listener` is called whenever progress is made; it must take no time."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
