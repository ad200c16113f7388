"""Where a run is and how much memory it has: counters by phase and step, and when memory runs out."""

import ctypes
import mmap
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from cuda_memory.growth import RETRIES
from lean_finetune.core.memory_limits import free_host_bytes, host_limit_bytes
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.training_step import Phase
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


STATUS = Path("/proc/self/status")
LINES = re.compile(rb"^((?:Vm|Rss)\w+):\s+(\d+) kB$", re.MULTILINE)
KIB = 2**10


def process_status() -> dict[str, int]:
    """Bytes by counter (`VmRSS`, `RssFile`). Some kernels lack some of them.

    Raises FileNotFoundError if this is not Linux.
    """
    with open(STATUS, "rb", buffering=0) as file:
        return {name.decode(): int(kib) * KIB for name, kib in LINES.findall(file.read())}


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


# The address-space limit of a process (RLIMIT_AS, `ulimit -v`), which can refuse memory that the machine has.


@dataclass(frozen=True, kw_only=True)
class AddressLimit:
    """The limit and its use, in bytes."""

    limit_bytes: int
    used_bytes: int
    """Mapped addresses, with or without physical memory. Libraries and mapped files count."""


def address_limit_met(requested_bytes: int | None) -> AddressLimit | None:
    """The limit of this process if it caused a refused allocation; None otherwise. Only Linux enforces it.

    Linux refuses an allocation only above a limit or above the machine's memory. Memory in use at that time may be free
    now, because the exception has released the step's tensors. `requested_bytes` is None if the request is unknown.
    """
    if sys.platform != "linux":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    beyond_machine = requested_bytes is not None and requested_bytes > psutil.virtual_memory().available
    if limit == resource.RLIM_INFINITY or (beyond_machine and used + (requested_bytes or 0) <= limit):
        return None
    return AddressLimit(limit_bytes=limit, used_bytes=used)


# Position of a run and its memory at an out-of-memory error, as plain numbers.
#
# An exception references the frames it passed, and with them every tensor of the step. What is stored here references
# none, so the memory is free again once the exception is gone.

FORWARD, BACKWARD, CLIP = "forward", "backward", "clip"
HELDOUT, CHECKPOINT, SAVE = "heldout", "checkpoint", "save"
READING = "reading"
"""Between phases: a batch is read or copied to the device, or the step ends."""
SIZES = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
RESERVE_BYTES = 8 * 2**20
"""Address space that is reserved and released at an out-of-memory error: reporting it needs some."""


def requested_bytes(message: str) -> int | None:
    """Return the size of the failed allocation, if the allocator's message has it."""
    found = re.search(r"allocate:? ([0-9.]+) ?(bytes?|[KMGT]iB)\b", message)
    return None if found is None else int(float(found[1]) * SIZES[found[2]])


@dataclass(frozen=True, kw_only=True)
class OomFailure:
    """An out-of-memory error: where it happened, and the memory at that moment."""

    message: str
    """The allocator's message, in one line."""
    requested_bytes: int | None
    """Size of the failed allocation."""
    phase: str
    """`load`, `reading`, a phase of the step, `heldout`, `checkpoint` or `save`."""
    step: int | None
    """Optimizer step, from 0; None before the first."""
    number: int | None
    """Index of the micro-batch, from 0; None outside of one."""
    micro_batches: int
    """Of that step."""
    rows: int
    padded_tokens: int
    length: int
    """Of that micro-batch: rows, tokens with padding, tokens of each row (of all rows if joined)."""
    joined: bool
    live_bytes: int | None
    """Live tensors (on a CPU: growth of the process since the run started); None if unknown."""
    reserved_bytes: int | None
    by_category: Mapping[str, int]
    """Bytes of weights, gradients and optimizer state."""
    free_bytes: int | None
    """Of the device."""
    total_bytes: int | None
    addresses: AddressLimit | None
    """The limit of the address space, if that was exhausted; None if memory was."""
    weights_intact: bool
    """No weight has changed since the last finished step, so training can continue from it."""
    process_status: Mapping[str, int] | None
    """Linux's counters of this process on a CPU; None on a GPU."""


class RunPosition:
    """Tracks step, micro-batch and phase of a run. References model and optimizer to measure them at an error."""

    def __init__(self, device: torch.device, *, updates_in_backward: bool):
        """Create it before the model is loaded: memory in use now is not the run's."""
        self._device, self._counters = device, make_counters(device)
        self._updates_in_backward = updates_in_backward
        self._live_before = self._counters.read().live_bytes
        self._reserve: mmap.mmap | None = mmap.mmap(-1, RESERVE_BYTES)
        self.phase_name = READING
        self.step: int | None = None
        self._number: int | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None

    def set_model(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set model and optimizer once they are loaded."""
        self._model, self._optimizer = model, optimizer

    def start_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        """Record that a step starts."""
        self.step, self._micro_batches, self._number = step, micro_batches, None
        self.phase_name = READING
        if self._reserve is None:
            self._reserve = mmap.mmap(-1, RESERVE_BYTES)

    def free_gradients(self) -> None:
        """Free the gradients of the model, if it is loaded."""
        if self._model is not None:
            self._model.zero_grad(set_to_none=True)

    def __str__(self) -> str:
        """Phase and step, for a message."""
        step = "before the first step" if self.step is None else f"of optimizer step {self.step}"
        return f"in phase {self.phase_name} {step}"

    def tracked(self, phase: Phase) -> Phase:
        """Wrap the step's Phase hook so that this position follows it."""

        @contextmanager
        def tracked_phase(name: str) -> Iterator[None]:
            if name == FORWARD:
                # Rows that are not trained pass through the model before the trained rows of the same micro-batches.
                self._number = 0 if self._number is None else (self._number + 1) % len(self._micro_batches)
            with self.phase(name), phase(name):
                yield

        return tracked_phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the run; an exception leaves the name in place."""
        self.phase_name = name
        yield
        self.phase_name = READING

    def failure(self, error: BaseException) -> OomFailure:
        """Measure memory now; call while the exception is handled."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        counts = self._counters.read()
        cuda = self._device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self._device) if cuda else (None, None)
        one = None if self._number is None else self._micro_batches[self._number]
        message = " ".join(f"{type(error).__name__}: {error}".split())
        requested = requested_bytes(message)
        growth = None if counts.live_bytes is None else counts.live_bytes - (self._live_before or 0)
        return OomFailure(
            message=message,
            requested_bytes=requested,
            phase=self.phase_name,
            step=self.step,
            number=self._number,
            micro_batches=len(self._micro_batches),
            rows=0 if one is None else len(one.rows),
            padded_tokens=0 if one is None else one.padded_tokens,
            length=0 if one is None else one.length,
            joined=one is not None and one.flat,
            live_bytes=growth,
            reserved_bytes=counts.reserved_bytes if cuda else None,
            by_category=self._by_category(),
            free_bytes=free,
            total_bytes=total,
            addresses=None if cuda else address_limit_met(requested),
            weights_intact=self.phase_name in ((FORWARD,) if self._updates_in_backward else (FORWARD, BACKWARD, CLIP)),
            process_status=None if cuda or not STATUS.exists() else process_status(),
        )

    def _by_category(self) -> dict[str, int]:
        """Return bytes on the device of weights, gradients and optimizer state."""
        if self._model is None or self._optimizer is None:
            return {}
        parameters = list(self._model.parameters())
        states = [v for state in self._optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        tensors_by_category = {
            "weights": [*parameters, *self._model.buffers(), *quantisation_tensors(self._model)],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": states,
        }
        sizes = {}
        for name, tensors in tensors_by_category.items():
            storages = [one.untyped_storage() for one in tensors if one.device.type == self._device.type]
            sizes[name] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # Each once.
        return sizes
