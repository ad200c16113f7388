"""A barrier that waits for a busy process as long as it makes progress.

A collective waits for a fixed time (`run.rank_timeout_seconds`), but quantising 70B weights to 4 bits on one CPU takes
longer. So processes first meet here, through torch.distributed's key-value store. Each announces its arrival, and until
then its progress. The timeout counts from the last progress of those that have not arrived.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

import torch.distributed as dist

from lean_finetune.core import progress

ANNOUNCE_SECONDS = 1.0
"""Least time between two announcements of progress; one takes about 0.1 ms."""
LONGEST_PAUSE_SECONDS = 0.5
"""Between two checks of who has arrived."""


class BarrierTimeout(RuntimeError):
    """Processes did not arrive and made no progress."""

    def __init__(self, ranks: list[int]):
        super().__init__(f"timed out waiting for process {', '.join(map(str, ranks))}")
        self.ranks = ranks


class ProgressBarrier:
    """The barriers of a run; every process calls `wait_for_all` equally often."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float):
        """Meet through `store` as process `rank` of `size`; `timeout_seconds` is the longest wait without progress."""
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout_seconds
        self._numbers = count()
        self._due = time.monotonic()

    def progress(self) -> None:
        """Announce that this process makes progress."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + ANNOUNCE_SECONDS
        with suppress(RuntimeError):  # The store ended with its process: the next collective reports that.
            self._store.add(self._key("progress", self._rank), 1)

    def wait_for_all(self) -> None:
        """Wait until every process has called this as often as this one.

        Raises:
            BarrierTimeout: some did not and made no progress for `timeout_seconds`.
        """
        number = next(self._numbers)
        self._store.set(self._key(number, self._rank), "")
        absent, seen, due, pause = list(range(self._size)), None, 0.0, 0.001
        while absent := [rank for rank in absent if not self._store.check([self._key(number, rank)])]:
            now = {rank: self._store.add(self._key("progress", rank), 0) for rank in absent}
            if now != seen:
                seen, due = now, time.monotonic() + self._timeout
            elif time.monotonic() > due:
                raise BarrierTimeout(absent)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    @staticmethod
    def _key(what: str | int, rank: int) -> str:
        return f"lean-finetune/{what}/{rank}"


_barriers: list[ProgressBarrier] = []


@contextmanager
def progress_barrier(rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """A context in which this process announces progress, and `wait_for_all` waits for the others."""
    barrier = ProgressBarrier(dist.distributed_c10d._get_default_store(), rank, size, timeout_seconds)
    _barriers.append(barrier)
    try:
        with progress.callback(barrier.progress):
            yield
    finally:
        _barriers.remove(barrier)


def wait_for_all() -> None:
    """Wait for the other processes before a collective, after work that may take one long; raises BarrierTimeout."""
    for barrier in _barriers:
        barrier.wait_for_all()
