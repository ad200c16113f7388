"""Read chunks of a file ahead into a buffer of fixed size, and write changed ones in the background."""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch

from cuda_memory.units import round_up
from lean_finetune.step.offload.state_file import BLOCK_BYTES, StateFile

THREADS = 8
"""Concurrent transfers; at some MiB each, enough for the full speed of a solid-state disk."""


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Values of a tensor in the file: whole blocks, except at its end."""

    start: int
    count: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of the values."""
        return self.count * self.dtype.itemsize

    @property
    def whole_bytes(self) -> int:
        """Size of its blocks."""
        return round_up(self.bytes, BLOCK_BYTES)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Ranges of values that are read, updated and written together."""

    first: int
    """The first value in its tensor."""
    ranges: tuple[FileRange, ...]

    def tensors(self, slot: memoryview) -> list[torch.Tensor]:
        """The ranges in a slot, one after the other."""
        starts = accumulate((one.whole_bytes for one in self.ranges), initial=0)
        pairs = zip(self.ranges, starts, strict=False)
        return [torch.frombuffer(slot, dtype=one.dtype, count=one.count, offset=start) for one, start in pairs]


class ChunkPipeline:
    """Slots of the buffer, and threads that fill and empty them.

    It expects chunks in the order of the previous step, and reads the next ones while one is updated.
    """

    def __init__(self, file: StateFile, chunks: Sequence[Chunk], *, slots: int, slot_bytes: int):
        """`chunks` in the order of their first use, as far as it is known."""
        self._file = file
        self._free = [memoryview(mmap.mmap(-1, slot_bytes)) for _ in range(slots)]
        self._most_ahead = (slots - 1) // 2
        self._after = dict(zip(chunks, chunks[1:], strict=False))
        self._last: Chunk | None = None
        self._ahead: dict[Chunk, Future[memoryview]] = {}
        self._behind: dict[Chunk, Future[memoryview]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="optimizer-state")

    def fetch(self, chunk: Chunk) -> memoryview:
        """The slot of a chunk; `release` must follow before the next one.

        Raises:
            DiskFault: the disk refused, now or when an earlier chunk was written.
        """
        if self._last is not None:
            self._after[self._last] = chunk
        self._last = chunk
        if chunk not in self._ahead:
            self.forget()
            self._read(chunk, self._slot())
        found = self._ahead.pop(chunk)
        self._read_ahead(chunk)
        return found.result()

    def release(self, chunk: Chunk, slot: memoryview) -> None:
        """Write a changed chunk to the file, in a thread."""
        if chunk in self._behind:  # It was read since, so that write is over.
            self._free.append(self._behind.pop(chunk).result())
        self._behind[chunk] = self._threads.submit(self._transfer, self._file.write, chunk, slot)

    def flush(self) -> None:
        """Wait until everything is written; raises DiskFault if a transfer failed."""
        while self._behind:
            self._free.append(self._behind.pop(next(iter(self._behind))).result())

    def forget(self) -> None:
        """Drop the chunks that were read ahead: others are needed, or the file has changed."""
        while self._ahead:
            self._free.append(self._ahead.popitem()[1].result())

    def _read_ahead(self, chunk: Chunk) -> None:
        """Read the chunks after this one, into the slots that are free now."""
        following = self._after.get(chunk)
        for _ in range(self._most_ahead):
            if following is None or following is chunk:
                return
            if following not in self._ahead:
                if not self._free and not (self._behind and next(iter(self._behind.values())).done()):
                    return
                self._read(following, self._slot())
            following = self._after.get(following)

    def _slot(self) -> memoryview:
        """A free slot; waits for the oldest write if there is none."""
        if not self._free:
            self._free.append(self._behind.pop(next(iter(self._behind))).result())
        return self._free.pop()

    def _read(self, chunk: Chunk, slot: memoryview) -> None:
        """Read a chunk in a thread. A write of the same chunk was queued earlier, so it never waits for this thread."""
        before = self._behind.get(chunk)

        def read() -> memoryview:
            if before is not None:
                before.result()
            return self._transfer(self._file.read, chunk, slot)

        self._ahead[chunk] = self._threads.submit(read)

    @staticmethod
    def _transfer(move: Callable[[memoryview, int], None], chunk: Chunk, slot: memoryview) -> memoryview:
        """Read or write all ranges of a chunk."""
        done = 0
        for one in chunk.ranges:
            move(slot[done : done + one.whole_bytes], one.start)
            done += one.whole_bytes
        return slot
