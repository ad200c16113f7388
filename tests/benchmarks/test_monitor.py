"""The monitor's benchmark: its figures, and a bar that a monitor which keeps its rows breaks."""

import math

import pytest

from benchmarks import monitor
from benchmarks.monitor import KEPT_LIMIT_BYTES, kept_bytes
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import MemoryMonitor
from tests.small_model import CPU


@pytest.mark.slow
def test_a_quick_run_measures_every_model():
    measured = monitor.measure(quick=True)
    assert [row["model"] for row in measured.rows] == list(monitor.MODELS)
    assert all(math.isfinite(row[key]) for row in measured.rows for key in ("step_ms", "looks_us", "causes_us"))
    assert len(measured.bars) == len(monitor.MODELS) + 1
    assert measured.bars[-1].holds


class LeakingMonitor(MemoryMonitor):
    """A monitor that keeps the row of every step."""

    def step_columns(self) -> dict:
        self.rows = [*getattr(self, "rows", []), super().step_columns()]
        return self.rows[-1]


@pytest.mark.slow
def test_a_monitor_that_keeps_its_rows_breaks_the_bar():
    assert kept_bytes(LeakingMonitor(CPU, make_meter(CPU)), 200) > KEPT_LIMIT_BYTES
    assert kept_bytes(MemoryMonitor(CPU, make_meter(CPU)), 200) < KEPT_LIMIT_BYTES
