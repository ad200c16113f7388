"""An unnamed file of tensors that is read and written directly, past the page cache (train.offload_to=disk)."""

import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cuda_memory.units import readable_size, round_up
from lean_finetune.core.errors import UserError

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
class FileTensor:
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

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> FileTensor:
        """A new tensor of zeros, whose space on the disk is reserved.

        Raises:
            DiskFault: the disk has no room for it.
        """
        count = torch.Size(shape).numel()
        start, size = self._end, round_up(max(1, count * dtype.itemsize), BLOCK_BYTES)
        with self._faults(start):
            os.posix_fallocate(self._file, start, size)
            pages = mmap.mmap(self._file, size, offset=start)
        self._end += size
        return FileTensor(start=start, mapped=torch.frombuffer(pages, dtype=dtype, count=count).view(shape))

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
