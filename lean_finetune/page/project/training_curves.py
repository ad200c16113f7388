"""The figures of the steps that training has finished here, while it trains and after it."""

import csv
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.atomic_files import FIGURES, read_json
from lean_finetune.core.errors import UserError

UNFINISHED, FINISHED = Path("scratch/train"), Path("data/train/curves.csv")
ESTIMATE, BATCHES = Path("data/estimate") / FIGURES, Path("data/batches") / FIGURES
Step = dict[str, str]


@dataclass
class _Read:
    """A file that is read as it grows."""

    path: Path
    inode: int
    position: int
    header: list[str]
    steps: list[Step]


class LiveCurves:
    """Reads curves.csv of this directory's training. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: _Read | None = None
        self.written = 0.0
        """When the training that wrote last did so, in seconds since the epoch."""

    def steps(self, since: float) -> Sequence[Step]:
        """The steps of the training that wrote last, without a damaged line; empty if none did since that time."""
        with self._lock:
            try:
                path = max((FINISHED, *UNFINISHED.glob("*/curves.csv")), key=_changed)
                self.written = _changed(path)
                return self._grown(path) if self.written >= max(since, 1.0) else ()
            except OSError:  # A stage has just removed it.
                return ()

    def _grown(self, path: Path) -> list[Step]:
        status = path.stat()
        read = self._read
        if read is None or (read.path, read.inode) != (path, status.st_ino) or status.st_size < read.position:
            read = self._read = _Read(path=path, inode=status.st_ino, position=0, header=[], steps=[])
        with path.open("rb") as file:
            file.seek(read.position)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]  # A line that is being written is read next time.
        read.position += len(text)
        for cells in csv.reader(text.decode("utf-8", errors="replace").splitlines()):
            if not read.header:
                read.header = cells
            elif (step := _step(read.header, cells)) is not None:
                read.steps.append(step)
        return read.steps


def _step(header: list[str], cells: list[str]) -> Step | None:
    """A line of the file; None if a figure that is drawn is no finite number."""
    step = dict(zip(header, cells, strict=False))
    drawn = ("step", "loss", "heldout_loss", "allocated_bytes", "live_bytes", "reserved_bytes", "tokens", "seconds")
    try:
        is_whole = int(step["step"]) >= 0 and all(math.isfinite(float(step[name])) for name in drawn if step.get(name))
    except (KeyError, ValueError):
        return None
    return step if is_whole and step.get("loss") else None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def predicted_peak_bytes() -> int | None:
    """The prediction of the last stage `estimate`; None while there is none."""
    return _figure(ESTIMATE, "peak_bytes_predicted")


def planned_steps() -> int | None:
    """Optimizer steps of the plan; None while there is none."""
    return _figure(BATCHES, "optimizer_steps")


def _figure(path: Path, name: str) -> int | None:
    try:
        found = read_json(path)
    except UserError:
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, int) and value > 0 else None
