"""Counters of the device, the allocator and the process, by phase and step; snapshots of the allocator."""

import ctypes
import platform
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cuda_memory.growth import RETRIES
from lean_finetune.config.field_types import MemorySnapshot
from lean_finetune.core.atomic_files import atomic_path
from lean_finetune.core.errors import UserError
from lean_finetune.core.memory_limits import STATUS, free_host_bytes, host_limit_bytes, process_status
from lean_finetune.distributed.processes import World
from lean_finetune.train.monitor.measured_peak import Meter

# Counters of the memory in use: cheap enough for every phase of every step.
#
# On CUDA the caching allocator counts. On a CPU PyTorch has no counters, but glibc's malloc does: `mallinfo2` (7
# microseconds after a model was loaded). It counts the process, Python and NumPy included, without mapped files.
# On other systems the counts are None.


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


# The history of CUDA's allocator during training (run.memory_snapshot).
#
# `lean-finetune snapshot FILE` explains the file. Not measured on a GPU: the tests replace the two functions of
# PyTorch that record and read the history.
#
# Recording takes no GPU memory. Of each allocation PyTorch stores the Python stack, in 2 us by its documentation,
# while the GPU still computes what was launched before. The lines of a stack are looked up when the file is written:
# with C++ frames that took 461 s, without them 4 s (pytorch/torchtitan#3628).

MAX_ENTRIES = 100_000
"""Latest actions of the allocator that are stored, about three per tensor; the file then has about 21 MiB."""
FIRST_STEPS = 3
"""Steps after which `first_steps` writes its file."""
OOM_FILE, FIRST_STEPS_FILE = "oom_snapshot", "first_steps_snapshot"


class MemorySnapshots:
    """Records from its creation on, and writes snapshots to a directory; does nothing on a CPU or with `never`."""

    def __init__(
        self,
        choice: MemorySnapshot,
        device: torch.device,
        directory: Path,
        world: World,
        notify: Callable[[str], None],
    ):
        """Start recording; create it before the model is loaded.

        Raises:
            UserError: `first_steps` cannot be done on this device or with this allocator.
        """
        self._directory, self._notify = directory, notify
        self._suffix = "" if world.size == 1 else f"_rank{world.rank}"
        self._steps = 0
        obstacle = _obstacle(device)
        if choice == "first_steps" and obstacle is not None:
            raise UserError(f"run.memory_snapshot: first_steps records PyTorch's CUDA allocator; {obstacle}; use never")
        self._records = choice != "never" and obstacle is None
        self._first_steps_are_due = choice == "first_steps"
        if self._records:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)

    def step_started(self) -> None:
        """Write the first steps once they are finished."""
        self._steps += 1
        if self._steps > FIRST_STEPS:
            self.close()

    def close(self) -> None:
        """Write the first steps of a run that has ended, if they are not written yet."""
        if self._first_steps_are_due and self._steps > 0:
            self._first_steps_are_due = False
            path = self.write(FIRST_STEPS_FILE)
            if path is not None:
                command = shlex.join(["lean-finetune", "snapshot", str(path)])
                self._notify(f"note: explain the memory of the first steps with: {command}")

    def write(self, name: str) -> Path | None:
        """Write all that is recorded; return the file, or None without one. A fault is reported, never raised."""
        if not self._records:
            return None
        path = self._directory / f"{name}{self._suffix}.pickle"
        try:
            with atomic_path(path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
        except Exception as error:  # Neither ends a training nor hides the error that ends it.
            self._notify(f"warning: {path}: no snapshot of the memory was written ({error})")
            return None
        return path


def _obstacle(device: torch.device) -> str | None:
    """Why there is no history to record; None if there is one."""
    if device.type != "cuda":
        return "this run trains on the CPU"
    backend = torch.cuda.get_allocator_backend()
    return None if backend == "native" else f"this run uses {backend}"


MEMORY_COLUMNS = (
    "allocated_bytes",
    "live_bytes",
    "reserved_bytes",
    "alloc_retries",
    "rss_bytes",
    "rss_own_bytes",
    "pinned_bytes",
)
"""Columns of the curves. First the peak of the step (None if not measured), then memory at the end of the step: live
tensors, reserved by the allocator, the allocator's retries in the step, process, process without mapped files, pinned
host memory."""


class MemoryMonitor:
    """Monitors one run. It stores a few figures per phase and none per step."""

    def __init__(self, device: torch.device, meter: Meter):
        """Monitor a run on `device` whose peaks `meter` measures."""
        self._meter = meter
        self._counters = make_counters(device)
        self._phases: dict[str, dict[str, int | None]] = {}
        self._retries_at_phase = self._retries_at_step = self._counters.read().retries

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; this is the step's Phase hook."""
        with self._meter.phase(name):
            yield
        counts = self._counters.read()
        reserved, live = counts.reserved_bytes, counts.live_bytes
        figures = {
            "reserved_bytes": reserved,
            "unused_bytes": None if reserved is None or live is None else reserved - live,
            RETRIES: None if counts.retries is None else counts.retries - (self._retries_at_phase or 0),
            "rss_bytes": process_bytes()[0],
        }
        self._retries_at_phase = counts.retries
        self.restore({name: figures})

    def step_columns(self) -> dict[str, int | None]:
        """Return `MEMORY_COLUMNS` at the end of a step; call once per step, after the meter's window."""
        counts = self._counters.read()
        rss, own = process_bytes()
        retries = None if counts.retries is None else counts.retries - (self._retries_at_step or 0)
        self._retries_at_step = counts.retries
        return {
            "allocated_bytes": self._meter.peak_bytes_of_step(),
            "live_bytes": counts.live_bytes,
            "reserved_bytes": counts.reserved_bytes,
            "alloc_retries": retries,
            "rss_bytes": rss,
            "rss_own_bytes": own,
            "pinned_bytes": self._counters.pinned_bytes(),
        }

    def by_phase(self) -> dict[str, dict[str, int | None]]:
        """Return the highest figures at the ends of each phase, and the sum of its retries; None if unknown."""
        return {name: dict(figures) for name, figures in self._phases.items()}

    def restore(self, by_phase: Mapping[str, Mapping[str, int | None]]) -> None:
        """Add figures, here or of an earlier process of the same run."""
        for name, figures in by_phase.items():
            known = self._phases.setdefault(name, {})
            for key, figure in figures.items():
                both = [one for one in (known.get(key), figure) if one is not None]
                known[key] = (sum(both) if key == RETRIES else max(both)) if both else None
