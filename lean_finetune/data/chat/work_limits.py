"""Limits on what a chat template may use: memory, the time of a processor, the size of integers.

A template is a program that a stranger wrote. Jinja's sandbox limits what it can reach, not how long it runs.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lean_finetune.data.read.worker_memory import limited_memory_growth

CONVERSATION_BYTES, CONVERSATION_SECONDS = 1 << 29, 20.0
"""Memory and time for one conversation: of a chat, of an evaluation, or all test conversations of a template."""
LARGEST_PRODUCT = 1 << 26
"""Characters or items that a template may make by one multiplication."""
LARGEST_INTEGER_BITS = 1 << 16
"""Bits of an integer that a template may compute: squaring doubles them, and one product cannot be interrupted."""
TICKS = 8
"""Signals during the time that a block may take. Its limit is exact to one of them."""


class TooMuchWork(Exception):
    """A template runs for longer than it may."""


LIMITS_MET = (MemoryError, RecursionError, TooMuchWork)
"""Errors of a template that meets a limit."""


def limit_met(error: BaseException) -> str:
    """What a template does that met a limit, as the end of `the template …`."""
    if isinstance(error, TooMuchWork):
        return "runs too long on"
    return "needs too much memory for" if isinstance(error, MemoryError) else "recurses without end on"


@contextmanager
def work_limits(size_bytes: int | None = None, seconds: float | None = None) -> Iterator[Callable[[], None]]:
    """Raise MemoryError or TooMuchWork in the block when it uses more memory, or more time of a processor.

    None means the limit of a conversation. Gives a function that starts the time anew. Signals and limits are those of
    a process, so they apply only in its main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: None
        return
    most_bytes = CONVERSATION_BYTES if size_bytes is None else size_bytes
    tick_seconds = (CONVERSATION_SECONDS if seconds is None else seconds) / TICKS
    ticks: int | None = 0

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal ticks
        if ticks is not None:
            ticks += 1
            # Again at each later tick: Jinja drops exceptions of some calls, and continues.
            if ticks > TICKS:
                raise TooMuchWork

    def restart() -> None:  # Without a system call, which would take longer than rendering a short row.
        nonlocal ticks
        ticks = 0

    handler = signal.signal(signal.SIGVTALRM, tick)
    outer = signal.setitimer(signal.ITIMER_VIRTUAL, tick_seconds, tick_seconds)
    try:
        with limited_memory_growth(most_bytes):
            yield restart
    finally:
        ticks = None
        signal.setitimer(signal.ITIMER_VIRTUAL, *outer)
        signal.signal(signal.SIGVTALRM, handler)


def product_size(operator: str, left: Any, right: Any) -> float:
    """The size of a product or power as a share of what a template may make; 0 for products that are small anyway."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return bits / LARGEST_INTEGER_BITS
    for items, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(items, str | list | tuple) and isinstance(times, int):
            return len(items) * times / LARGEST_PRODUCT
    return 0
