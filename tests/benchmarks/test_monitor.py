"""The bar of the monitor's benchmark that a monitor with growing memory breaks."""

import pytest

from benchmarks.monitor import RETAINED_LIMIT_BYTES, retained_bytes
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import MemoryMonitor
from tests.small_model import CPU


class LeakingMonitor(MemoryMonitor):
    """A monitor that stores the row of every step."""

    def step_columns(self) -> dict:
        self.rows = [*getattr(self, "rows", []), super().step_columns()]
        return self.rows[-1]


@pytest.mark.slow
def test_a_monitor_that_stores_its_rows_breaks_the_bar():
    assert retained_bytes(LeakingMonitor(CPU, make_meter(CPU)), 200) > RETAINED_LIMIT_BYTES
    assert retained_bytes(MemoryMonitor(CPU, make_meter(CPU)), 200) < RETAINED_LIMIT_BYTES
