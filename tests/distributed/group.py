"""A group of processes for many cases: starting one takes seconds, a case less than one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.distributed.cases import Case
from tests.processes import kill_group, killed_after

ANSWER_SECONDS = 240
"""A group that takes longer over a case is killed: several times what the longest takes on two busy cores."""


class Group:
    """Processes that wait for cases."""

    def __init__(self, processes: list[subprocess.Popen[str]], directory: Path):
        """`directory` has the results and logs of `processes`."""
        self.processes, self.directory = processes, directory

    def learn(self, case: Case) -> dict[str, Any]:
        """Run a case: the answer of rank 0, with the trained tensors as `weights`."""
        answer = self.ask("learn", asdict(case))
        return {**answer, "weights": load_file(answer["weights"])}

    def ask(self, task: str, arguments: dict[str, Any]) -> Any:
        """Call a function of tests.distributed.worker in every process; returns the result of rank 0."""
        with ExitStack() as stack:
            for process in self.processes:
                stack.enter_context(killed_after(process, ANSWER_SECONDS))
            return self._ask(task, arguments)

    def _ask(self, task: str, arguments: dict[str, Any]) -> Any:
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # It ended: reported below with its log.
                process.stdin.write(json.dumps({"task": task, "arguments": arguments}) + "\n")
                process.stdin.flush()
        answers = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            log = self.directory / f"{rank}.log"
            assert line, f"process {rank} ended in {task} {arguments}: {log.read_text()[-3000:]}"
            answers.append(json.loads(line))
        return answers[0]


@contextmanager
def group_of(size: int) -> Iterator[Group]:
    """Start `size` processes that form a gloo group; they end with the block."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)}
        processes = []
        for rank in range(size):
            log = stack.enter_context(open(directory / f"{rank}.log", "w"))
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.distributed.worker", str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                cwd=ROOT,
                env={**environment, "RANK": str(rank)},
            )
            stack.callback(_end, process)
            processes.append(process)
        yield Group(processes, directory)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and close its pipes."""
    kill_group(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
