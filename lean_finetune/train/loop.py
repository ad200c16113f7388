"""The training loop: the plan's steps in order, each the one training step on real tensors."""

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from lean_finetune.distributed.processes import SINGLE_PROCESS, World
from lean_finetune.distributed.sharding_modes import ShardSpec, make_parallel
from lean_finetune.model.load_model import load_model, uninitialized_model
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.plan.worst_micro_batches import worst_steps
from lean_finetune.step.activation_offload import ActivationOffload
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import check_head, check_joined_rows
from lean_finetune.step.loss_scaling import LossScaler
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import OptimSpec, build_optimizer, learning_rate
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.step.training_step import StepResult, StepSpec, training_step
from lean_finetune.train.checkpoint.loop_hooks import NOTHING_KEPT, Keeper
from lean_finetune.train.checkpoint.rng_state import redrawn_after_fault
from lean_finetune.train.checkpoint.training_state import Running
from lean_finetune.train.heldout_loss import heldout_batches, heldout_loss
from lean_finetune.train.monitor.finite_checks import (
    Diverged,
    refuse_broken_weights,
    refuse_dead_adapters,
    refuse_non_finite,
)
from lean_finetune.train.monitor.growth_advice import Settings
from lean_finetune.train.monitor.host_peak import HostPeak, host_peak
from lean_finetune.train.monitor.measured_peak import LOAD, Meter
from lean_finetune.train.monitor.memory_monitor import MEMORY_COLUMNS, Monitor, memory_text
from lean_finetune.train.oom.batch_stream import Feed
from lean_finetune.train.oom.oom_handler import Ending, plain_ending, splits
from lean_finetune.train.oom.oom_state import CHECKPOINT, HELDOUT

CONTROL_STEPS = 4
"""Steps measured besides those that can be the worst."""

CURVE_COLUMNS = (
    "step",
    "epoch",
    "loss",
    "heldout_loss",
    "lr",
    "grad_norm",
    "tokens",
    "supervised_tokens",
    "padded_tokens",
    "micro_batches",
    "largest_micro_batch_tokens",
    "longest_row",
    *MEMORY_COLUMNS,
    "measured",
    "seconds",
)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Everything one run of the loop needs."""

    model_directory: Path
    plan: Plan
    rows: TokenRows
    heldout: TokenRows
    pad_id: int
    model_spec: ModelSpec
    optim_spec: OptimSpec
    step_spec: StepSpec
    offload: ActivationOffload | None
    """Where activations are between forward and backward; None = on the device."""
    heldout_every_steps: int | None
    heldout_rows: int
    measured_steps: frozenset[int]
    """Steps whose peak memory is measured; always holds the first."""
    loader_threads: int
    """Threads that read batches ahead."""
    device: torch.device
    progress: bool
    world: World = SINGLE_PROCESS
    sharing: ShardSpec = ShardSpec(mode="none")
    """How the processes of `world` share the model."""
    settings: Settings = field(default_factory=dict)
    """Parameters of the run by their dotted names, those that advice on memory proposes to change."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The trained model and what was seen on the way."""

    parallel: ParallelModel
    curves: list[dict[str, Any]]
    """One row per optimizer step, keys `CURVE_COLUMNS`."""
    skipped_steps: int | None
    """Updates left out because fp16 gradients overflowed; None where the loss is not scaled."""
    memory_by_phase: Mapping[str, Mapping[str, int | None]]
    """The most seen at the ends of each phase."""
    oom_splits: Mapping[str, int] | None
    """How far steps were cut smaller than planned because memory ended; None where none was."""
    load_host: HostPeak
    """Memory of the host while the model was loaded."""
    settings: Settings
    """Those of the job."""

    @property
    def model(self) -> nn.Module:
        """The trained model; where it is shared, this process's part."""
        return self.parallel.model


def measured_steps(plan: Plan, lengths: np.ndarray) -> frozenset[int]:
    """The steps whose peak is measured where measuring costs time: those said to be the worst, and controls.

    The controls (spread evenly over the run) are chosen without regard to size, so that a worst step overlooked by the
    prediction has a chance to show.
    """
    last = len(plan.steps) - 1
    controls = {round(last * number / CONTROL_STEPS) for number in range(1, CONTROL_STEPS + 1)}
    return frozenset({*worst_steps(plan, lengths), *controls})


def train(job: TrainJob, meter: Meter, keeper: Keeper = NOTHING_KEPT, ending: Ending | None = None) -> TrainResult:
    """Load the model and run every step of the plan that `keeper` has not kept from an earlier process.

    The steps that can be the worst are measured, each in a window of its own; that of the first step, which is planned
    to hold the largest batch, also spans the model's loading. When memory ends in a step, `ending` says what is done;
    without one it is told.

    Raises:
        UserError: the model cannot be loaded, a loss or gradient is not finite, or memory ended in a step.
        Stopped: the keeper was asked to stop.
    """
    monitor, total = Monitor(job.device, meter), len(job.plan.steps)
    ending = ending or plain_ending(job.device, updates_in_backward=job.step_spec.optimizer_in_backward)
    feed = Feed(
        job.rows,
        job.plan,
        start_step=keeper.first_step,
        rank=job.world.rank,
        pad_id=job.pad_id,
        pin_memory=job.device.type == "cuda",
        threads=job.loader_threads,
    )
    with (
        closing(feed),
        tqdm(total=total, initial=keeper.first_step, desc="train", unit="step", disable=not job.progress) as bar,
        ExitStack() as first_window,
    ):
        if keeper.measures_load:
            first_window.enter_context(meter.window(f"step {keeper.first_step}"))
        with ending.place.inside(LOAD):
            run, load_host = _load(job, meter, monitor)
        ending.place.holds(run.model, run.optimizer)
        keeper.resume(run, total)
        with keeper.keeping(run), ending.told():
            for step in range(run.step, total):
                with first_window if keeper.measures_load and step == keeper.first_step else _window(job, meter, step):
                    row = _run_step(job, run, feed, keeper, monitor, ending)
                row |= monitor.step()
                with ending.place.inside(HELDOUT):
                    _maybe_heldout(job, run.parallel, step, row, bar)
                run.curves.append(row)
                if job.world.rank == 0:  # What grows in one process grows in all.
                    monitor.tell_growth(run.curves, job.settings, lambda line: bar.write(line, file=sys.stderr))
                _show(bar, row)
                with ending.place.inside(CHECKPOINT):
                    keeper.step_done(run)
            refuse_broken_weights(run.parallel, total)
            with ending.place.inside(CHECKPOINT):
                keeper.all_done(run)
    return TrainResult(
        parallel=run.parallel,
        curves=run.curves,
        skipped_steps=None if run.scaler is None else run.scaler.skipped_steps,
        memory_by_phase=monitor.by_phase(),
        oom_splits=splits(job.plan, run.curves),
        load_host=load_host,
        settings=job.settings,
    )


def _load(job: TrainJob, meter: Meter, monitor: Monitor) -> tuple[Running, HostPeak]:
    """The model and its optimizer, state made, and what the host held meanwhile; dropout is seeded from here on."""
    with monitor.phase("load"), host_peak() as load_host:
        directory, where = job.model_directory, job.sharing.load_device(job.device)
        if job.sharing.reads_weights(job.world, job.model_spec.method):
            model = load_model(directory, job.model_spec, where)
        else:
            model = uninitialized_model(read_config(directory), job.model_spec, where)
        parallel = make_parallel(model, job.world, job.sharing, job.device)
        with torch.no_grad():
            parallel.run(partial(check_head, device=job.device))
            if job.plan.flat:
                parallel.run(partial(check_joined_rows, device=job.device))
        optimizer = build_optimizer(parallel.owned, job.optim_spec)
    torch.manual_seed(job.model_spec.seed + job.world.rank)
    scaler = LossScaler() if job.model_spec.scales_loss else None
    run = Running(
        parallel=parallel,
        optimizer=optimizer,
        scaler=scaler,
        meter=meter,
        monitor=monitor,
        curves=[],
        device=job.device,
        sharding=job.sharing.layout,
    )
    return run, load_host


def _window(job: TrainJob, meter: Meter, step: int) -> AbstractContextManager[None]:
    """The window of a step that is measured."""
    return meter.window(f"step {step}") if step in job.measured_steps else nullcontext()


def _run_step(
    job: TrainJob, run: Running, feed: Feed, keeper: Keeper, monitor: Monitor, ending: Ending
) -> dict[str, Any]:
    """One optimizer step, and its row of the curves."""
    step, optimizer = run.step, run.optimizer
    supervised = sum(micro_batch.supervised for micro_batch in job.plan.steps[step])
    lr = learning_rate(step, len(job.plan.steps), job.optim_spec)
    for group in optimizer.param_groups:
        group["lr"] = lr

    def attempt(micro_batches: list[MicroBatch], batches: Iterator[Batch]) -> StepResult:
        def guard(losses: list[torch.Tensor], norm: torch.Tensor) -> None:
            of_all = job.plan.steps[step] if job.world.size > 1 else micro_batches
            refuse_non_finite(losses, norm, step, of_all)
            if step == 0:
                refuse_dead_adapters(run.parallel)

        with redrawn_after_fault(job.device):
            return training_step(
                run.model,
                optimizer,
                (batch.to(job.device) for batch in keeper.between(batches)),
                supervised_tokens=supervised,
                model_spec=job.model_spec,
                spec=job.step_spec,
                phase=ending.place.watching(monitor.phase),
                guard=guard,
                scaler=run.scaler,
                offload=job.offload,
                parallel=run.parallel,
                micro_batches=len(micro_batches),
            )

    start = time.perf_counter()
    result, micro_batches = ending.step(step, feed, run.model, attempt)
    if job.world.size > 1:
        micro_batches = job.plan.steps[step]
    # Reading the scalars waits for the device, so the time is that of the whole step.
    loss, grad_norm = result.loss.item(), result.grad_norm.item()
    seconds = time.perf_counter() - start
    return {
        "step": step,
        "epoch": micro_batches[0].epoch,
        "loss": loss,
        "lr": lr,
        "grad_norm": grad_norm,
        "tokens": sum(int(job.rows.lengths[m.rows].sum()) for m in micro_batches),
        "supervised_tokens": supervised,
        "padded_tokens": sum(micro_batch.padded_tokens for micro_batch in micro_batches),
        "micro_batches": len(micro_batches),
        "largest_micro_batch_tokens": max(micro_batch.padded_tokens for micro_batch in micro_batches),
        "longest_row": max(int(job.rows.lengths[m.rows].max(initial=0)) for m in micro_batches),
        "measured": step in job.measured_steps,
        "seconds": seconds,
    }


def _show(bar: Any, row: dict[str, Any]) -> None:
    """Loss, speed and memory in the progress bar."""
    speed = row["tokens"] / row["seconds"]
    bar.set_postfix_str(f"loss {row['loss']:.4f}, {speed:,.0f} tokens/s, {memory_text(row)}", refresh=False)
    bar.update()


def _maybe_heldout(job: TrainJob, parallel: ParallelModel, step: int, row: dict[str, Any], bar: Any) -> None:
    """Add the held-out loss to the step's row when it is due, and after the last step."""
    every = job.heldout_every_steps
    if every is None or ((step + 1) % every and step + 1 != len(job.plan.steps)):
        return
    budget = max(micro_batch.padded_tokens for micro_batch in job.plan.steps[0])
    batches = heldout_batches(job.heldout, job.heldout_rows, budget, job.pad_id)
    # Where training's logits are not cut into chunks, a micro-batch's tokens bound those of a longer held-out row.
    chunk = job.step_spec.loss_chunk or budget
    loss = heldout_loss(parallel, batches, job.pad_id, job.model_spec, chunk, job.device)
    if not math.isfinite(loss):
        raise Diverged(
            f"train.lr: held-out loss must be finite; it is {loss} after optimizer step {step}; lower train.lr"
        )
    row["heldout_loss"] = loss
    bar.write(f"step {step + 1}: loss {row['loss']:.4f}, held-out loss {row['heldout_loss']:.4f}")
