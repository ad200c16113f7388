"""Measure peak memory by phase with the device's allocator, independently of the prediction.

On CUDA the statistics of the caching allocator cover every phase of every step. On the CPU torch.profiler records each
allocation and free of PyTorch's allocator. That is too much data for a run, so it is on inside windows only:
from before loading to the end of the first step, then around single steps.
"""

import gc
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lean_finetune.distributed.processes import ControlChannel

RANGE_PREFIX = "lean_finetune.phase:"
LOAD = "load"
MEMORY_EVENT = "[memory]"
GLOO_NOTE = "; too high, because buffers that gloo frees in its own threads are not seen"
KINETO_SILENT = "99"
"""Above every log level of the profiler, which prints a line for each start and stop otherwise."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPeaks:
    """Peaks of tensor memory, in bytes; None if the device cannot measure."""

    peak_bytes: int | None
    peak_bytes_by_phase: Mapping[str, int]
    """Only phases that were measured."""
    peak_reserved_bytes: int | None
    """Reserved by the caching allocator, CUDA only."""
    how: str
    """How it was measured, for people."""
    peak_bytes_by_rank: tuple[int, ...] = ()
    """Peak of each of several processes without loading; the other figures are the largest of any process."""

    @property
    def step_peak_bytes(self) -> int | None:
        """The peak of all phases but `load`, which is what the prediction is of; None if not measured."""
        return max((size for phase, size in self.peak_bytes_by_phase.items() if phase != LOAD), default=None)


def largest_over_ranks(measured: MeasuredPeaks, channel: ControlChannel) -> MeasuredPeaks:
    """Return the largest of each figure over all processes: what every GPU must have room for."""
    if channel.size == 1:
        return measured
    by_rank = [MeasuredPeaks(**json.loads(text)) for text in channel.gather_text(json.dumps(asdict(measured)))]

    def largest(figures: Iterable[int | None]) -> int | None:
        return max((figure for figure in figures if figure is not None), default=None)

    phases, note = measured.peak_bytes_by_phase, GLOO_NOTE if channel.device.type == "cpu" else ""
    return MeasuredPeaks(
        peak_bytes=largest(one.peak_bytes for one in by_rank),
        peak_bytes_by_phase={name: max(one.peak_bytes_by_phase[name] for one in by_rank) for name in phases},
        peak_reserved_bytes=largest(one.peak_reserved_bytes for one in by_rank),
        how=f"{measured.how}; the largest of {channel.size} processes{note}",
        peak_bytes_by_rank=tuple(one.step_peak_bytes for one in by_rank if one.step_peak_bytes is not None),
    )


class Meter(ABC):
    """Measures peaks of a running training: of each phase, and of the current step."""

    def __init__(self) -> None:
        self._by_phase: dict[str, int] = {}
        self._step: int | None = None
        self._peak: int | None = None

    def window(self, name: str) -> AbstractContextManager[None]:
        """Measure inside: loading and the first step, then single steps. Raises RuntimeError if one is open."""
        return nullcontext()

    @abstractmethod
    def phase(self, name: str) -> AbstractContextManager[object]:
        """Name a phase: `load`, or a phase of the step. Nearly free outside windows."""

    @abstractmethod
    def result(self) -> MeasuredPeaks:
        """Return what was measured so far."""

    def state(self) -> dict[str, Any]:
        """Return what was measured so far as JSON values; call between steps, outside windows."""
        return {"peak": self._peak, "by_phase": dict(self._by_phase)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier process of the run."""
        self._peak = max((peak for peak in (self._peak, state["peak"]) if peak is not None), default=None)
        for phase, size_bytes in state["by_phase"].items():
            self._by_phase[phase] = max(self._by_phase.get(phase, 0), size_bytes)

    def peak_bytes_of_step(self) -> int | None:
        """Return the peak since the last call without `load`; None if not measured. Call after a window."""
        step, self._step = self._step, None
        return step

    def _add(self, phase: str, size_bytes: int) -> None:
        """Record a size in a phase of the current step."""
        self._by_phase[phase] = max(self._by_phase.get(phase, 0), size_bytes)
        if phase != LOAD:
            self._step = max(self._step or 0, size_bytes)


def make_meter(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


class CudaMeter(Meter):
    """Reads the statistics of CUDA's caching allocator; they are always on, so windows do nothing."""

    def __init__(self, device: torch.device):
        super().__init__()
        torch.cuda.init()  # Without it there are no statistics to reset yet.
        self._device = device
        self._reserved = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure this phase only; the host allocates, so no synchronisation is needed."""
        # This resets the peak, which so far is that of what came before.
        self._take_peak()
        try:
            yield
        finally:
            self._add(name, self._take_peak())

    def _take_peak(self) -> int:
        """Return the peak since the last call."""
        # Same as max_memory_allocated, which first flattens and sorts more than a hundred other figures.
        peak = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"]
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = max(self._peak or 0, peak)
        return peak

    def result(self) -> MeasuredPeaks:
        """See Meter."""
        self._take_peak()
        return MeasuredPeaks(
            peak_bytes=self._peak,
            peak_bytes_by_phase=dict(self._by_phase),
            # Never reset: segments stay reserved, so the current value is the peak unless memory ran out.
            peak_reserved_bytes=max(self._reserved, torch.cuda.memory_reserved(self._device)),
            how="statistics of CUDA's caching allocator, every step",
        )

    def state(self) -> dict[str, Any]:
        """See Meter."""
        reserved = self.result().peak_reserved_bytes
        return {**super().state(), "reserved": reserved}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See Meter."""
        super().restore(state)
        self._reserved = state["reserved"]


@contextmanager
def memory_profile() -> Iterator[Any]:
    """Record what PyTorch's allocator does on the CPU; read the profile after the block."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with warnings.catch_warnings():
        # torch 2.11 warns about a second cycle, which these profiles do not have.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


class CpuMeter(Meter):
    """Adds up the profiler's memory events inside windows.

    A window starts with the bytes in use at the end of the previous one: steps leave nothing behind but optimizer
    state, which exists before the first step.
    """

    def __init__(self) -> None:
        """Start at 0 bytes: open the first window before the model is loaded."""
        super().__init__()
        self._in_use = 0
        self._open: str | None = None
        self._windows = 0

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """See Meter."""
        if self._open is not None:
            raise RuntimeError(f"window {name!r} opened inside window {self._open!r}")
        os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_SILENT)
        self._open = name
        # The collection below then skips existing objects, which takes 0.26 s a window otherwise.
        freezes = gc.get_freeze_count() == 0
        if freezes:
            gc.freeze()
        try:
            with memory_profile() as profiler:
                yield
            self._windows += 1
            self._count(profiler.profiler.kineto_results.events())
            # A profile references itself, with about 2 KB per event: do not wait for the collector.
            del profiler
            gc.collect()
        finally:
            self._open = None
            if freezes:
                gc.unfreeze()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a range in the profile; do nothing outside windows."""
        return record_function(RANGE_PREFIX + name) if self._open is not None else nullcontext()

    def _count(self, events: list) -> None:
        """Add up a window's allocations and frees in time order, and record the highest sums."""
        # At equal times a phase starts before the allocations inside it, and ends after them.
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
            self._in_use += change
            if kind == 0:
                inside.append(phase)
            elif kind == 2:
                inside.remove(phase)
            self._peak = max(self._peak or 0, self._in_use)
            for name in inside:
                self._add(name, self._in_use)

    def result(self) -> MeasuredPeaks:
        """Return what was measured so far."""
        return MeasuredPeaks(
            peak_bytes=self._peak,
            peak_bytes_by_phase=dict(self._by_phase),
            peak_reserved_bytes=None,
            how=f"torch.profiler's memory events of PyTorch's CPU allocator, in {self._windows} windows",
        )

    def state(self) -> dict[str, Any]:
        """See Meter; with the bytes in use at the end of the last window."""
        return {"in_use": self._in_use, **super().state(), "windows": self._windows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore peaks and bytes in use: the same tensors were restored.

        Raises:
            RuntimeError: something was measured already, whose allocations would count twice.
        """
        if self._windows or self._open is not None:
            raise RuntimeError("a meter that has measured cannot restore the figures of another one")
        super().restore(state)
        self._in_use, self._windows = state["in_use"], state["windows"]
