"""A run that the kernel kills cannot speak: a small file says how far it was, and the next run reads it.

Every process has a directory with the file and a lock, removed when the process ends by itself, whether well or by a
fault. One whose lock is free is of a process that was killed, that crashed, or whose machine went down. Process numbers
say nothing here: containers that share the disk, and even a host name, have the same ones.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import psutil

from lean_finetune.core.atomic_files import told_in_one_line
from lean_finetune.core.file_locks import clear, hold, leave
from lean_finetune.core.memory_limits import FILESYSTEM, oom_kills
from lean_finetune.core.units import readable_size

SECONDS = 1.0
"""Least time between two writes: each takes about 0.1 ms."""
FILE = "pulse.json"
BOOT_ID = "proc/sys/kernel/random/boot_id"
"""Linux: another one after every start of the machine."""


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What the file holds."""

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
        """Write to the process's `directory`; `told` gets a line if the disk refuses."""
        self.path = directory / FILE
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

    def forget(self) -> None:
        """The process ends by itself at once, without leaving any block."""
        self.path.unlink(missing_ok=True)


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
    own = directory / uuid4().hex[:8]
    with told_in_one_line(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for other in sorted(directory.iterdir()) if tells else ():
            if other.is_dir():
                _tell_of(other, told, root)
        held = hold(own)
    assert held is not None, "nobody else knows its name"
    try:
        yield Heartbeat(own, told, root, clock)
    finally:
        clear(own)
        leave(own, held)


def _tell_of(directory: Path, told: Callable[[str], None], root: Path) -> None:
    """Tell of the run that left a directory, and remove that; one that goes on, or was on another machine, stays."""
    held = hold(directory)
    if held is None:
        return
    try:
        pulse = _read(directory / FILE)
        if pulse is None or pulse.host == platform.node():
            clear(directory)
            told(
                f"note: a run of training ended without a word; {directory}, where it said how far it was, is damaged"
                if pulse is None
                else last_words(pulse, root)
            )
    except FileNotFoundError:  # It ended before its first word, or by itself just now.
        pass
    finally:
        leave(directory, held)


def _read(path: Path) -> Pulse | None:
    """What a file holds; None where it is damaged: it is not flushed to the disk, which may go down with the machine.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        return Pulse(**json.loads(path.read_text(encoding="ascii", errors="replace")))
    except (ValueError, TypeError):
        return None


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
            "one; raise its limit, or lower what the run holds (host_bytes_predicted in data/estimate/figures.json)"
        )
    return f"{told}it was killed or it crashed; for want of RAM the kernel has ended no process of this container since"


def _boot(root: Path) -> str | None:
    """Which start of the machine this is; None where the system does not say."""
    file = root / BOOT_ID
    return file.read_text(encoding="ascii").strip() if file.is_file() else None
