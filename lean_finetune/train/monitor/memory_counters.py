"""Read the memory in use from existing counters: cheap enough for every phase of every step.

On CUDA the caching allocator counts. On a CPU PyTorch has no counters, but glibc's malloc does: `mallinfo2` (7
microseconds after a model was loaded). It counts the process, Python and NumPy included, without mapped files.
On other systems the counts are None.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lean_finetune.core.memory_limits import free_host_bytes, host_limit_bytes
from lean_finetune.core.process_status import STATUS, process_status


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCounts:
    """Memory at one moment, in bytes; None if unknown."""

    live_bytes: int | None
    """In live tensors (on a CPU: in live blocks of malloc)."""
    reserved_bytes: int | None
    """Reserved by the allocator from the driver or the system, free blocks included."""
    retries: int | None
    """How often the allocator has freed its cache and tried again, since the process started."""


class Counters:
    """Reads an allocator's counters; this class is for systems that have none."""

    def read(self) -> MemoryCounts:
        """Return the memory in use now."""
        return MemoryCounts(live_bytes=None, reserved_bytes=None, retries=None)

    def left_bytes(self) -> int:
        """Return the memory that is still available: on a CPU, to the process."""
        return free_host_bytes()[0]

    def limit_bytes(self) -> int:
        """Return all memory of the device: on a CPU, what the process may use."""
        return host_limit_bytes()

    def pinned_bytes(self) -> int | None:
        """Return pinned host memory, cached blocks included; None without a GPU."""
        return None


class CudaCounters(Counters):
    """CUDA's caching allocators of device memory and of pinned host memory."""

    def __init__(self, device: torch.device):
        torch.cuda.init()  # Before that the allocator has no statistics.
        self._device = device

    def read(self) -> MemoryCounts:
        """Return the memory in use now, without synchronising with the device."""
        # Nested, as the allocator has it: torch.cuda.memory_stats first flattens and sorts more than a hundred values.
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        return MemoryCounts(
            live_bytes=counts["allocated_bytes"]["all"]["current"],
            reserved_bytes=counts["reserved_bytes"]["all"]["current"],
            retries=counts["num_alloc_retries"],
        )

    def left_bytes(self) -> int:
        """Return free memory of the driver plus free reserved memory."""
        counts = torch.cuda.memory_stats_as_nested_dict(self._device)
        reserved, live = (counts[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        return torch.cuda.mem_get_info(self._device)[0] + reserved - live

    def limit_bytes(self) -> int:
        """Return the memory of the GPU."""
        return torch.cuda.mem_get_info(self._device)[1]

    def pinned_bytes(self) -> int | None:
        """Return pinned host memory."""
        return torch.cuda.memory.host_memory_stats_as_nested_dict()["allocated_bytes"]["current"]


class MallocCounts(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


class MallocCounters(Counters):
    """glibc's malloc, the heaps of all threads."""

    def __init__(self) -> None:
        self._mallinfo2 = ctypes.CDLL(None).mallinfo2
        self._mallinfo2.argtypes, self._mallinfo2.restype = [], MallocCounts

    def read(self) -> MemoryCounts:
        """Return blocks on heaps plus blocks that are mapped separately for their size."""
        counts = self._mallinfo2()
        mapped = counts.hblkhd
        return MemoryCounts(live_bytes=counts.uordblks + mapped, reserved_bytes=counts.arena + mapped, retries=None)


def make_counters(device: torch.device) -> Counters:
    """Return the counters of a device."""
    if device.type == "cuda":
        return CudaCounters(device)
    # mallinfo2 came with glibc 2.33; other systems (musl, macOS, Windows) have none.
    if platform.system() == "Linux" and hasattr(ctypes.CDLL(None), "mallinfo2"):
        return MallocCounters()
    return Counters()


def process_bytes() -> tuple[int, int | None]:
    """Return resident bytes of this process, in total and without mapped files (None if the system does not say).

    Pages of mapped files (weights, token shards) are resident once they were read, but the system reclaims them when it
    needs memory: they are no growth of the process.
    """
    counts = process_status() if STATUS.exists() else {}
    rss = counts.get("VmRSS", 0) or psutil.Process().memory_info().rss
    return rss, rss - counts["RssFile"] if "RssFile" in counts else None


CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs, it resets the kernel's high-water mark to the current value (Linux 4.0 and later)."""


@dataclass(kw_only=True)
class HostPeak:
    """Filled in when the block ends; None if the kernel has no counter (not Linux, or /proc is read-only)."""

    peak_bytes: int | None = None
    """Largest resident size of the process, mapped files included."""
    added_bytes: int | None = None
    """The peak minus the resident size before the block."""


@contextmanager
def host_peak() -> Iterator[HostPeak]:
    """Measure the resident memory inside the block."""
    found = HostPeak()
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        before = process_status()
    except OSError:
        yield found
        return
    yield found
    after = process_status()
    found.peak_bytes = after["VmHWM"]
    found.added_bytes = after["VmHWM"] - before["VmRSS"]
