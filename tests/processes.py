"""Run child processes with a timeout, after which they are killed with their children."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

TIMEOUT_SECONDS = 480
"""Several times the duration of the suite's longest command on two busy cores."""
Result = TypeVar("Result")


def run_bounded(
    command: Sequence[str | Path], *, timeout_seconds: float = TIMEOUT_SECONDS, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its text. After the timeout it is killed with its children.

    Args:
        command: program and arguments.
        timeout_seconds: after which the test fails with the output so far.
        check: whether an exit status other than 0 fails the test.
        options: more arguments of `subprocess.Popen`.

    Raises:
        AssertionError: timeout, or failure with `check`. The message has the output.
    """
    # Files, not pipes: a daemon that the command started would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, **options
        )
        in_time = False
        try:
            process.wait(timeout_seconds)
            in_time = True
        except subprocess.TimeoutExpired:
            pass  # Reported below, with the output.
        finally:
            kill_group(process)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(list(command), process.returncode, out.read(), err.read())
    output = f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    assert in_time, f"no end within {timeout_seconds} s: {output}"
    assert done.returncode == 0 or not check, f"exit status {done.returncode}: {output}"
    return done


@contextlib.contextmanager
def killed_after(process: subprocess.Popen[Any], timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Kill a process that was started with `start_new_session` after the timeout. Its pipes then end too."""
    timer = threading.Timer(timeout_seconds, kill_group, [process])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process that leads its group, and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(condition: Callable[[], Result], process: subprocess.Popen[Any] | None = None) -> Result:
    """Wait until a condition is true and return its value. Fail after the timeout, or if the process exits first."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < until, "timeout"
        assert process is None or process.poll() is None, f"the process ended: {process.returncode}"
        time.sleep(0.01)
    return value


def command_words(process: psutil.Process) -> list[str]:
    """Words of a process's command; none once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
