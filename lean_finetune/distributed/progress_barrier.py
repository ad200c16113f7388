"""Where processes of a run wait for one that works alone for long: as long as it makes progress.

A collective waits for a fixed time (`run.rank_timeout_seconds`). Packing 70B weights to 4 bits on one CPU takes longer.
So the processes first meet here, through the key-value store by which torch.distributed links them: each says that it
has come, and until then how far its work is. The limit counts from the last progress of those that have not come.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import torch.distributed as dist

from lean_finetune.core import progress

TELL_SECONDS = 1.0
"""Least time between two words about progress: one takes about 0.1 ms."""
LONGEST_PAUSE_SECONDS = 0.5
"""Between two looks at who has come."""


class BarrierTimeout(RuntimeError):
    """Processes did not come and made no progress."""

    def __init__(self, ranks: list[int]):
        """Those of `ranks`."""
        super().__init__(f"timed out waiting for process {', '.join(map(str, ranks))}")
        self.ranks = ranks


class ProgressBarrier:
    """The meetings of a run's processes, all of which call `wait_for_all` equally often."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Meet through `store` as process `rank` of `size`; `timeout_seconds` bounds a wait without progress."""
        self._store, self._rank, self._size, self._timeout, self._clock = store, rank, size, timeout_seconds, clock
        self._numbers = count()
        self._due = clock()

    def progress(self) -> None:
        """This process's work goes on."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + TELL_SECONDS
        with suppress(RuntimeError):  # The store is gone with its process: whoever waits next is told.
            self._store.add(self._key("progress", self._rank), 1)

    def wait_for_all(self) -> None:
        """Wait until every process has called this as often as this one.

        Raises:
            BarrierTimeout: some did not, and made no progress for too long.
        """
        number = next(self._numbers)
        self._store.set(self._key(number, self._rank), "")
        absent, seen, due, pause = list(range(self._size)), None, 0.0, 0.001
        while absent := [rank for rank in absent if not self._store.check([self._key(number, rank)])]:
            now = {rank: self._store.add(self._key("progress", rank), 0) for rank in absent}
            if now != seen:
                seen, due = now, self._clock() + self._timeout
            elif self._clock() > due:
                raise BarrierTimeout(absent)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    @staticmethod
    def _key(what: str | int, rank: int) -> str:
        return f"lean-finetune/{what}/{rank}"


_meetings: list[ProgressBarrier] = []


@contextmanager
def progress_barrier(rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """Inside, this process's progress is told to the others, and `wait_for_all` waits for theirs."""
    made = ProgressBarrier(dist.distributed_c10d._get_default_store(), rank, size, timeout_seconds)
    _meetings.append(made)
    try:
        with progress.heard_by(made.progress):
            yield
    finally:
        _meetings.remove(made)


def wait_for_all() -> None:
    """Wait for the other processes before tensors are exchanged, where one may have worked alone for long.

    Raises:
        BarrierTimeout: some of them did not come, and made no progress for too long.
    """
    for made in _meetings:
        made.wait_for_all()
