"""A group of processes for many cases. They are forks of one process that has imported torch, which takes seconds."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.distributed.cases import Case
from tests.distributed.worker import do_learn, work

ANSWER_SECONDS = 240
"""A group that takes longer over a case is killed: several times what the longest takes on two busy cores."""


class Group:
    """Processes that wait for cases."""

    def __init__(self, size: int, directory: Path):
        """Start `size` processes that form a gloo group; `directory` has their results and logs."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__module__])
        self._directory = directory
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, size, directory, theirs), daemon=True)
            with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)):  # Of the process that imports.
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def learn(self, case: Case) -> dict[str, Any]:
        """Run a case: the answer of rank 0, with the trained tensors as `weights`."""
        answer = self.ask(do_learn, case)
        return {**answer, "weights": load_file(answer["weights"])}

    def ask(self, task: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the process's `World`, `directory` and arguments in every process.

        Returns the result of rank 0.
        """
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # It ended: reported below with its log.
                pipe.send((task, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            log = self._directory / f"{rank}.log"
            try:
                assert pipe.poll(ANSWER_SECONDS), f"process {rank} does not end {task.__name__}: {log.read_text()}"
                answers.append(pipe.recv())
            except EOFError:
                raise AssertionError(f"process {rank} ended in {task.__name__}: {log.read_text()[-3000:]}") from None
        return answers[0]

    def end(self) -> None:
        """Kill the processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


@contextmanager
def group_of(size: int) -> Iterator[Group]:
    """`size` processes that form a gloo group; they end with the block."""
    with tempfile.TemporaryDirectory() as directory:
        group = Group(size, Path(directory))
        try:
            yield group
        finally:
            group.end()
