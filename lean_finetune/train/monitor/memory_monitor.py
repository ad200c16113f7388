"""Memory as it moves while a run goes on: after every phase, and a row of the curves after every step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.core.units import readable_size
from lean_finetune.train.monitor.growth import OWN, RESIDENT, RETRIES, Rows
from lean_finetune.train.monitor.growth_advice import GrowthWatch, Settings, growth_line
from lean_finetune.train.monitor.measured_peak import Meter
from lean_finetune.train.monitor.memory_counters import Resident, make_counters

MEMORY_COLUMNS = (
    "allocated_bytes",
    "held_bytes",
    "held_reserved_bytes",
    "alloc_retries",
    "rss_bytes",
    "rss_own_bytes",
    "pinned_bytes",
)
"""Of the curves. Peak of the step by the meter (None where not measured), then what was there when the step ended:
tensors, allocator, its retries in the step, process, process without mapped files, page-locked."""


@dataclass(kw_only=True)
class PhaseMemory:
    """The most that was there at the ends of a phase; None where nothing counts it."""

    reserved_bytes: int | None = None
    unused_bytes: int | None = None
    """Reserved and not held."""
    alloc_retries: int | None = None
    """Since the phase before, all of them together."""
    rss_bytes: int = 0


class Monitor:
    """Watches one run. It keeps a few figures a phase; what it knows of steps is in their rows alone."""

    def __init__(self, device: torch.device, meter: Meter):
        """Watch a run on `device` whose peaks `meter` measures."""
        self._meter = meter
        self._counters = make_counters(device)
        self._resident = Resident()
        self._phases: dict[str, PhaseMemory] = {}
        self._retries_at_phase = self._retries_at_step = self._counters.read().retries
        self._growth = GrowthWatch()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """The step's Phase hook: measured by the meter, then looked at as it ends."""
        return self._watched(name)

    @contextmanager
    def _watched(self, name: str) -> Iterator[None]:
        with self._meter.phase(name):
            yield
        self._look(name)

    def _look(self, name: str) -> None:
        """Take note of what is there as a phase ends."""
        known = self._phases.setdefault(name, PhaseMemory())
        held = self._counters.read()
        if held.reserved_bytes is not None and held.held_bytes is not None:
            known.reserved_bytes = max(known.reserved_bytes or 0, held.reserved_bytes)
            known.unused_bytes = max(known.unused_bytes or 0, held.reserved_bytes - held.held_bytes)
        if held.retries is not None:
            known.alloc_retries = (known.alloc_retries or 0) + _since(self._retries_at_phase, held.retries)
        self._retries_at_phase = held.retries
        known.rss_bytes = max(known.rss_bytes, self._resident.read())

    def step(self) -> dict[str, int | None]:
        """What the curves say of memory at the end of a step; call once a step, after the meter's window."""
        held = self._counters.read()
        rss, own = self._resident.read_both()
        retries = None if held.retries is None else _since(self._retries_at_step, held.retries)
        self._retries_at_step = held.retries
        return {
            "allocated_bytes": self._meter.peak_bytes_of_step(),
            "held_bytes": held.held_bytes,
            "held_reserved_bytes": held.reserved_bytes,
            "alloc_retries": retries,
            "rss_bytes": rss,
            "rss_own_bytes": own,
            "pinned_bytes": self._counters.pinned_bytes(),
        }

    def tell_growth(self, curves: Rows, settings: Settings, say: Callable[[str], object]) -> None:
        """Say why memory grows, each cause once, when it is sure; looks at the rows now and then only."""
        for growth in self._growth.look(curves):
            say(f"warning: {growth_line(growth, curves, self._left_bytes, settings)}")

    def _left_bytes(self, series: str) -> int:
        """Memory that a series can still grow into."""
        return free_host_bytes()[0] if series in (OWN, RESIDENT) else self._counters.left_bytes()

    def by_phase(self) -> dict[str, dict[str, int | None]]:
        """The most seen at the ends of each phase, for the metrics."""
        return {name: asdict(memory) for name, memory in self._phases.items()}

    def restore(self, by_phase: Mapping[str, Mapping[str, int | None]]) -> None:
        """Add what an earlier process of the same run saw; call before the first step."""
        for name, seen in by_phase.items():
            known = self._phases.setdefault(name, PhaseMemory())
            for key, figure in seen.items():
                if figure is not None:
                    of_both = (getattr(known, key) or 0, figure)
                    setattr(known, key, sum(of_both) if key == RETRIES else max(of_both))


def _since(before: int | None, now: int) -> int:
    """How far a count has come."""
    return now - (before or 0)


def memory_text(row: dict[str, Any]) -> str:
    """Memory of a step for the progress bar, as far as it is known."""
    named = (("peak", "allocated_bytes"), ("held", "held_bytes"), ("reserved", "held_reserved_bytes"))
    known = [(name, row[column]) for name, column in (*named, ("rss", "rss_bytes"))]
    texts = [f"{name} {readable_size(size)}" for name, size in known if size is not None]
    return ", ".join(texts + ([f"{row['alloc_retries']} retries"] if row["alloc_retries"] else []))
