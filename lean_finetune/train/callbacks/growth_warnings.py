"""Warn during training when memory grows, with cause and remedy."""

import sys

from tqdm import tqdm

from lean_finetune.core.memory_limits import free_host_bytes
from lean_finetune.train.callbacks.callback import Callback, Row
from lean_finetune.train.monitor.growth import OWN, RESIDENT
from lean_finetune.train.monitor.growth_advice import GrowthWatch, growth_line
from lean_finetune.train.monitor.memory_counters import make_counters


class GrowthWarnings(Callback):
    """Writes one line to stderr for each cause of growth."""

    def on_start(self) -> None:
        """Start without warnings."""
        self._watch = GrowthWatch()
        self._counters = make_counters(self.info.device)

    def on_step(self, row: Row) -> None:
        """Check the curves if a check is due."""
        for growth in self._watch.check(self.info.curves):
            line = growth_line(growth, self.info.curves, self._free_bytes, self.info.parameters)
            tqdm.write(f"warning: {line}", file=sys.stderr)

    def _free_bytes(self, series: str) -> int:
        """Return the memory that is left for a series."""
        return free_host_bytes()[0] if series in (OWN, RESIDENT) else self._counters.left_bytes()
