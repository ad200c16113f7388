"""Our loop, and beside each of its steps the limit: forward and backward of the very same batches, and nothing else.

Run as `python our_steps.py THREADS` in a directory that holds the stages' outputs. The two take turns step by step in
one process, on one model: they share its memory, its caches and the machine's slow spells. A step of ours reaches from
the end of one turn of the limit to the start of the next: reading ahead, clipping, optimizer, loss, watching memory and
the row of the curves are in it; windows that count peaks and checkpoints are not. The limit's batches lie ready in
memory, and letting go of its gradients is not timed. The last line printed holds, by step, what each took.
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
from lean_finetune.distributed.processes import ALONE
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.precision import precision_of
from lean_finetune.step.batch_loader import load
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss
from lean_finetune.train.checkpoint.resume import Keeper
from lean_finetune.train.checkpoint.training_state import Running
from lean_finetune.train.job import Paths, make_job
from lean_finetune.train.loop import TrainJob, train
from lean_finetune.train.monitor.measured_peak import make_meter

CPU = torch.device("cpu")


def read_job() -> TrainJob:
    """The job of stage train, without a window in which memory is counted."""
    paths = Paths(
        tokens=Path("data/tokens"),
        batches=Path("data/batches"),
        verdict=Path("data/estimate/verdict.json"),
        estimate=Path("data/estimate/figures.json"),
        model_lock=Path("locks/model.json"),
        tokenizer_lock=Path("locks/tokenizer.json"),
        data_lock=Path("locks/data.json"),
        out=Path("data/tuned"),
        curves=Path("data/train"),
        metrics=Path("metrics/train.json"),
    )
    params = read_params()
    spec = ModelSpec.from_params(params, precision_of(params, paths.verdict))
    return replace(make_job(params, spec, CPU, ALONE, paths), measured_steps=frozenset())


class Turns(Keeper):
    """Runs the limit after each step of the loop, and times both."""

    measures_load = False

    def __init__(self, job: TrainJob):
        """Make the limit's batches."""
        self._loss_chunk = job.step_spec.loss_chunk
        batches = load(job.rows, job.plan, pad_id=job.pad_id, threads=0)
        self._steps = [list(islice(batches, len(micro_batches))) for micro_batches in job.plan.steps]
        self.ours: list[float] = []
        self.limit: list[float] = []
        self._start = 0.0

    @contextmanager
    def keeping(self, run: Running) -> Iterator[None]:
        """The loop's first turn begins."""
        self._start = time.perf_counter()
        yield

    def step_done(self, run: Running) -> None:
        """The limit's turn."""
        self.ours.append(time.perf_counter() - self._start)
        self.limit.append(self._bare_seconds(run, self._steps[run.step - 1]))
        self._start = time.perf_counter()

    def _bare_seconds(self, run: Running, batches: list[Batch]) -> float:
        """Of a step's forward and backward passes; they leave no gradient."""
        start = time.perf_counter()
        for batch in batches:
            summed_loss(run.model, batch, self._loss_chunk).backward()
        seconds = time.perf_counter() - start
        run.model.zero_grad(set_to_none=True)
        return seconds


def main() -> None:
    """Train, and print."""
    torch.set_num_threads(int(sys.argv[1]))
    job = read_job()
    turns = Turns(job)
    curves = train(job, make_meter(CPU), turns).curves
    told = {
        "seconds": turns.ours,
        "limit_seconds": turns.limit,
        "supervised": [row["supervised_tokens"] for row in curves],
        "real": [row["tokens"] for row in curves],
        "padded": [row["padded_tokens"] for row in curves],
        "largest": [row["largest_micro_batch_tokens"] for row in curves],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
