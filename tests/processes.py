"""Child processes that cannot hang a test: each ends in bounded time, with what it started."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 480
"""Several times what the suite's longest command takes on two busy cores."""


def run_bounded(
    command: Sequence[str | Path], *, timeout_seconds: float = TIMEOUT_SECONDS, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its text; one that does not end is killed with its children.

    Args:
        command: program and arguments.
        timeout_seconds: after which the test fails with what was said so far.
        check: whether any exit status but 0 fails the test.
        options: more arguments of `subprocess.Popen`.

    Raises:
        AssertionError: it took too long, or failed under `check`; with its output.
    """
    # Files, not pipes: a daemon that the command leaves behind inherits a pipe, and its reader waits for the daemon.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, **options
        )
        in_time = False
        try:
            process.wait(timeout_seconds)
            in_time = True
        except subprocess.TimeoutExpired:
            pass  # Told below, with the output.
        finally:
            kill_group(process)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(list(command), process.returncode, out.read(), err.read())
    said = f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    assert in_time, f"no end within {timeout_seconds} s: {said}"
    assert done.returncode == 0 or not check, f"exit status {done.returncode}: {said}"
    return done


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[Any], timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Kill a process that was started with `start_new_session` when the time is over: its pipes then end, too."""
    timer = threading.Timer(timeout_seconds, kill_group, [process])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill what still runs of a process that leads its group, and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
