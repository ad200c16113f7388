"""Measured peak memory by phase, counted by the device's own allocator and never by the estimate's trace.

On CUDA the caching allocator keeps statistics: every phase of every step is measured. On the CPU torch.profiler reports
each allocation and free of PyTorch's allocator; that is too much to keep for a whole run, so it is on inside windows
only: from before the model is loaded to the end of the first step, then around single steps.
"""

import gc
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

RANGE_PREFIX = "lean_finetune.phase:"
LOAD = "load"
MEMORY_EVENT = "[memory]"
KINETO_SILENT = "99"
"""Above every log level of the profiler, which else prints a line for each start and stop."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Peaks of tensor memory, in bytes; None where the device could not tell."""

    peak_bytes: int | None
    peak_bytes_by_phase: Mapping[str, int]
    """Only phases that were measured."""
    peak_reserved_bytes: int | None
    """What the caching allocator held from the device, CUDA only."""
    how: str
    """What counted, for people."""
    peak_bytes_by_rank: tuple[int, ...] = ()
    """Of each of several processes, over all phases but loading; the other figures are the most of any."""


class Meter(ABC):
    """Measures while a run goes on."""

    @abstractmethod
    def window(self, name: str) -> AbstractContextManager[None]:
        """Measure inside: around loading and the first step, then around single whole steps.

        Raises:
            RuntimeError: a window is open already.
        """

    @abstractmethod
    def phase(self, name: str) -> AbstractContextManager[object]:
        """Name what happens inside: `load`, and the step's Phase hook. Next to free outside windows."""

    @abstractmethod
    def peak_bytes_of_step(self) -> int | None:
        """The peak of all phases but `load` since the last call; None if none was measured. Call after a window."""

    @abstractmethod
    def result(self) -> Measured:
        """What was measured so far."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What was measured so far, as JSON can hold it; call between steps, outside windows."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what the `state` of another process was: its peaks stand beside those measured from here on."""


class PhasePeaks:
    """The highest figure of each phase, and of the step that is running."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.by_phase: dict[str, int] = {}
        self._step: int | None = None

    def add(self, phase: str, held_bytes: int) -> None:
        """Take note of bytes held in a phase."""
        self.by_phase[phase] = max(self.by_phase.get(phase, 0), held_bytes)
        if phase != LOAD:
            self._step = max(self._step or 0, held_bytes)

    def merge(self, by_phase: Mapping[str, int]) -> None:
        """Take note of what was held before, which is of no step that runs now."""
        for phase, held_bytes in by_phase.items():
            self.by_phase[phase] = max(self.by_phase.get(phase, 0), held_bytes)

    def take_step(self) -> int | None:
        """The highest figure since the last call, loading apart."""
        step, self._step = self._step, None
        return step


def make_meter(device: torch.device) -> Meter:
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


class CudaMeter(Meter):
    """Reads the statistics of CUDA's caching allocator, everywhere; windows change nothing."""

    def __init__(self, device: torch.device):
        """Start counting on `device`."""
        torch.cuda.init()  # Without it there are no statistics to reset yet.
        self._device = device
        self._peak = self._reserved = 0
        self._peaks = PhasePeaks()

    def window(self, name: str) -> AbstractContextManager[None]:
        """Nothing to open: the statistics are always on."""
        return nullcontext()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Peak of this phase alone; allocations are made by the host, so no synchronisation is needed."""
        self._take_peak()
        try:
            yield
        finally:
            self._peaks.add(name, self._take_peak())

    def _take_peak(self) -> int:
        """The peak since the last call."""
        # As max_memory_allocated, which first flattens and sorts more than a hundred other figures.
        peak = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"]
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = max(self._peak, peak)
        return peak

    def peak_bytes_of_step(self) -> int | None:
        """The peak of all phases but `load` since the last call."""
        return self._peaks.take_step()

    def result(self) -> Measured:
        """What was measured so far."""
        self._take_peak()
        return Measured(
            peak_bytes=self._peak,
            peak_bytes_by_phase=dict(self._peaks.by_phase),
            # Never reset: segments are kept, so what is reserved now is the most so far unless memory ran out.
            peak_reserved_bytes=max(self._reserved, torch.cuda.memory_reserved(self._device)),
            how="statistics of CUDA's caching allocator, every step",
        )

    def state(self) -> dict[str, Any]:
        """The peaks."""
        now = self.result()
        return {"peak": now.peak_bytes, "by_phase": now.peak_bytes_by_phase, "reserved": now.peak_reserved_bytes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The same peaks, unless loading held more this time."""
        self._peak, self._reserved = max(self._peak, state["peak"]), state["reserved"]
        self._peaks.merge(state["by_phase"])


@contextmanager
def memory_profile() -> Iterator[Any]:
    """A torch.profiler.profile that records what PyTorch's allocator does on the CPU; to be read after the block."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with warnings.catch_warnings():
        # torch 2.11 warns of a second cycle, which no profile has here.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


class CpuMeter(Meter):
    """Adds up the profiler's memory events inside windows.

    A window begins with the bytes held at the end of the one before: steps leave nothing behind but optimizer state,
    which exists before the first step.
    """

    def __init__(self) -> None:
        """Nothing is held yet: open the first window before the model is loaded."""
        self._held = 0
        self._peak: int | None = None
        self._peaks = PhasePeaks()
        self._open: str | None = None
        self._windows = 0

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Measure inside."""
        if self._open is not None:
            raise RuntimeError(f"window {name!r} opened inside window {self._open!r}")
        os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_SILENT)
        self._open = name
        gc.freeze()  # The collection below then passes over all that was there before, which took it 0.26 s a window.
        try:
            with memory_profile() as profiler:
                yield
            self._windows += 1
            self._count(profiler.profiler.kineto_results.events())
            # A profile holds itself in a cycle, with some 2 KB for each of its events: do not wait for the collector.
            del profiler
            gc.collect()
        finally:
            self._open = None
            gc.unfreeze()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A range in the profile, or nothing outside windows."""
        return record_function(RANGE_PREFIX + name) if self._open is not None else nullcontext()

    def _count(self, events: list) -> None:
        """Add up a window's allocations and frees in the order of time, and keep the highest sums."""
        # At one instant a phase begins before, and ends after, what is allocated in it.
        timeline: list[tuple[int, int, int, str]] = []
        for event in events:
            name = event.name()
            if name == MEMORY_EVENT:
                timeline.append((event.start_ns(), 1, event.nbytes(), ""))
            elif name.startswith(RANGE_PREFIX):
                phase = name.removeprefix(RANGE_PREFIX)
                timeline.append((event.start_ns(), 0, 0, phase))
                timeline.append((event.start_ns() + event.duration_ns(), 2, 0, phase))
        timeline.sort(key=lambda entry: entry[:2])
        inside: list[str] = []
        for _, kind, change, phase in timeline:
            self._held += change
            if kind == 0:
                inside.append(phase)
            elif kind == 2:
                inside.remove(phase)
            self._peak = max(self._peak or 0, self._held)
            for name in inside:
                self._peaks.add(name, self._held)

    def peak_bytes_of_step(self) -> int | None:
        """The peak of all phases but `load` in the windows closed since the last call, or None."""
        return self._peaks.take_step()

    def result(self) -> Measured:
        """What was measured so far."""
        return Measured(
            peak_bytes=self._peak,
            peak_bytes_by_phase=dict(self._peaks.by_phase),
            peak_reserved_bytes=None,
            how=f"torch.profiler's memory events of PyTorch's CPU allocator, in {self._windows} windows",
        )

    def state(self) -> dict[str, Any]:
        """The peaks, and what was held at the end of the last window."""
        return {
            "held": self._held,
            "peak": self._peak,
            "by_phase": dict(self._peaks.by_phase),
            "windows": self._windows,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The same; what is held now is what was held then, since the same tensors were put back.

        No window may have been opened before: what this process holds was allocated outside all of them, and would
        count twice.

        Raises:
            RuntimeError: something was measured already.
        """
        if self._windows or self._open is not None:
            raise RuntimeError("a meter that measured already cannot go on from another one's figures")
        self._held, self._peak, self._windows = state["held"], state["peak"], state["windows"]
        self._peaks.merge(state["by_phase"])
