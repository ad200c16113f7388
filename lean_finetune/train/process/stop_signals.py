"""How a run ends: stop signals, crashes, and output that cannot be written."""

import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeVar, cast
from uuid import uuid4

import psutil

from cuda_memory.units import readable_size
from lean_finetune.core.atomic_files import write_errors
from lean_finetune.core.file_locks import clear, lock_directory, unlock_directory
from lean_finetune.core.memory_limits import FILESYSTEM, oom_kills
from lean_finetune.core.signals import PARENT_ENDED, Interrupted
from lean_finetune.train.oom.oom_handler import RunPosition

WRITE_ERRORS = (OSError, ValueError)
"""A ValueError is raised by a closed stream, and by one that cannot encode a character."""


class BestEffortStream:
    """A text stream that ignores write errors, as the handlers of `logging` do.

    Output files are written elsewhere, and their write errors do end the run.
    """

    def __init__(self, stream: TextIO | None):
        """Write to `stream`; None if it was closed before the process started."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Try to write; always return the number of characters."""
        if self._stream is not None:
            with suppress(*WRITE_ERRORS):
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Try to flush."""
        if self._stream is not None:
            with suppress(*WRITE_ERRORS):
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Delegate to the stream: a progress bar inspects its terminal."""
        return getattr(self._stream, name)


def ignore_output_errors() -> None:
    """Replace stdout and stderr for the rest of the process, including the interpreter's last flush."""
    sys.stdout, sys.stderr = cast(TextIO, BestEffortStream(sys.stdout)), cast(TextIO, BestEffortStream(sys.stderr))


# Record the last step of each training process, so that the next run can report one that was killed.
#
# Each process has a directory with a small file and a lock. The process removes it when it ends by itself, also after
# an error. A directory whose lock is free belongs to a process that was killed or crashed, or whose machine went down.
# Process ids would not do: containers that share the disk, even with the same host name, use the same ones.

WRITE_SECONDS = 1.0
"""Least time between two writes; each takes about 0.1 ms."""
FILE = "last_step.json"
BOOT_ID = "proc/sys/kernel/random/boot_id"
"""Linux: changes at every start of the machine."""


@dataclass(frozen=True, kw_only=True)
class LastStep:
    """Content of the file."""

    host: str
    boot: str | None
    """Boot id of the machine; None where the system has none."""
    oom_kills: int | None
    """Processes of this container that the kernel's OOM killer had ended when the run started."""
    step: int | None
    """Optimizer step that started last; None before the first."""
    rss_bytes: int


class CrashMarker:
    """Writes the file of this process."""

    def __init__(self, directory: Path, notify: Callable[[str], None], root: Path, clock: Callable[[], float]):
        """Write to `directory`; `notify` gets a line if the disk refuses."""
        self.path = directory / FILE
        self._notify, self._clock = notify, clock
        self._process = psutil.Process()
        self._kills, self._boot = oom_kills(root), _boot_id(root)
        self._due = clock()
        self.step_started(None)

    def step_started(self, step: int | None) -> None:
        """Record the step, unless the last write is too recent."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + WRITE_SECONDS
        last_step = LastStep(
            host=platform.node(),
            boot=self._boot,
            oom_kills=self._kills,
            step=step,
            rss_bytes=self._process.memory_info().rss,
        )
        partial = self.path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(asdict(last_step)), encoding="ascii")
            os.replace(partial, self.path)
        except OSError as error:  # No reason to end a training, but the next run will know less.
            self._due = float("inf")
            self._notify(f"warning: {self.path}: cannot be written ({error.strerror}); training continues")

    def remove(self) -> None:
        """Remove the file before the process exits without unwinding."""
        self.path.unlink(missing_ok=True)


@contextmanager
def crash_marker(
    directory: Path,
    notify: Callable[[str], None],
    *,
    reports: bool = True,
    root: Path = FILESYSTEM,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[CrashMarker]:
    """Report processes that crashed, then mark this one.

    Args:
        directory: parent of the directories of all processes.
        notify: gets one line for each crash.
        reports: whether this process reports crashes; one process per machine does.
        root: root of the file system.
        clock: monotonic seconds.
    """
    own = directory / uuid4().hex[:8]
    with write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for other in sorted(directory.iterdir()) if reports else ():
            if other.is_dir():
                _report_crash(other, notify, root)
        lock = lock_directory(own, waits=lambda: None)  # Another process may look into it before it is locked.
    assert lock is not None
    try:
        yield CrashMarker(own, notify, root, clock)
    finally:
        clear(own)
        unlock_directory(own, lock)


def _report_crash(directory: Path, notify: Callable[[str], None], root: Path) -> None:
    """Report the crashed process and remove its directory, unless it still runs or ran on another machine."""
    lock = lock_directory(directory)
    if lock is None:
        return
    try:
        last_step = LastStep(**json.loads((directory / FILE).read_text(encoding="ascii", errors="replace")))
        if last_step.host == platform.node():
            clear(directory)
            notify(_crash_note(last_step, root))
    except FileNotFoundError:  # It ended before its first write, or by itself just now.
        pass
    except (ValueError, TypeError):  # The file is never flushed, so a machine that goes down can damage it.
        clear(directory)
        notify(f"note: a previous training crashed or was killed; its record in {directory} is damaged")
    finally:
        unlock_directory(directory, lock)


def _crash_note(last_step: LastStep, root: Path) -> str:
    """Describe where a process ended and, as far as the system knows, why."""
    where = "while loading" if last_step.step is None else f"at optimizer step {last_step.step} or soon after"
    kills = oom_kills(root)
    if last_step.boot != _boot_id(root):
        why = "the machine has restarted since"
    elif kills is None or last_step.oom_kills is None:
        why = "it crashed or was killed; this system does not count kills for lack of memory"
    elif kills > last_step.oom_kills:
        why = (
            f"the kernel has since killed {kills - last_step.oom_kills} process(es) of this container for lack of RAM, "
            "very likely this one; raise the container's limit, or reduce what the run needs (host_bytes_predicted in "
            "data/estimate/figures.json)"
        )
    else:
        why = "it crashed or was killed, but not by the kernel for lack of RAM"
    return f"note: a previous training ended {where}, using {readable_size(last_step.rss_bytes)} of RAM: {why}"


def _boot_id(root: Path) -> str | None:
    """Return the machine's boot id; None where the system has none."""
    file = root / BOOT_ID
    return file.read_text(encoding="ascii").strip() if file.is_file() else None


# Stop training on SIGTERM, Ctrl-C and similar signals: between two micro-batches, or immediately on a second one.

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, PARENT_ENDED)
SAME_REQUEST_SECONDS = 1.0
"""A signal this soon after the first is the same request: a process group and its leader are often signalled both."""
Item = TypeVar("Item")


class Stopped(Interrupted):
    """Training stops because of a signal or because the parent process ended."""


class StopRequest:
    """Records that a signal arrived, and raises `Stopped` where stopping is safe."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        """The signal that arrived first; None before."""
        self.deferred_now = False
        """Whether a signal waits for `check`."""

    def request(self, number: int) -> None:
        """Handle the first signal: raise `Stopped` now, or at the next `check` inside `deferred`."""
        if self.signal_number is None:
            self.signal_number = number
            if not self.deferred_now:
                self.check()

    def check(self) -> None:
        """Raise `Stopped` if a signal has arrived."""
        if self.signal_number is not None:
            raise Stopped(self.signal_number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Make signals inside the block wait for `check`."""
        self.deferred_now = True
        try:
            yield
        finally:
            self.deferred_now = False

    def between(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the items; check for a request before each."""
        for item in items:
            self.check()
            yield item


def stopping_line(name: str, position: RunPosition, processes: int) -> str:
    """What happens after the first stop signal, called `name`, in one of the `processes` of a run."""
    single = {"heldout": "the held-out losses", "checkpoint": "this checkpoint", "optimizer": "this update"}
    after = "this step" if processes > 1 else single.get(position.phase_name, "this micro-batch")
    return f"train: {name}: stopping after {after}, with a checkpoint of the finished steps; again to stop now"


@contextmanager
def handle_signals(stop: StopRequest, acknowledge: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Pass signals inside the block to `stop`, except those the process ignores. Call in the main thread.

    `acknowledge` gets the name of the first signal at once, in another thread, if it waits for `StopRequest.check`.

    Raises:
        SystemExit: with the signal's exit code, once `Stopped` has left the block.
    """

    def handler(number: int, _: FrameType | None) -> None:
        stop.request(number)

    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    # Python runs handlers between two operations of the main thread, and a backward pass is one operation. A thread
    # therefore acknowledges the first signal and waits for a second one, which ends the process immediately.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def first_signal(number: int) -> None:
        if stop.deferred_now:
            acknowledge(Stopped(number).name)

    thread = threading.Thread(target=_watch_signals, args=(read_end, first_signal), name="signals", daemon=True)
    thread.start()
    wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers_before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    except Stopped as reason:
        raise SystemExit(reason.exit_code) from None
    finally:
        for number, before in handlers_before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(wakeup_before)
        os.close(write_end)
        thread.join()
        os.close(read_end)


def _watch_signals(read_end: int, first_signal: Callable[[int], None]) -> None:
    """Read the numbers of signals as they arrive, until the pipe is closed; exit at the second request."""
    first: float | None = None
    while number := os.read(read_end, 1):
        if number[0] not in SIGNALS or (first is not None and number[0] == PARENT_ENDED):
            continue
        now = time.monotonic()
        if first is None:
            first = now
            first_signal(number[0])
        elif now - first >= SAME_REQUEST_SECONDS:
            os._exit(128 + number[0])
