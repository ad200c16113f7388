"""Warn during training when memory grows, with cause and remedy."""

import sys

from tqdm import tqdm

from cuda_memory.growth import OWN, RESIDENT, Cause, classify
from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.train.callbacks.callback import Callback, Row
from lean_finetune.train.monitor.growth_advice import check_is_due, growth_line
from lean_finetune.train.monitor.memory_monitor import make_counters


class GrowthWarnings(Callback):
    """Writes one line to stderr for each cause of growth, once in a process."""

    def on_start(self) -> None:
        """Start without warnings."""
        self._reported: set[Cause] = {"jump", "steady", "unclear", "too_short"}
        self._counters = make_counters(self.info.device)

    def on_step(self, row: Row) -> None:
        """Check the curves if a check is due."""
        if not check_is_due(len(self.info.curves)):
            return
        for growth in classify(self.info.curves):
            if growth.cause not in self._reported:
                on_host = growth.series in (OWN, RESIDENT)
                free = free_host_bytes()[0] if on_host else self._counters.left_bytes()
                line = growth_line(growth, self.info.curves, free, self.info.parameters)
                tqdm.write(f"warning: {line}", file=sys.stderr)
            self._reported.add(growth.cause)
