"""The monitor's benchmark: every figure is there, and a monitor that hoards breaks its bar."""

import math

import pytest

from benchmarks import monitor
from benchmarks.monitor import KEPT_LIMIT_BYTES, kept_bytes
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import Monitor
from tests.small_model import CPU


@pytest.mark.slow
def test_a_quick_run_measures_every_size(monkeypatch):
    monkeypatch.setattr(monitor, "SIZES", monitor.SIZES[:1])
    monkeypatch.setattr(monitor, "STEPS_A_ROUND", 1)
    measured = monitor.measure(quick=True)
    assert [row["model"] for row in measured.rows] == [size.name for size in monitor.SIZES]
    assert all(math.isfinite(row[key]) for row in measured.rows for key in ("step_ms", "looks_us", "causes_us"))
    assert len(measured.bars) == len(monitor.SIZES) + 1
    assert measured.bars[-1].holds


def test_a_monitor_that_keeps_what_it_sees_breaks_the_bar(monkeypatch):
    """A bar that no leak can break proves nothing."""
    hoard: list[dict] = []
    step = Monitor.step

    def hoarding(self: Monitor) -> dict:
        row = step(self)
        hoard.append(row)
        return row

    monkeypatch.setattr(Monitor, "step", hoarding)
    assert kept_bytes(Monitor(CPU, make_meter(CPU)), 200) > KEPT_LIMIT_BYTES
