"""What memory is held now, read from counters that others keep: cheap enough for every phase of every step.

On CUDA the caching allocator counts. On a CPU PyTorch counts nothing between two instants, but glibc's malloc, which
serves it, does: `mallinfo2` (7 microseconds after a model was loaded). It counts the whole process, Python and NumPy
included, and leaves out files that are mapped. Where there is neither, the counts are None.
"""

import ctypes
import mmap
import platform
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.core.process_status import process_status

STATM = Path("/proc/self/statm")
"""Linux: pages of the process, first all and then resident ones; cheaper than its status, which tells more."""
PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Memory at one instant, in bytes; None where nothing counts it."""

    held_bytes: int | None
    """In live tensors (on a CPU: in live blocks of malloc)."""
    reserved_bytes: int | None
    """What the allocator has from the driver or the system, free blocks included."""
    retries: int | None
    """How often, since the process began, cached blocks were given back for want of memory."""


class Counters(ABC):
    """Reads an allocator's counters."""

    how: str
    """What counts, for people."""

    @abstractmethod
    def read(self) -> Held:
        """What is held now."""

    def left_bytes(self) -> int:
        """What could still be held beside it: on a CPU, the memory left to the process."""
        return free_host_bytes()[0]

    def pinned_bytes(self) -> int | None:
        """Page-locked memory of the host, what is kept for later use included; None where there is none to count."""
        return None


class CudaCounters(Counters):
    """CUDA's caching allocators: that of the device, and that of pinned memory."""

    how = "CUDA's caching allocator"

    def __init__(self, device: torch.device):
        """Read those of `device`."""
        torch.cuda.init()  # Before that the allocator has no statistics.
        self._device = device

    def read(self) -> Held:
        """What is held now; the host does not wait for the device."""
        # Nested, as the allocator has it: torch.cuda.memory_stats first flattens and sorts more than a hundred values.
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return Held(
            held_bytes=counts["allocated_bytes"]["all"]["current"],
            reserved_bytes=counts["reserved_bytes"]["all"]["current"],
            retries=counts["num_alloc_retries"],
        )

    def left_bytes(self) -> int:
        """What the driver has left, and what is reserved and free."""
        held = self.read()
        assert held.held_bytes is not None and held.reserved_bytes is not None
        return torch.cuda.mem_get_info(self._device)[0] + held.reserved_bytes - held.held_bytes

    def pinned_bytes(self) -> int | None:
        """Page-locked memory of the host."""
        return torch.cuda.memory.host_memory_stats_as_nested_dict()["allocated_bytes"]["current"]


class MallocCounts(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class MallocCounters(Counters):
    """glibc's malloc, all threads' heaps."""

    how = "glibc's malloc, the whole process"

    def __init__(self) -> None:
        """Find the call.

        Raises:
            AttributeError: the C library has no mallinfo2.
        """
        self._mallinfo2 = ctypes.CDLL(None).mallinfo2
        self._mallinfo2.argtypes, self._mallinfo2.restype = [], MallocCounts

    def read(self) -> Held:
        """What is held now: blocks on heaps, and blocks large enough to be mapped by themselves."""
        counts = self._mallinfo2()
        mapped = counts.hblkhd
        return Held(held_bytes=counts.uordblks + mapped, reserved_bytes=counts.arena + mapped, retries=None)


class NoCounters(Counters):
    """A CPU whose C library does not count."""

    how = "nothing: this system's malloc keeps no counts"

    def read(self) -> Held:
        """Nothing is known."""
        return Held(held_bytes=None, reserved_bytes=None, retries=None)


def make_counters(device: torch.device) -> Counters:
    """The counters of a device."""
    if device.type == "cuda":
        return CudaCounters(device)
    # mallinfo2 came with glibc 2.33; other systems (musl, macOS, Windows) have none.
    if platform.system() == "Linux" and hasattr(ctypes.CDLL(None), "mallinfo2"):
        return MallocCounters()
    return NoCounters()


class Resident:
    """The process's memory as the system sees it."""

    def __init__(self) -> None:
        """Read Linux's files of it where there are: psutil takes longer and knows no more."""
        self._process = None if STATM.exists() else psutil.Process()

    def read(self) -> int:
        """Resident bytes."""
        if self._process is not None:
            return self._process.memory_info().rss
        with open(STATM, "rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGE_BYTES

    def read_both(self) -> tuple[int, int | None]:
        """Resident bytes, and those of them that are no file's: None where the system does not tell them apart.

        Pages of mapped files (weights, token shards) count as resident once they were read, and the system takes them
        back when it needs room; they are no growth of the process.
        """
        if self._process is not None:
            return self.read(), None
        counts = process_status()
        rss = counts["VmRSS"]
        return rss, rss - counts["RssFile"] if "RssFile" in counts else None
