"""Warn when steps become much slower, as when another training takes the same cores."""

import os
import sys
from collections import deque
from statistics import median

from tqdm import tqdm

from lean_finetune.train.callbacks.callback import Callback, Row

WINDOW = 5
"""Steps whose median speed counts."""
SLOWER = 10.0


class SlowSteps(Callback):
    """Writes one line to stderr when steps take `SLOWER` times as long per token as at the start of this process."""

    def on_start(self) -> None:
        """Start without speeds."""
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._steps, self._warned = 0, False

    def on_step(self, row: Row) -> None:
        """Compare the last steps with the first ones, without the very first, which also loads kernels."""
        self._steps += 1
        if self._steps == 1 or self._warned:
            return
        seconds = row["seconds"] / row["padded_tokens"]
        if len(self._first) < WINDOW:
            self._first.append(seconds)
            return
        self._last.append(seconds)
        ratio = median(self._last) / median(self._first)
        if len(self._last) == WINDOW and ratio >= SLOWER:
            self._warned = True
            tqdm.write(
                f"warning: steps take {ratio:.0f} times as long as at the start. {os.cpu_count()} cores have a load of "
                f"{os.getloadavg()[0]:.1f}: if `top` or `nvidia-smi` shows another program, stop it or train later",
                file=sys.stderr,
            )
