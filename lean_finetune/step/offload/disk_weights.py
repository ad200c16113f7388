"""Master weights and optimizer state on disk: the file, the pipeline of its chunks, the update."""

import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cuda_memory.units import readable_size, round_up
from lean_finetune.config.optimizers import OptimizerEntry
from lean_finetune.core.errors import UserError
from lean_finetune.step.offload.master_weights import Groups, HostTransfer, MasterWeights

BLOCK_BYTES = 4096
"""Direct transfers begin and end at multiples of this, which suits every disk (open(2), O_DIRECT)."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems without a disk."""


class DiskFault(UserError):
    """A disk failed or has no room for what a run keeps there. What it kept is lost; checkpoints are not."""


@dataclass(frozen=True, kw_only=True)
class DiskPlace:
    """Directory of the optimizer state's file, and size of the host buffer."""

    directory: Path
    buffer_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskTensor:
    """A tensor in the file."""

    start: int
    """First byte in the file, a multiple of `BLOCK_BYTES`."""
    mapped: torch.Tensor
    """The same bytes mapped into memory, for checkpoints: the pages are the system's cache, not the process's memory.

    Direct writes are seen by it, and what is written to it by direct reads: Linux writes changed pages to the disk
    before a direct read, and drops those that a direct write replaces.
    """


class StateFile:
    """The file. The system removes it when the process ends, for any reason."""

    def __init__(self, directory: Path):
        """Make the file in `directory`, creating that if needed.

        Raises:
            DiskFault: the file system has no direct access or no unnamed files, or is in memory.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._end = directory.resolve(), 0
        if (kind := _file_system(self._directory)) in IN_MEMORY:
            raise DiskFault(
                f"train.offload_to: disk needs a disk; {self._directory} is a {kind}, which is memory; move the "
                "checkout to a disk, or use cpu"
            )
        try:
            flags = os.O_TMPFILE | os.O_DIRECT | os.O_RDWR
            self._file = os.open(self._directory, flags, 0o600)
        except (AttributeError, OSError) as error:
            raise DiskFault(
                f"train.offload_to: disk needs a file system with unnamed files and direct access (O_TMPFILE, "
                f"O_DIRECT: ext4, xfs and btrfs on Linux have both); {self._directory} refused ({error}); move the "
                "checkout to another disk, or use cpu"
            ) from None
        weakref.finalize(self, os.close, self._file)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> DiskTensor:
        """A new tensor of zeros, whose space on the disk is reserved.

        Raises:
            DiskFault: the disk has no room for it.
        """
        count = torch.Size(shape).numel()
        start, size = self._end, round_up(max(1, count * dtype.itemsize), BLOCK_BYTES)
        with self._faults(start):
            # A sparse file would find the disk full in the middle of a run.
            os.posix_fallocate(self._file, start, size)
            pages = mmap.mmap(self._file, size, offset=start)
        self._end += size
        return DiskTensor(start=start, mapped=torch.frombuffer(pages, dtype=dtype, count=count).view(shape))

    def read(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of whole blocks from the file."""
        with self._faults(start):
            while buffer:
                count = os.preadv(self._file, [buffer], start)
                if not count:
                    raise RuntimeError(f"the file of optimizer state ends at {start}")
                buffer, start = buffer[count:], start + count

    def write(self, buffer: memoryview, start: int) -> None:
        """Write a buffer of whole blocks to the file."""
        with self._faults(start):
            while buffer:
                count = os.pwritev(self._file, [buffer], start)
                buffer, start = buffer[count:], start + count

    @contextmanager
    def _faults(self, start: int) -> Iterator[None]:
        """Raise errors of the disk as DiskFault, with a message of one line."""
        try:
            yield
        except OSError as error:
            raise DiskFault(
                f"train.offload_to: disk must have room for the optimizer's state; {self._directory} refused after "
                f"{readable_size(start)} ({error.strerror}); free some, or use an optimizer with less state"
            ) from None


def _file_system(directory: Path) -> str:
    """The type of the file system of a directory, as Linux names it; empty if it is not known."""
    device = os.stat(directory).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return ""
    return next((fields[fields.index("-") + 1] for fields in mounts if fields[2] == numbers), "")


# Read chunks of a file ahead into a buffer of fixed size, and write changed ones in the background.

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


# Master weights and optimizer state in a file, updated chunk by chunk in host memory (train.offload_to=disk).
#
# Updates work on single values, or on blocks that chunks never divide, so they equal updates of whole tensors to the
# bit. Chunks are read ahead and written behind: Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv 2104.07857, section
# 5.2.2.

CHUNK_VALUES = 4 * 2**20
"""Maximum values of a chunk: fp32 ranges of 16 MiB reach a disk's full speed."""
ALIGNED_VALUES = 2**18
"""Chunks begin at multiples of this: the scales of this many 8-bit values fill a block of the file."""
SCALED_VALUES = 256
"""8-bit values that share a scale (bitsandbytes)."""
FEWEST_SLOTS, MOST_SLOTS = 4, 16
"""Slots of the buffer: one for the chunk that is updated, the others for reading ahead and writing."""
MASTER = "master"


class DiskMasterWeights(MasterWeights):
    """`MasterWeights` whose copies and optimizer state are in a file.

    Its state and the inner optimizer's state are tensors mapped from the file, so checkpoints have the names and bytes
    of `MasterWeights`. The update never touches them: it reads the file into a buffer and writes it back.
    """

    def __init__(
        self,
        groups: Groups,
        lr: float,
        build: Callable[[Groups], torch.optim.Optimizer],
        *,
        dtype: torch.dtype | None,
        make_state: Callable[[torch.optim.Optimizer], None],
        entry: OptimizerEntry,
        place: DiskPlace,
    ):
        """As `MasterWeights`, but `build` makes the optimizer without state, and `make_state` makes its state.

        Weights may be in host memory already.

        Raises:
            DiskFault: the disk has no room, or no direct access.
        """
        self._file, self._entry = StateFile(place.directory), entry
        self._stored: dict[nn.Parameter, dict[str, DiskTensor]] = {}
        super().__init__(groups, lr, build, dtype=dtype)
        for parameter, files in self._stored.items():
            if state := self._make_state(parameter, files, make_state):
                self.inner.state[self.state[parameter][MASTER]] = state
        self._make_pipeline(place.buffer_bytes)

    def _copied(self, parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.nn.Parameter:
        """A copy of a weight in the file."""
        assert isinstance(parameter, nn.Parameter)
        file = self._file.zeros(tuple(parameter.shape), dtype or parameter.dtype)
        self._stored[parameter] = {MASTER: file}
        file.mapped.copy_(parameter.detach())
        return nn.Parameter(file.mapped)

    def _make_state(
        self, parameter: nn.Parameter, files: dict[str, DiskTensor], make_state: Callable[[torch.optim.Optimizer], None]
    ) -> dict[str, Any]:
        """Allocate the state that the first step would create: large tensors in the file, the others in memory."""
        master, groups = self.state[parameter][MASTER], self.inner.param_groups
        # A chunk shows which tensors the state has and their types; the large ones are then made in the file.
        first = nn.Parameter(torch.zeros(min(master.numel(), CHUNK_VALUES), dtype=master.dtype))
        self.inner.param_groups = [{**groups[self._inner_group[parameter]], "params": [first]}]
        make_state(self.inner)
        self.inner.param_groups = groups
        state: dict[str, Any] = self.inner.state.pop(first, {})
        for key, value in state.items():
            if key in self._entry.state:
                files[key] = self._file.zeros(tuple(master.shape), value.dtype)
            elif key.startswith("absmax"):
                files[key] = self._file.zeros((-(-master.numel() // SCALED_VALUES),), value.dtype)
        return {**state, **{key: file.mapped for key, file in files.items() if key != MASTER}}

    def _make_pipeline(self, buffer_bytes: int) -> None:
        """Divide the tensors into chunks, as large as the buffer allows."""
        values = CHUNK_VALUES
        while True:
            self._chunks = {p: list(_chunks(p.numel(), files, values)) for p, files in self._stored.items()}
            every = [chunk for chunks in self._chunks.values() for chunk in chunks]
            slot_bytes = max(sum(one.whole_bytes for one in chunk.ranges) for chunk in every)
            gradient_bytes = max(chunk.ranges[0].whole_bytes for chunk in every)
            if gradient_bytes + FEWEST_SLOTS * slot_bytes <= buffer_bytes or values == ALIGNED_VALUES:
                break
            values //= 2
        slots = min(MOST_SLOTS, (buffer_bytes - gradient_bytes) // slot_bytes, max(FEWEST_SLOTS, len(every)))
        self._pipeline = ChunkPipeline(self._file, every, slots=slots, slot_bytes=slot_bytes)
        weights = list(self._stored)
        self._gradient = torch.frombuffer(mmap.mmap(-1, gradient_bytes), dtype=torch.uint8)
        cuda = weights[0].device.type == "cuda"
        self._through = HostTransfer(weights, None, room=self._gradient) if cuda else None

    def _update(self, parameter: torch.nn.Parameter, lr: float) -> None:
        """Update one tensor, chunk by chunk; every chunk sees the state of the whole tensor before the step."""
        state = self.inner.state.get(self.state[parameter][MASTER], {})
        gradient, weights = parameter.grad, parameter.detach().view(-1)
        assert gradient is not None
        groups, keys = self.inner.param_groups, list(self._stored[parameter])
        changed: dict[str, Any] = {}
        try:
            for chunk in self._chunks[parameter]:
                slot = self._pipeline.fetch(chunk)
                tensors = dict(zip(keys, chunk.tensors(slot), strict=True))
                master = nn.Parameter(tensors.pop(MASTER))
                part = slice(chunk.first, chunk.first + len(master))
                master.grad = self._to_host(gradient.view(-1)[part], master.dtype)
                # A step count, say, which each chunk's update increases: all chunks begin with the same value.
                same = {key: value for key, value in state.items() if key not in keys}
                changed = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in same.items()}
                if state:
                    self.inner.state[master] = {**changed, **tensors}
                self.inner.param_groups = [{**groups[self._inner_group[parameter]], "lr": lr, "params": [master]}]
                self.inner.step()
                changed = {key: self.inner.state[master][key] for key in same}
                self.inner.state.pop(master, None)
                self._to_weights(master.detach(), weights[part])
                self._pipeline.release(chunk, slot)
        finally:
            self.inner.param_groups = groups
        for key, value in changed.items():
            if isinstance(value, torch.Tensor):
                state[key].copy_(value)
            else:
                state[key] = value
        parameter.grad = None  # Only now: every chunk has read its part of it.

    def _to_host(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gradients in host memory in this type, valid until the next call."""
        if self._through is not None:
            return self._through.to_host(values, dtype)
        if values.dtype == dtype:
            return values
        return self._gradient[: values.numel() * dtype.itemsize].view(dtype).copy_(values)

    def _to_weights(self, values: torch.Tensor, weights: torch.Tensor) -> None:
        """Overwrite weights with updated ones, rounded to their type."""
        if self._through is not None:
            self._through.to_device(values, weights)
        else:
            weights.copy_(values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients at the end of a step, when the file must be complete for a checkpoint."""
        self._pipeline.flush()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See MasterWeights."""
        self._pipeline.flush()
        self._pipeline.forget()
        super().load_state_dict(state_dict)


def _chunks(count: int, files: dict[str, DiskTensor], values: int) -> Iterator[Chunk]:
    """The chunks of a tensor of `count` values; each has at most `values` and a range of every file."""
    for first in range(0, count, values):
        ranges = []
        for key, file in files.items():
            shared = SCALED_VALUES if key.startswith("absmax") else 1
            start = file.start + first // shared * file.mapped.itemsize
            size = -(-min(values, count - first) // shared)
            ranges.append(FileRange(start=start, count=size, dtype=file.mapped.dtype))
        yield Chunk(first=first, ranges=tuple(ranges))
