"""One run of a stage in a forked process, in a workspace, with a fault."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.faults.outputs import command_of
from tests.processes import TIMEOUT_SECONDS, kill_group

WORKERS_END_SECONDS = 10
"""Within which what a stage started must be gone after its end."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in a run."""

    at_change: int | None = None
    """Number of the directory entry's change, from 0, before which the fault happens; None: at no change."""
    signal: int = signal.SIGKILL
    """Sent at that change,"""
    vanishes: Path | None = None
    """or the directory that is removed at it."""
    changes: Path | None = None
    """A file that lists each change."""
    file_bytes: int | None = None
    """No file can grow beyond this."""
    unprivileged: bool = False
    """Permissions apply to root, too."""

    def as_request(self) -> dict[str, Any]:
        """The fault as JSON."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}


NO_FAULT = Fault()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    status: int
    """Exit status, negative for a signal."""
    output: str
    """Standard output and error."""
    seconds: float

    def refusal(self) -> str:
        """The one line of a run that was refused."""
        assert self.status == 1, f"exit status {self.status}: {self.output}"
        [line] = self.faults()
        assert line.startswith("error: "), self.output
        return line.removeprefix("error: ")

    def faults(self) -> list[str]:
        """The lines that are neither notes, warnings nor progress."""
        return [line for line in self.output.splitlines() if not line.startswith(("note: ", "step ", "warning: "))]


@dataclass(kw_only=True)
class StageRun:
    """A run that was started."""

    runner: "Runner"
    pid: int
    started: float = field(default_factory=time.monotonic)

    def send(self, number: int, *, to_group: bool) -> None:
        """Send a signal to the process alone, or to it and all that it started."""
        (os.killpg if to_group else os.kill)(self.pid, number)

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> Ended:
        """Wait for the end of the run and of every process that it started."""
        answer = self.runner.ask({"wait": self.pid, "seconds": seconds})
        self.runner.left.discard(self.pid)
        status, output = answer["status"], answer["output"]
        took = time.monotonic() - self.started
        assert status is not None, f"no end within {seconds} s: {output}"
        deadline = time.monotonic() + WORKERS_END_SECONDS
        while left := session_of(self.pid):
            assert time.monotonic() < deadline, f"still running: {left}; {output}"
            time.sleep(0.01)
        return Ended(status=status, output=output, seconds=took)


def session_of(leader: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It ended just now.
            # After the name in brackets: state, parent, group, session.
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


class Runner:
    """The process that forks a stage for each run."""

    def __init__(self, prefix: Sequence[str], errors: Path):
        """Start it under a command that may prepare its surroundings; it takes seconds to import everything."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for name in ("DVC_STAGE", "DVC_ROOT"):
            environment.pop(name, None)
        self._errors = open(errors, "w")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.faults.runner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
            text=True,
        )
        self.left: set[int] = set()
        """Runs that were started and not waited for."""
        self.pid: int = self._answer()["ready"]

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the runner ended: {Path(self._errors.name).read_text()}"
        return json.loads(line)

    def start(self, stage: str, workspace: Path, fault: Fault = NO_FAULT, *arguments: str) -> StageRun:
        """Start a stage of dvc.yaml in a workspace."""
        module, given = command_of(stage)
        request = {"module": module, "arguments": [*given, *arguments], "cwd": str(workspace), **fault.as_request()}
        run = StageRun(runner=self, pid=self.ask(request)["pid"])
        self.left.add(run.pid)
        return run

    def mount(self, target: Path, size_bytes: int) -> None:
        """Mount memory of this size at a directory, for the runs of this runner alone."""
        self.ask({"mount": {"target": str(target), "size_bytes": size_bytes}})

    def seen(self, path: Path) -> Path:
        """A path as the runs of this runner see it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def run(self, stage: str, workspace: Path, fault: Fault = NO_FAULT, *arguments: str) -> Ended:
        """Run a stage of dvc.yaml to its end."""
        return self.start(stage, workspace, fault, *arguments).wait()

    def close(self) -> None:
        """End it, and the runs that a failed test left."""
        for pid in self.left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        kill_group(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            pipe.close()
