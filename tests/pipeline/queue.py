"""DVC's queue of experiments, run to its end in bounded time.

`dvc exp run --run-all` waits forever once its worker exits (treeverse/dvc 10398, 10428, 10562). The remedy is to start
another worker, and to queue the experiment that the dead one had begun again.
"""

import re
import sys
import time

import psutil

from tests.pipeline.clone import Clone
from tests.processes import run_bounded

WORKERS = 3
"""Workers that are started at most."""
WORKER_SECONDS = 150
POLL_SECONDS = 1
STOP_SECONDS = 30
"""Time for a worker to save its last experiment."""


def run_queued(clone: Clone, experiments: dict[str, list[str]]) -> None:
    """Queue experiments by name, each with the arguments of its `dvc exp run`, and wait for workers to finish them.

    Raises:
        AssertionError: some were not finished. The message has the queue's state and the workers' output.
    """
    waiting: set[str] = set()
    for _ in range(WORKERS):
        for name in experiments.keys() - _finished(clone) - waiting:
            clone.dvc("exp", "run", "--queue", "-n", name, *experiments[name])
        clone.dvc("queue", "start")
        _wait_for_worker(clone, set(experiments))
        if experiments.keys() <= _finished(clone):
            return
        status = clone.dvc("queue", "status")
        waiting = {
            name for name in experiments if re.search(rf"\s{re.escape(name)}\s.*\sQueued$", status, re.MULTILINE)
        }
    logs = "".join(path.read_text() for path in (clone.root / ".dvc/tmp/exps/celery").glob("*.out"))
    raise AssertionError(f"not finished by {WORKERS} workers:\n{status}\n{logs}")


def _finished(clone: Clone) -> set[str]:
    """The names of finished experiments, from git: `dvc queue status` writes into the queue that workers read."""
    return set(clone.run("git", "for-each-ref", "--format=%(refname:lstrip=-1)", "refs/exps").split())


def _wait_for_worker(clone: Clone, names: set[str]) -> None:
    """Wait until all are finished or no worker is left. Remaining workers are stopped."""
    deadline = time.monotonic() + WORKER_SECONDS
    while not names <= _finished(clone) and clone.processes() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if clone.processes():
        # A worker that does not stop is killed below.
        run_bounded([sys.executable, "-m", "dvc", "queue", "stop"], cwd=clone.root, env=clone.environment)
        psutil.wait_procs(clone.processes(), timeout=STOP_SECONDS)
    clone.end_processes()
