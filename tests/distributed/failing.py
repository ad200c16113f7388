"""One process of a run with a fault: stages.train, and the fault of environment variable LEAN_FINETUNE_FAULT.

It is `KIND RANK STEP`: the process of that rank fails when it begins that optimizer step, in the first run alone, and
creates a file. With `unsaved` it fails at a checkpoint, and STEP is -1.
"""

import os
import resource
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lean_finetune.core.errors import UserError
from lean_finetune.distributed import faults
from lean_finetune.train import loop
from lean_finetune.train.checkpoint.checkpoint_files import PendingCheckpoint
from lean_finetune.train.monitor.memory_monitor import RunPosition

VARIABLE = "LEAN_FINETUNE_FAULT"
MET = Path("fault-was-met")
SAVED_SECONDS = 3
"""Within which the other processes have finished their parts of a checkpoint."""
FILE_BYTES = 1024
"""Less than any output or part of a checkpoint."""


def _meet(kind: str) -> None:
    """The fault."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    if kind == "disk":  # As under a quota: from here on its files cannot grow.
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    if kind in ("hangs", "nccl"):
        time.sleep(1e6)


def _with_fault(training_step: Any, started: list[int]) -> Any:
    """The step, which fails first where the environment says so; `started` has the steps that began."""
    kind, rank, at = os.environ[VARIABLE].split()

    def failing(*arguments: Any, **options: Any) -> Any:
        if started[-1] == int(at) and os.environ["RANK"] == rank and not MET.exists():
            MET.touch()
            _meet(kind)
        return training_step(*arguments, **options)

    return failing


def _noting(start_step: Any, started: list[int]) -> Any:
    """`RunPosition.start_step`, which also notes the step."""

    def start(self: RunPosition, step: int, micro_batches: Any) -> None:
        started.append(step)
        start_step(self, step, micro_batches)

    return start


def _watchdog(device: torch.device) -> Any:
    """Imitate NCCL's watchdog, which reports a timeout of the group while the main thread still waits."""
    kind, rank, _ = os.environ[VARIABLE].split()
    waits = kind == "nccl" and os.environ["RANK"] != rank
    return (lambda: ["SUCCESS", "TIMEOUT" if waits and MET.exists() else "SUCCESS"]) if kind == "nccl" else None


def _fail_early() -> None:
    """The fault `absent`: the process does not join the others; `refused`: it alone refuses the model."""
    kind, rank, _ = os.environ[VARIABLE].split()
    if kind in ("absent", "refused") and os.environ["RANK"] == rank and not MET.exists():
        MET.touch()
        if kind == "absent":
            _meet("hangs")
        loop.check_context_parallel = _refuse


def _refuse(*arguments: Any, **options: Any) -> None:
    raise UserError("model.name: refused")


def _killed_before_saving(finish_rank: Any) -> Any:
    """The fault `unsaved`: a process is killed when the others have finished their parts of a second checkpoint."""
    kind, rank, _ = os.environ[VARIABLE].split()

    def finish(self: PendingCheckpoint) -> None:
        second = self._store.last_step() is not None
        if kind == "unsaved" and os.environ["RANK"] == rank and second and not MET.exists():
            time.sleep(SAVED_SECONDS)
            MET.touch()
            _meet("killed")
        finish_rank(self)

    return finish


if __name__ == "__main__":
    _fail_early()
    steps: list[int] = []
    RunPosition.start_step = _noting(RunPosition.start_step, steps)  # type: ignore[method-assign]
    loop.training_step = _with_fault(loop.training_step, steps)
    PendingCheckpoint.finish_rank = _killed_before_saving(PendingCheckpoint.finish_rank)  # type: ignore[method-assign]
    if not MET.exists():
        faults.nccl_errors = _watchdog
    runpy.run_module("stages.train", run_name="__main__", alter_sys=True)
