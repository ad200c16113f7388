"""Our training loop, interleaved with its limit: bare forward and backward passes over the same batches.

Run as `python our_steps.py THREADS` in a directory with the stages' outputs. The two take turns step by step in one
process, on one model, so that they share its memory, its caches and the machine's noise. Our step is the time from the
end of one bare pass to the start of the next. It includes reading ahead, clipping, optimizer, loss, watching memory and
the row of the curves, but no windows that measure peaks and no checkpoints. The batches of the bare pass are in memory
beforehand, and freeing its gradients is not timed. The last line printed is JSON with the seconds of each step.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from lean_finetune.config.declared_params import read_params
from lean_finetune.distributed.processes import SINGLE_PROCESS
from lean_finetune.model.precision import precision_of, resolved
from lean_finetune.step.batch_stream import load
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from lean_finetune.train.checkpoint.checkpointer import CheckpointHooks
from lean_finetune.train.checkpoint.training_state import TrainingRun
from lean_finetune.train.job import TrainJob
from lean_finetune.train.loop import train
from lean_finetune.train.make_job import Paths, make_job
from lean_finetune.train.monitor.measured_peak import make_meter
from stages.train import main as stage

CPU = torch.device("cpu")


def read_job() -> TrainJob:
    """The job of stage train, without windows that measure memory."""
    paths = Paths(**{str(option.name): Path(str(option.default)) for option in stage.params})
    params = read_params()
    spec = resolved(params, precision_of(params, paths.verdict))
    return replace(make_job(params, spec, CPU, SINGLE_PROCESS, paths), measured_steps=frozenset())


class Interleaved(CheckpointHooks):
    """Runs the bare passes after each step of the loop, and times both."""

    measures_load = False

    def __init__(self, job: TrainJob):
        """Read the batches of the bare passes into memory."""
        self._loss_chunk = job.train.loss_chunk
        batches = load(job.rows, job.plan, pad_id=job.pad_id, threads=0)
        self._steps = [list(islice(batches, len(micro_batches))) for micro_batches in job.plan.steps]
        self.ours: list[float] = []
        self.limit: list[float] = []
        self._start = 0.0

    @contextmanager
    def saving_on_stop(self, run: TrainingRun) -> Iterator[None]:
        """Start the clock of the first step."""
        self._start = time.perf_counter()
        yield

    def after_step(self, run: TrainingRun, kept: int | None = None) -> bool:
        """Stop the clock, and run the bare passes."""
        self.ours.append(time.perf_counter() - self._start)
        self.limit.append(self._bare_seconds(run, self._steps[run.step - 1]))
        self._start = time.perf_counter()
        return False

    def _bare_seconds(self, run: TrainingRun, batches: list[Batch]) -> float:
        """Seconds of a step's forward and backward passes, whose gradients are then freed."""
        start = time.perf_counter()
        for batch in batches:
            summed_loss(run.model, batch, TokenLoss(self._loss_chunk)).backward()
        seconds = time.perf_counter() - start
        run.model.zero_grad(set_to_none=True)
        return seconds


def main() -> None:
    """Train and print."""
    torch.set_num_threads(int(sys.argv[1]))
    job = read_job()
    timer = Interleaved(job)
    curves = train(job, make_meter(CPU), timer).curves
    figures = {
        "seconds": timer.ours,
        "limit_seconds": timer.limit,
        "supervised": [row["supervised_tokens"] for row in curves],
        "real": [row["tokens"] for row in curves],
        "padded": [row["padded_tokens"] for row in curves],
        "largest": [row["largest_micro_batch_tokens"] for row in curves],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
