"""Small runs that are interrupted and resumed, and what must be equal in the end."""

import gc
import hashlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_finetune.step.batches import Batch
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, PREFERENCE_COLUMNS
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore
from lean_finetune.train.checkpoint.checkpointer import Checkpointer
from lean_finetune.train.checkpoint.training_state import TrainingRun
from lean_finetune.train.job import TrainJob
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.process.stop_signals import Stopped, StopRequest
from lean_finetune.train.publish_outputs import train_metrics
from lean_finetune.weights.attachment import WeightAttachment
from tests.repeatable import repeatable
from tests.small_model import CPU
from tests.train.jobs import make_job, plan_of, random_lengths, random_tokens

STEPS, MICRO_BATCHES, ROWS_A_BATCH = 5, 2, 3
LEARNT = (
    "step",
    "epoch",
    "loss",
    "heldout_loss",
    "lr",
    "grad_norm",
    "tokens",
    "micro_batches",
    *EXPERT_COLUMNS,
    *PREFERENCE_COLUMNS,
)
"""Columns of the curves without time and memory."""
NOISE_BYTES = {"adafactor": 1 << 14}
"""Difference of two uninterrupted runs. Adafactor creates scalars in each step. If a window frees one that was created
outside, PyTorch's profiler may count what was at that address in an earlier window."""


def small_job(model: Path, directory: Path, *, optim: dict[str, Any] | None = None, **spec: Any) -> TrainJob:
    """A run of `STEPS` steps over rows that are written to `directory`; all of it measured but one step."""
    tokens = random_tokens(directory, random_lengths(6, 30, STEPS * MICRO_BATCHES * ROWS_A_BATCH))
    steps = np.arange(len(tokens[0])).reshape(STEPS, MICRO_BATCHES, ROWS_A_BATCH).tolist()
    decaying = {"weight_decay": 0.01, "schedule": "cosine", "warmup_fraction": 0.2}
    return make_job(
        model,
        tokens,
        plan_of(tokens[0], steps),
        measured_steps=frozenset(range(STEPS)) - {1},
        **{**decaying, **(optim or {}), **spec},
    )


def with_weights(job: TrainJob) -> TrainJob:
    """The same run with weights of its training rows, 0.5 to 3."""
    job.rows.attached = (WeightAttachment(weights=np.resize([1.0, 3.0, 0.5, 2.0], len(job.rows)).astype(np.float32)),)
    return replace(job, plan=replace(job.plan, attached=job.rows.attached))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run, which must not depend on interruptions."""

    weights: list[bytes]
    curves: list[dict[str, Any]]
    metrics: dict[str, Any]
    measured_bytes: dict[str, int | None]
    noise_bytes: int

    def weights_sha256(self) -> str:
        return hashlib.sha256(b"".join(self.weights)).hexdigest()

    def check_equal(self, other: "Outcome") -> None:
        assert other.weights == self.weights
        assert (other.curves, other.metrics) == (self.curves, self.metrics)
        expected = {
            name: pytest.approx(size, abs=self.noise_bytes) for name, size in self.measured_bytes.items() if size
        }
        assert {name: size for name, size in other.measured_bytes.items() if size} == expected


class Breaking(Checkpointer):
    """Stops or fails at a given step."""

    def __init__(
        self,
        directory: Path,
        *,
        notify: Callable[[str], None] = print,
        stop_after: int | None = None,
        stop_within: int | None = None,
        fail_after: int | None = None,
        every_step: bool = False,
    ):
        """Stop after a step, stop before its second micro-batch, or fail after it."""
        self._of_stop = StopRequest()
        super().__init__(CheckpointStore(directory, 2, notify), seconds=None, stop=self._of_stop, notify=notify)
        self._stop_after, self._stop_within, self._fail_after = stop_after, stop_within, fail_after
        self._every_step, self._done = every_step, self.first_step

    def is_due(self) -> bool:
        return self._every_step

    def between(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(super().between(batches)):
            if self._done == self._stop_within and number == 1:
                self._of_stop.request(signal.SIGTERM)
                self._of_stop.check()
            yield batch

    def after_step(self, run: TrainingRun, kept: int | None = None) -> bool:
        self._done = run.step
        if run.step == self._stop_after:
            self._of_stop.request(signal.SIGTERM)
        saved = super().after_step(run, kept)
        self.wait()
        if run.step == self._fail_after:
            raise ConnectionError("power failure")
        return saved


def finish(job: TrainJob, checkpoints: Checkpointer | None = None) -> Outcome:
    """Run to the end."""
    gc.collect()  # Garbage of earlier runs must not be freed inside a window.
    meter = make_meter(CPU)
    result = train(job, meter) if checkpoints is None else train(job, meter, checkpoints)
    if checkpoints is not None:
        checkpoints.wait()
    measured = meter.result()
    metrics = train_metrics(job, result, measured)
    trained = [parameter.detach() for _, parameter in result.parallel.trained_parameters()]
    sizes = {f"step {row['step']}": row["allocated_bytes"] for row in result.curves}
    return Outcome(
        weights=[weight.view(-1).view(torch.uint8).numpy().tobytes() for weight in trained],
        curves=[{key: row.get(key) for key in LEARNT} for row in result.curves],
        metrics={key: value for key, value in repeatable(metrics).items() if not _is_measured(key)},
        measured_bytes={**sizes, **measured.peak_bytes_by_phase, "all": measured.peak_bytes},
        noise_bytes=NOISE_BYTES.get(job.train.optimizer, 0),
    )


def _is_measured(name: str) -> bool:
    """Whether a metric is of measured bytes, which have a tolerance."""
    return name == "measured_by_phase" or (name.startswith("peak_") and name != "peak_measured_how")


def interrupt(job: TrainJob, directory: Path, **how: Any) -> None:
    """Run until it is stopped or fails."""
    checkpoints = Breaking(directory, **how)
    try:
        finish(job, checkpoints)
    except (Stopped, ConnectionError):
        checkpoints.wait()
        return
    raise AssertionError("the run was not interrupted")


def in_parts(job: TrainJob, directory: Path, steps: list[int]) -> Outcome:
    """The end of a run that was stopped after each of these steps."""
    for step in steps:
        interrupt(job, directory, stop_after=step)
    checkpoints = Breaking(directory)
    assert checkpoints.first_step == steps[-1]
    return finish(job, checkpoints)
