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
"""Seconds after a stage's exit within which all processes that it started must have exited."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject into a run."""

    at_change: int | None = None
    """Index, from 0, of the directory change before which the fault happens; None: at no change."""
    signal: int = signal.SIGKILL
    """Signal sent at that change."""
    removes: Path | None = None
    """Directory removed at that change."""
    changes: Path | None = None
    """File to which each change is logged."""
    file_bytes: int | None = None
    """RLIMIT_FSIZE of the run."""
    memory_bytes: int | None = None
    """RLIMIT_AS of the run, beyond what the process has when it starts."""
    group: Path | None = None
    """A control group, which has a memory limit, of the run."""
    closed_output: bool = False
    """Whether nobody reads standard output, as after `| head -1` has ended."""
    unprivileged: bool = False
    """Drop root's privilege to ignore permissions."""

    def as_request(self) -> dict[str, Any]:
        """Return the fault as JSON."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}


NO_FAULT = Fault()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    status: int | None
    """Exit status, negative for a signal; None: it did not end in time."""
    output: str
    """Standard output and error."""
    seconds: float

    def refusal(self) -> str:
        """Return the single error line of a run that was refused."""
        assert self.status in (1, 3), f"exit status {self.status}: {self.output}"
        [line] = self.faults()
        assert line.startswith("error: "), self.output
        return line.removeprefix("error: ")

    def faults(self) -> list[str]:
        """Return the lines without notes, warnings, progress bars and the automatic learning rate."""
        no_faults = ("note: ", "step ", "warning: ", "train.lr: auto is ")
        return [line for line in self.output.splitlines() if not line.startswith(no_faults)]


@dataclass(kw_only=True)
class StageRun:
    """A running stage."""

    runner: "Runner"
    pid: int
    started: float = field(default_factory=time.monotonic)

    def send(self, number: int, *, to_group: bool) -> None:
        """Send a signal to the process, or to its whole session."""
        (os.killpg if to_group else os.kill)(self.pid, number)

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> Ended:
        """Wait for the end of the run and of every process that it started."""
        ended = self.wait_briefly(seconds)
        assert ended.status is not None, f"no end within {seconds} s: {ended.output}"
        deadline = time.monotonic() + WORKERS_END_SECONDS
        while left := session_of(self.pid):
            assert time.monotonic() < deadline, f"still running: {left}; {ended.output}"
            time.sleep(0.01)
        return ended

    def wait_briefly(self, seconds: float) -> Ended:
        """Wait for the end of the run; kill it if that does not come in time."""
        answer = self.runner.ask({"wait": self.pid, "seconds": seconds})
        self.runner.left.discard(self.pid)
        return Ended(status=answer["status"], output=answer["output"], seconds=time.monotonic() - self.started)


def session_of(leader: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It exited in between.
            # Fields after the name in brackets: state, parent, group, session.
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


class Runner:
    """The server process that forks a process for each run."""

    def __init__(self, prefix: Sequence[str], errors: Path):
        """Start it through a command prefix, such as `unshare`; its imports take seconds."""
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
        """Return runs that were started and not yet waited for."""
        self.pid: int = self._answer()["ready"]

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and return the answer."""
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
        """Start a stage of dvc.yaml, or a command by `module:name`, in a workspace."""
        module, given = (stage, []) if ":" in stage else command_of(stage)
        request = {"module": module, "arguments": [*given, *arguments], "cwd": str(workspace), **fault.as_request()}
        run = StageRun(runner=self, pid=self.ask(request)["pid"])
        self.left.add(run.pid)
        return run

    def mount(self, target: Path, size_bytes: int = 0, image: Path | None = None) -> None:
        """Mount a tmpfs of this size, or a file with a file system, at a directory, for this runner's runs only."""
        self.ask({"mount": {"target": str(target), "size_bytes": size_bytes, "image": image and str(image)}})

    def seen(self, path: Path) -> Path:
        """Return a path as this runner's runs see it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def run(self, stage: str, workspace: Path, fault: Fault = NO_FAULT, *arguments: str) -> Ended:
        """Run a stage of dvc.yaml to its end."""
        return self.start(stage, workspace, fault, *arguments).wait()

    def run_briefly(self, stage: str, workspace: Path, seconds: float) -> Ended:
        """Run a stage of dvc.yaml; kill it if it does not end in time."""
        return self.start(stage, workspace).wait_briefly(seconds)

    def close(self) -> None:
        """Stop the server, and runs that a failed test has left."""
        for pid in self.left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        kill_group(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            pipe.close()
