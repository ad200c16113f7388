"""The run of the project where the page was started: `lean-finetune run --json`, one at a time.

Its state is in files below scratch/page. So the run goes on when the page ends, and every window and every later page
of the project shows the same run.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cuda_memory.errors import write_errors
from lean_finetune.commands.run.place import is_project
from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_locks import clear, lock_directory
from lean_finetune.core.systems import STAGES_NEED

PLACE = Path("scratch/page")
EVENTS, SAID, PROCESS, ASKED_TO_STOP = "events.jsonl", "said.txt", "process.json", "asked-to-stop"
MOST_EVENT_BYTES, MOST_SAID_BYTES = 16 << 20, 64 << 10
SAID_LINES = 12


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What is known of the last run that a page has started here."""

    is_running: bool
    is_stopping: bool
    """Whether someone has asked it to stop."""
    started: float
    """Seconds since the epoch; 0 if no page has started any."""
    said_last: float
    """When it or its stages printed last, in seconds since the epoch; 0 if it never did."""
    events: Sequence[Mapping[str, Any]]
    """As `run --json` prints them."""
    said: Sequence[str]
    """The last lines of its stages."""

    def last(self, *names: str) -> Mapping[str, Any] | None:
        """The last event with one of these names."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)


def read_state() -> RunState:
    """Read the state of the run in the working directory."""
    process = _process()
    return RunState(
        is_running=process is not None and _is_alive(process),
        is_stopping=(PLACE / ASKED_TO_STOP).exists(),
        started=0.0 if process is None else process["started"],
        said_last=max(map(_written, (PLACE / EVENTS, PLACE / SAID))),
        events=_events(),
        said=_tail(PLACE / SAID, MOST_SAID_BYTES).splitlines()[-SAID_LINES:],
    )


def start_run(words: Sequence[str]) -> None:
    """Start `lean-finetune run` with these options in the working directory, or go on with a run that was stopped.

    Raises:
        UserError: a run goes on here, or its files cannot be written.
    """
    if sys.platform == "win32":
        raise UserError(STAGES_NEED.removeprefix("error: "))
    here = Path.cwd()
    # By its full name an empty directory may become a project with the tiny sample; `.` refuses one that has files.
    is_new = not is_project(here) and all(path.name == PLACE.parts[0] for path in here.iterdir())
    with write_errors(PLACE):
        lock = lock_directory(PLACE)
        if lock is None:
            raise UserError("another window starts a run at this moment; it is shown below")
        try:
            if read_state().is_running:
                raise UserError("this project's run goes on; it is shown below. Stop it before you start another")
            clear(PLACE)
            _start(["run", str(here) if is_new else ".", "--json", *words])
        finally:
            os.close(lock)


def _start(words: Sequence[str]) -> None:
    with (PLACE / EVENTS).open("wb") as events, (PLACE / SAID).open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "lean_finetune", *words],
            stdin=subprocess.DEVNULL,
            stdout=events,
            stderr=said,
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # Nothing is left of it when it ends.
    created = psutil.Process(process.pid).create_time()
    write_json(PLACE / PROCESS, {"pid": process.pid, "created": created, "started": time.time()})


def stop_run() -> None:
    """Ask the run to stop, as Ctrl-C does: training saves a checkpoint first, from which the next run goes on.

    Raises:
        UserError: none goes on that a page has started.
    """
    process = _process()
    if process is None or not _is_alive(process):
        raise UserError("no run goes on here that a page has started")
    with write_errors(PLACE):
        (PLACE / ASKED_TO_STOP).touch()
    os.kill(process["pid"], signal.SIGTERM)


def _process() -> dict[str, Any] | None:
    """What `_start` wrote; None if no run was started, or it is being started."""
    try:
        found = json.loads((PLACE / PROCESS).read_text(encoding="utf-8"))
        return {"pid": int(found["pid"]), "created": float(found["created"]), "started": float(found["started"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_alive(process: Mapping[str, Any]) -> bool:
    """Whether a process runs: that one, not a later one with its number."""
    try:
        found = psutil.Process(process["pid"])
        return found.create_time() == process["created"] and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _events() -> list[dict[str, Any]]:
    """The complete lines of the events' file."""
    *lines, _ = _tail(PLACE / EVENTS, MOST_EVENT_BYTES).split("\n")
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # The first one is cut if there are too many.
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _tail(path: Path, most_bytes: int) -> str:
    """The last bytes of a file as text; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
            return file.read(most_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""
