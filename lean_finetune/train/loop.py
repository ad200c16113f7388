"""The training loop: data, step, callbacks. It runs the plan's optimizer steps in order."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from lean_finetune.distributed.sharding_modes import load_parallel
from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.batch_stream import BatchStream
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import check_context_parallel, check_head, check_packed_rows
from lean_finetune.step.offload.disk_weights import DiskFault
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_checks import refuse_broken_weights, refuse_dead_adapters, refuse_non_finite
from lean_finetune.step.run_optimizer import build_optimizer, learning_rate
from lean_finetune.step.step_loss import StepGoal, known_figures
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import loss_scaler
from lean_finetune.train.callbacks.callback import CALLBACKS, EXPERT_COLUMNS, CurveRow, RunInfo, curve_row
from lean_finetune.train.callbacks.trackers import TRACKERS
from lean_finetune.train.checkpoint.checkpointer import NO_CHECKPOINTS, CheckpointHooks
from lean_finetune.train.checkpoint.training_state import TrainingRun, restored_after_fault
from lean_finetune.train.heldout_loss import HeldoutLosses
from lean_finetune.train.job import TrainJob, TrainResult
from lean_finetune.train.kept_step import kept_step, stops_early
from lean_finetune.train.monitor.kernel_shapes import KernelShapes
from lean_finetune.train.monitor.measured_peak import LOAD, Meter
from lean_finetune.train.monitor.memory_monitor import CHECKPOINT, HELDOUT, HostPeak, MemoryMonitor, host_peak
from lean_finetune.train.monitor.out_of_memory import OomHandler


def train(
    job: TrainJob,
    meter: Meter,
    checkpoints: CheckpointHooks = NO_CHECKPOINTS,
    oom_handler: OomHandler | None = None,
) -> TrainResult:
    """Load the model and run every step of the plan that no earlier process has finished.

    The steps that may have the highest peak are measured, each in its own window. The first step has the largest
    batch of the plan; its window also includes loading.

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
        self.kernel_shapes = KernelShapes(job.device, job.train)
        self.total_steps = len(job.plan.steps)
        self.curves: list[CurveRow] = []
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
        kinds = (*CALLBACKS, *(TRACKERS[name] for name in job.trackers)) if job.world.is_first else ()
        self.callbacks = [kind(info) for kind in kinds]

    def train(self) -> TrainResult:
        """Run the job, with the callbacks around it."""
        for callback in self.callbacks:
            callback.on_start()
        try:
            with self.checkpoints.naming_last_checkpoint(DiskFault):
                result = self.load_and_run()
        except BaseException as error:  # A stop signal too: trackers close their run.
            for callback in self.callbacks:
                callback.on_fault(error)
            raise
        for callback in self.callbacks:
            callback.on_end(self.meter.result().step_peak_bytes)
        return result

    def load_and_run(self) -> TrainResult:
        """Load the model, resume from a checkpoint if there is one, run all steps, and keep the last checkpoint."""
        job = self.job
        stream = BatchStream(
            job.rows,
            job.plan,
            start_step=self.checkpoints.first_step,
            rank=job.train.layout(job.world.size).coordinates(job.world.rank).data,
            pad_id=job.pad_id,
            pin_memory=job.device.type == "cuda",
            threads=job.loader_threads,
            part=job.part,
        )
        with closing(stream), ExitStack() as first_window:
            # Loading and the first step share a window: a CPU's meter counts from before the model exists.
            if self.checkpoints.measures_load:
                first_window.enter_context(self.meter.window(f"step {self.checkpoints.first_step}"))
            with self.position.phase(LOAD):
                run, load_host = self.load()
            self.position.set_model(run.model, run.optimizer)
            self.checkpoints.resume(run, self.total_steps)
            with self.checkpoints.saving_on_stop(run), self.oom_handler.reported():
                self.run_steps(run, stream, first_window)
                refuse_broken_weights(run.parallel, run.step)
                with self.position.phase(CHECKPOINT):
                    self.checkpoints.after_last_step(run, kept_step(job.train, run.curves))
        return TrainResult(
            parallel=run.parallel,
            curves=self.curves,
            skipped_steps=run.scaler.skipped_steps,
            memory_by_phase=self.monitor.by_phase(),
            load_host=load_host,
        )

    def run_steps(self, run: TrainingRun, stream: BatchStream, first_window: AbstractContextManager[Any]) -> None:
        """Run all steps that are left; `first_window` is the meter's, open since before loading."""
        heldout = HeldoutLosses(self.job, self.total_steps)
        for step in range(run.step, self.total_steps):
            if stops_early(self.job.train, run.curves):
                return
            window: AbstractContextManager[Any] = nullcontext()
            if self.checkpoints.measures_load and step == self.checkpoints.first_step:
                window = first_window
            elif step in self.job.measured_steps:
                window = self.meter.window(f"step {step}")
            with window:
                row = self.train_step(run, stream)
            row |= self.monitor.step_columns()  # One of these columns is the window's peak, known at its end.
            if heldout.is_due(step):
                with self.position.phase(HELDOUT):
                    row |= heldout.after_step(step, run.parallel)
            run.curves.append(row)  # From here on the step counts as finished, and a checkpoint has it.
            for callback in self.callbacks:
                callback.on_step(row)
            with self.position.phase(CHECKPOINT):
                saved = self.checkpoints.after_step(run, kept_step(self.job.train, run.curves))
            if saved:
                for callback in self.callbacks:
                    callback.on_checkpoint(run.step)

    def train_step(self, run: TrainingRun, stream: BatchStream) -> CurveRow:
        """Update the weights once; return the step's row of the curves without memory and held-out loss."""
        job, step = self.job, run.step
        planned = job.plan.steps[step]
        lr = learning_rate(step, self.total_steps, job.train)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        supervised = sum(one.supervised for one in planned)
        goal = StepGoal.of(job.train, job.rows, np.concatenate([one.rows for one in planned]), supervised)
        own, loaded = stream.step(step)
        passes = len(own) * job.plan.kind.passes
        batches = map(partial(self._begin, count(), passes), self.checkpoints.between(loaded))
        start = time.perf_counter()
        self.oom_handler.start_step(step, own)
        with restored_after_fault(job.device):
            result = training_step(
                run.parallel,
                run.optimizer,
                batches,
                before=islice(batches, passes - len(own)),
                micro_batches=len(own),
                goal=goal,
                train=job.train,
                foreach=job.foreach,
                phase=self.position.tracked(self.monitor.phase),
                guard=partial(self._guard, run.parallel, step, planned),
                scaler=run.scaler,
                offload=job.offload,
            )
        # Reading the scalars waits for the device, so the time covers the full step.
        loss, grad_norm = result.loss.item(), result.grad_norm.item()
        seconds = time.perf_counter() - start
        load = () if result.expert_load is None else result.expert_load.tolist()
        figures = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "seconds": seconds}
        more = {**dict(zip(EXPERT_COLUMNS, load, strict=False)), **known_figures(result.figures)}
        shapes = self.kernel_shapes.after(planned, job.rows.lengths)
        return curve_row(planned, job.rows.lengths, step in job.measured_steps, shapes, figures, more)

    def _begin(self, numbers: Iterator[int], micro_batches: int, batch: Batch) -> Batch:
        """Start a micro-batch of this process; returns it on the device."""
        number = next(numbers)
        for callback in self.callbacks:
            callback.on_micro_batch(number, micro_batches)
        return batch.to(self.job.device)

    def _guard(
        self,
        parallel: ParallelModel,
        step: int,
        micro_batches: list[MicroBatch],
        losses: list[torch.Tensor],
        norm: torch.Tensor,
    ) -> None:
        """Stop before an update that would break the weights, or if an adapter would never train."""
        refuse_non_finite(losses, norm, step, micro_batches)
        if step == 0:
            refuse_dead_adapters(parallel, whole=any(shape.of_rows for one in micro_batches for shape in one.attached))

    def load(self) -> tuple[TrainingRun, HostPeak]:
        """Load the model and create its optimizer with all its state; then seed dropout."""
        job = self.job
        with self.monitor.phase(LOAD), host_peak() as load_host:
            parallel = load_parallel(
                job.assets.directory,
                job.config,
                job.train,
                job.seed,
                job.world,
                job.device,
                adapter=job.assets.adapter,
                stage_layers=job.stage_layers,
                timeout=job.rank_timeout,
            )
            job.adapter_files.refuse_change()
            job.base_files.refuse_change()  # Verified before loading, which takes minutes for a large model.
            with torch.no_grad():
                parallel.run(partial(check_head, device=job.device))
                if job.plan.flat:
                    parallel.run(partial(check_packed_rows, device=job.device))
                if parallel.exchange is not None:
                    parallel.run(partial(check_context_parallel, exchange=parallel.exchange, device=job.device))
            optimizer = build_optimizer(parallel.local_shard, job.train, disk=job.disk)
        torch.manual_seed(job.seed + parallel.seed_rank)  # Loading draws numbers too, and not in every process.
        run = TrainingRun(
            parallel=parallel,
            optimizer=optimizer,
            scaler=loss_scaler(job.train),
            meter=self.meter,
            monitor=self.monitor,
            curves=self.curves,
            device=job.device,
            sharding=job.division,
        )
        return run, load_host
