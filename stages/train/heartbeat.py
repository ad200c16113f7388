"""A run that the kernel kills cannot speak: a small file says how far it was, and the next run reads it.

Every process has a file of its own, removed when the process ends by itself, whether well or by a fault. What is left
is of one that was killed, that crashed, or whose machine went down.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from stages.files import told_in_one_line
from stages.memory_group import FILESYSTEM, oom_kills
from stages.units import readable_size

SECONDS = 1.0
"""Least time between two writes: each takes about 0.1 ms."""
BOOT_ID = "proc/sys/kernel/random/boot_id"
"""Linux: another one after every start of the machine."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What the file holds."""

    pid: int
    started: float
    """When the process began, by the system: numbers of processes come again."""
    host: str
    boot: str | None
    """Of the machine's start; None where the system does not number them."""
    oom_kills: int | None
    """Processes of this group that the kernel had ended for want of memory when the run began."""
    step: int | None
    """The optimizer step that was begun last; None before the first."""
    rss_bytes: int


class Heartbeat:
    """Writes the file of this process."""

    def __init__(self, directory: Path, told: Callable[[str], None], root: Path, clock: Callable[[], float]):
        """Write below `directory`; `told` gets a line if the disk refuses."""
        self.path = directory / f"{os.getpid()}.json"
        self._told, self._clock = told, clock
        self._process = psutil.Process()
        self._kills, self._boot = oom_kills(root), _boot(root)
        self._due = clock()
        self.begun(None)

    def begun(self, step: int | None) -> None:
        """A step begins; written where the last write is long enough ago."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + SECONDS
        pulse = Pulse(
            pid=self._process.pid,
            started=self._process.create_time(),
            host=platform.node(),
            boot=self._boot,
            oom_kills=self._kills,
            step=step,
            rss_bytes=self._process.memory_info().rss,
        )
        aside = self.path.with_suffix(".partial")
        try:
            aside.write_text(json.dumps(asdict(pulse)), encoding="ascii")
            os.replace(aside, self.path)
        except OSError as error:  # No reason to end a training; but the next run will know less.
            self._due = float("inf")
            self._told(f"warning: {self.path}: cannot be written ({error.strerror}); training goes on")

    def close(self) -> None:
        """The process ends by itself."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".partial").unlink(missing_ok=True)


@contextmanager
def heartbeat(
    directory: Path,
    told: Callable[[str], None],
    *,
    tells: bool = True,
    root: Path = FILESYSTEM,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Heartbeat]:
    """Tell of runs that ended without a word, then be one that can be told of.

    Args:
        directory: of the files of all processes.
        told: gets a line of each such run.
        tells: whether this process looks for such runs; of several on a machine the first one does.
        root: where the file system begins.
        clock: seconds that never jump.

    Raises:
        UserError: the disk refused.
    """
    with told_in_one_line(directory):
        directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(directory.glob("*.json")) if tells else ():
        _tell_of(path, told, root)
    beats = Heartbeat(directory, told, root, clock)
    try:
        yield beats
    finally:
        beats.close()


def _tell_of(path: Path, told: Callable[[str], None], root: Path) -> None:
    """Tell of the run that left a file, and remove that; one that goes on, or is on another machine, is left alone."""
    with suppress(FileNotFoundError):  # Its process ended by itself in between.
        text = path.read_text(encoding="ascii", errors="replace")
        try:
            pulse = Pulse(**json.loads(text))
        except (ValueError, TypeError):  # It is not flushed to the disk, which may go down with the machine.
            path.unlink()
            told(f"note: a run of training ended without a word; {path}, where it said how far it was, is damaged")
            return
        if pulse.host == platform.node() and not _runs(pulse, root):
            path.unlink()
            told(last_words(pulse, root))


def _runs(pulse: Pulse, root: Path) -> bool:
    """Whether the process of a file is still there."""
    if pulse.boot != _boot(root):
        return False
    try:
        return psutil.Process(pulse.pid).create_time() == pulse.started
    except psutil.NoSuchProcess:
        return False


def last_words(pulse: Pulse, root: Path = FILESYSTEM) -> str:
    """What a run that ended without a word would have said, as far as that can be known."""
    where = "while it loaded" if pulse.step is None else f"at optimizer step {pulse.step}, or soon after"
    told = f"note: a run of training ended {where} without a word, with {readable_size(pulse.rss_bytes)} of RAM: "
    if pulse.boot != _boot(root):
        return f"{told}this machine was started anew since"
    kills = oom_kills(root)
    if kills is None or pulse.oom_kills is None:
        return f"{told}it was killed or it crashed; the system does not say whether memory had ended"
    ended = kills - pulse.oom_kills
    if ended > 0:
        return (
            f"{told}the kernel has since ended {ended} process(es) of this container for want of RAM, very likely this "
            "one; raise its limit, or lower what the run holds (host_bytes_predicted in metrics/estimate.json)"
        )
    return f"{told}it was killed or it crashed; for want of RAM the kernel has ended no process of this container since"


def _boot(root: Path) -> str | None:
    """Which start of the machine this is; None where the system does not say."""
    file = root / BOOT_ID
    return file.read_text(encoding="ascii").strip() if file.is_file() else None
