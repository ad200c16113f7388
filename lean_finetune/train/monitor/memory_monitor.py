"""Record memory during a run: after every phase, and as columns of the curves after every step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from cuda_memory.growth import RETRIES
from lean_finetune.train.monitor.measured_peak import Meter
from lean_finetune.train.monitor.memory_counters import make_counters, process_bytes

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
