"""DVC's queue of experiments, run to its end in bounded time.

`dvc exp run --run-all` waits for ever once its worker dies (treeverse/dvc 10398, 10428, 10562). The remedy is what the
README says: start a worker again, and queue anew what the dead one had begun.
"""

import re
import sys
import time
from collections.abc import Callable

import psutil

from tests.pipeline.clone import Clone
from tests.processes import run_bounded

WORKERS = 3
"""Times a worker is started before the queue is given up."""
WORKER_SECONDS = 150
POLL_SECONDS = 1
STOP_SECONDS = 30
"""Given to a worker to put away its last experiment."""


def run_queued(
    clone: Clone, experiments: dict[str, list[str]], *, each_poll: Callable[[], None] = lambda: None
) -> None:
    """Queue experiments by name, each with the arguments of its `dvc exp run`, and have workers finish them all.

    `each_poll` is called while a worker is waited for.

    Raises:
        AssertionError: some were not finished; with the queue's state and what the workers said.
    """
    waiting: set[str] = set()
    for _ in range(WORKERS):
        for name in experiments.keys() - _finished(clone) - waiting:
            clone.dvc("exp", "run", "--queue", "-n", name, *experiments[name])
        clone.dvc("queue", "start")
        _wait_for_worker(clone, set(experiments), each_poll)
        if experiments.keys() <= _finished(clone):
            return
        status = clone.dvc("queue", "status")
        waiting = {
            name for name in experiments if re.search(rf"\s{re.escape(name)}\s.*\sQueued$", status, re.MULTILINE)
        }
    logs = "".join(path.read_text() for path in (clone.root / ".dvc/tmp/exps/celery").glob("*.out"))
    raise AssertionError(f"not finished by {WORKERS} workers:\n{status}\n{logs}")


def _finished(clone: Clone) -> set[str]:
    """The names of finished experiments, asked of git: `dvc queue status` writes into the queue that workers read."""
    return set(clone.run("git", "for-each-ref", "--format=%(refname:lstrip=-1)", "refs/exps").split())


def _wait_for_worker(clone: Clone, names: set[str], each_poll: Callable[[], None]) -> None:
    """Wait until all are finished or no worker is left, and leave none."""
    deadline = time.monotonic() + WORKER_SECONDS
    while not names <= _finished(clone) and clone.processes() and time.monotonic() < deadline:
        each_poll()
        time.sleep(POLL_SECONDS)
    if clone.processes():
        # Its exit status says nothing here: a worker that cannot be told is killed below.
        run_bounded([sys.executable, "-m", "dvc", "queue", "stop"], cwd=clone.root, env=clone.environment)
        psutil.wait_procs(clone.processes(), timeout=STOP_SECONDS)
    clone.end_processes()
