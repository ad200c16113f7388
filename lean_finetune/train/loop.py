"""The training loop: run the plan's optimizer steps in order."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch

from lean_finetune.distributed.sharding_modes import load_parallel
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import check_context_parallel, check_head, check_packed_rows
from lean_finetune.step.offload.disk_weights import DiskFault
from lean_finetune.step.run_optimizer import build_optimizer, learning_rate
from lean_finetune.step.training_step import LossScaler, StepResult, training_step
from lean_finetune.train.callbacks.callback import EXPERT_COLUMNS, RunInfo
from lean_finetune.train.callbacks.run_callbacks import make_callbacks
from lean_finetune.train.checkpoint.checkpointer import NO_CHECKPOINTS, CheckpointHooks
from lean_finetune.train.checkpoint.training_state import TrainingRun, restored_after_fault
from lean_finetune.train.heldout_loss import heldout_batches, heldout_loss
from lean_finetune.train.job import TrainJob, TrainResult
from lean_finetune.train.monitor.finite_checks import (
    Diverged,
    refuse_broken_weights,
    refuse_dead_adapters,
    refuse_non_finite,
)
from lean_finetune.train.monitor.measured_peak import LOAD, Meter
from lean_finetune.train.monitor.memory_monitor import HostPeak, MemoryMonitor, host_peak
from lean_finetune.train.oom.oom_handler import CHECKPOINT, HELDOUT, BatchStream, OomHandler, split_figures

Row = dict[str, Any]
"""One optimizer step of the curves, see `callback.Row`."""


def train(
    job: TrainJob,
    meter: Meter,
    checkpoints: CheckpointHooks = NO_CHECKPOINTS,
    oom_handler: OomHandler | None = None,
) -> TrainResult:
    """Load the model and run every step of the plan that no earlier process has finished.

    The steps that may have the highest peak are measured, each in its own window. The window of the first step,
    which has the largest batch by plan, also includes loading.

    Raises:
        UserError: the model cannot be loaded, a loss or gradient is not finite, or memory ran out.
        Stopped: the process got a stop signal.
    """
    oom_handler = oom_handler or OomHandler(job.device, updates_in_backward=job.train.optimizer_in_backward)
    return Trainer(job, meter, checkpoints, oom_handler).train()


class Trainer:
    """One run of a `TrainJob`."""

    def __init__(self, job: TrainJob, meter: Meter, checkpoints: CheckpointHooks, oom_handler: OomHandler):
        """Create the monitor and the callbacks; nothing is loaded yet."""
        self.job, self.meter, self.checkpoints, self.oom_handler = job, meter, checkpoints, oom_handler
        self.position = oom_handler.position
        self.monitor = MemoryMonitor(job.device, meter)
        self.total_steps = len(job.plan.steps)
        self.curves: list[Row] = []
        info = RunInfo(
            total_steps=self.total_steps,
            first_step=checkpoints.first_step,
            parameters=job.settings,
            predicted_peak_bytes=job.predicted_peak_bytes,
            predicted_duration=job.predicted_duration,
            device=job.device,
            show_progress=job.progress,
            curves=self.curves,
            directories=checkpoints.directories,
        )
        self.callbacks = make_callbacks(info, job.trackers, leads=job.world.is_first)

    def train(self) -> TrainResult:
        """Run the job, with the callbacks around it."""
        for callback in self.callbacks:
            callback.on_start()
        try:
            with self.checkpoints.naming_last_checkpoint(DiskFault):
                result = self._load_and_run()
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_fault(error)
            raise
        for callback in self.callbacks:
            callback.on_end(self.meter.result().step_peak_bytes)
        return result

    def _load_and_run(self) -> TrainResult:
        """Load, resume, run all steps, and keep the last checkpoint."""
        job = self.job
        stream = BatchStream(
            job.rows,
            job.plan,
            start_step=self.checkpoints.first_step,
            rank=job.sharing.layout_of(job.world).coordinates(job.world.rank).data,
            pad_id=job.pad_id,
            pin_memory=job.device.type == "cuda",
            threads=job.loader_threads,
            part=job.part,
        )
        with closing(stream), ExitStack() as first_window:
            if self.checkpoints.measures_load:
                first_window.enter_context(self.meter.window(f"step {self.checkpoints.first_step}"))
            with self.position.phase(LOAD):
                run, load_host = self._load()
            self.position.set_model(run.model, run.optimizer)
            self.checkpoints.resume(run, self.total_steps)
            with self.checkpoints.saving_on_stop(run), self.oom_handler.reported():
                for step in range(run.step, self.total_steps):
                    self._run_step(run, stream, self._window(step, first_window))
                refuse_broken_weights(run.parallel, self.total_steps)
                with self.position.phase(CHECKPOINT):
                    self.checkpoints.after_last_step(run)
        return TrainResult(
            parallel=run.parallel,
            curves=self.curves,
            skipped_steps=None if run.scaler is None else run.scaler.skipped_steps,
            memory_by_phase=self.monitor.by_phase(),
            oom_splits=split_figures(self.job.plan, self.curves),
            load_host=load_host,
        )

    def _load(self) -> tuple[TrainingRun, HostPeak]:
        """Load the model and create its optimizer with all its state; then seed dropout."""
        job = self.job
        with self.monitor.phase(LOAD), host_peak() as load_host:
            parallel = load_parallel(job.model_directory, job.train, job.seed, job.world, job.sharing, job.device)
            job.base_files.refuse_change()
            with torch.no_grad():
                parallel.run(partial(check_head, device=job.device))
                if job.plan.flat:
                    parallel.run(partial(check_packed_rows, device=job.device))
                if parallel.exchange is not None:
                    parallel.run(partial(check_context_parallel, exchange=parallel.exchange, device=job.device))
            optimizer = build_optimizer(parallel.local_shard, job.train, disk=job.disk)
        torch.manual_seed(job.seed + parallel.seed_rank)
        run = TrainingRun(
            parallel=parallel,
            optimizer=optimizer,
            scaler=LossScaler() if job.train.scales_loss else None,
            meter=self.meter,
            monitor=self.monitor,
            curves=self.curves,
            device=job.device,
            sharding=job.sharing.division,
        )
        return run, load_host

    def _window(self, step: int, first_window: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Return the meter's window of a step; that of the first step was opened before loading."""
        if self.checkpoints.measures_load and step == self.checkpoints.first_step:
            return first_window
        return self.meter.window(f"step {step}") if step in self.job.measured_steps else nullcontext()

    def _run_step(self, run: TrainingRun, stream: BatchStream, window: AbstractContextManager[Any]) -> None:
        """Run one optimizer step with all that belongs to it: curves, held-out loss, callbacks, checkpoint."""
        step = run.step
        with window:
            row = self._train_step(run, stream)
        row |= self.monitor.step_columns()
        every = self.job.train.heldout_every_steps
        if every is not None and ((step + 1) % every == 0 or step + 1 == self.total_steps):
            with self.position.phase(HELDOUT):
                row["heldout_loss"] = self._heldout_loss(run, step)
        self.curves.append(row)
        for callback in self.callbacks:
            callback.on_step(row)
        with self.position.phase(CHECKPOINT):
            saved = self.checkpoints.after_step(run)
        if saved:
            for callback in self.callbacks:
                callback.on_checkpoint(run.step)

    def _train_step(self, run: TrainingRun, stream: BatchStream) -> Row:
        """Update the weights once; return the step's row of the curves without the memory columns."""
        job, step = self.job, run.step
        planned = job.plan.steps[step]
        lr = learning_rate(step, self.total_steps, job.train)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        start = time.perf_counter()
        result, micro_batches = self.oom_handler.step(step, stream, run.model, partial(self._attempt_step, run))
        if job.world.size > 1:
            micro_batches = planned
        # Reading the scalars waits for the device, so the time covers the full step.
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        seconds = time.perf_counter() - start
        load = () if result.expert_load is None else result.expert_load.tolist()
        return {
            "step": step,
            "epoch": micro_batches[0].epoch,
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": sum(int(job.rows.lengths[m.rows].sum()) for m in micro_batches),
            "supervised_tokens": sum(m.supervised for m in planned),
            "padded_tokens": sum(m.padded_tokens for m in micro_batches),
            "micro_batches": len(micro_batches),
            "largest_micro_batch_tokens": max(m.padded_tokens for m in micro_batches),
            "longest_row": max(int(job.rows.lengths[m.rows].max(initial=0)) for m in micro_batches),
            "measured": step in job.measured_steps,
            "seconds": seconds,
            **dict(zip(EXPERT_COLUMNS, load, strict=False)),
        }

    def _attempt_step(self, run: TrainingRun, micro_batches: list[MicroBatch], batches: Iterator[Batch]) -> StepResult:
        """Run forward and backward of all micro-batches, then the optimizer; restore random states on an error."""
        job, step = self.job, run.step
        planned = job.plan.steps[step]

        numbers = count()

        def begin(batch: Batch) -> Batch:
            number = next(numbers)
            for callback in self.callbacks:
                callback.on_micro_batch(number, len(micro_batches))
            return batch.to(job.device)

        def guard(losses: list[torch.Tensor], norm: torch.Tensor) -> None:
            refuse_non_finite(losses, norm, step, planned if job.world.size > 1 else micro_batches)
            if step == 0:
                refuse_dead_adapters(run.parallel)

        with restored_after_fault(job.device):
            return training_step(
                run.model,
                run.optimizer,
                map(begin, self.checkpoints.between(batches)),
                supervised_tokens=sum(m.supervised for m in planned),
                train=job.train,
                foreach=job.foreach,
                phase=self.position.tracked(self.monitor.phase),
                guard=guard,
                scaler=run.scaler,
                offload=job.offload,
                parallel=run.parallel,
                micro_batches=len(micro_batches),
            )

    def _heldout_loss(self, run: TrainingRun, step: int) -> float:
        """Return the mean loss over the held-out rows."""
        job = self.job
        budget = max(micro_batch.padded_tokens for micro_batch in job.plan.steps[0])
        pinned = job.device.type == "cuda"
        batches = heldout_batches(
            job.heldout, job.train.heldout_rows, budget, job.pad_id, pin_memory=pinned, part=job.part
        )
        # Without chunks in training, the tokens of a micro-batch limit the logits of a longer held-out row.
        chunk = job.train.loss_chunk or budget
        loss = heldout_loss(run.parallel, batches, job.pad_id, job.train, chunk, job.device, job.part)
        if not math.isfinite(loss):
            raise Diverged(
                f"train.lr: held-out loss must be finite; it is {loss} after optimizer step {step}; lower train.lr"
            )
        return loss
