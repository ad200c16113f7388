"""Run stage train in one of its processes: prepare, choose a checkpoint, train, write the outputs."""

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from cuda_memory.terminal import echo
from lean_finetune.config.declared_params import read_params
from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_sealed
from lean_finetune.core.progress import write_line
from lean_finetune.distributed.faults import (
    EndProcess,
    explain_timeouts,
    report_faults_once,
    watch_nccl,
    watch_other_nodes,
)
from lean_finetune.distributed.launch import Node, launch
from lean_finetune.distributed.processes import (
    ControlChannel,
    World,
    check_size,
    process_group,
    sibling_ended,
    under_torchrun,
    wait_for_all,
)
from lean_finetune.model.precision import precision_of, resolved
from lean_finetune.train.callbacks.trackers import refuse_missing_trackers
from lean_finetune.train.checkpoint.checkpointer import Checkpointer, DiskSpace
from lean_finetune.train.checkpoint.scratch_dir import CrashMarker, RunDirectory, crash_marker, scratch_root
from lean_finetune.train.job import TrainJob
from lean_finetune.train.kept_step import kept_lines
from lean_finetune.train.loop import train
from lean_finetune.train.make_job import Paths, make_job, prepare_device, refuse_missing_inputs
from lean_finetune.train.monitor.measured_peak import largest_over_ranks, make_meter
from lean_finetune.train.monitor.memory_monitor import SAVE, OomFailure
from lean_finetune.train.monitor.out_of_memory import (
    OOM_FILE,
    MemorySnapshots,
    OomHandler,
    TrainingOutOfMemory,
    oom_error,
    read_prediction,
)
from lean_finetune.train.process.stop_signals import (
    StopRequest,
    handle_signals,
    ignore_output_errors,
    stopping_line,
)
from lean_finetune.train.process.training_device import check_disk, check_processes, claim_device, refuse_absent_gpu
from lean_finetune.train.publish_outputs import publish_record, publish_weights, train_metrics
from lean_finetune.train.resume_run import (
    choose_for_all_ranks,
    open_checkpointer,
    refuse_different_runs,
    resumed_figures,
    run_fingerprint,
)


def run_stage(**paths: Path) -> None:
    """Fine-tune as planned; `paths` are those of `Paths`."""
    ignore_output_errors()
    world = World.here()
    launches = scratch_root() / "ranks"
    with report_faults_once(world, launches) as end:
        params = read_params()
        refuse_missing_trackers(params.run.trackers)
        timeout = params.run.rank_timeout_seconds
        files = Paths(**paths)
        if files.estimate.exists():  # Else `refuse_missing_inputs` says what is missing on which node.
            refuse_absent_gpu(params.run.device, read_sealed(files.estimate))
        if params.hardware.num_gpus > 1 and not under_torchrun():
            _launch_ranks(params, launches)
            return
        threads = params.run.cpu_threads or torch.get_num_threads()
        device = claim_device(world, params.run)
        alone = params.train.offload == "parameters"
        with (
            watch_other_nodes(timeout, end),
            explain_timeouts(world, timeout),
            process_group(world, device, timeout, alone=alone),
        ):
            _run(params, world, device, threads, files, end)


def _launch_ranks(params: Params, launches: Path) -> None:
    """Run this command in one process for each GPU of this node, until all have ended; see `launch`."""
    run = params.run
    processes = params.hardware.num_gpus // run.nodes
    check_processes(processes, run.device)
    launch(
        "stages.train",
        sys.argv[1:],
        processes=processes,
        directory=launches,
        grace_seconds=run.rank_timeout_seconds,
        node=Node.here(params),
        max_restarts=run.max_restarts,
    )


def _run(
    params: Params, world: World, device: torch.device, threads: int, paths: Paths, end: EndProcess | None
) -> None:
    """Run the stage in one process of `world`; `threads` is the number of CPU threads of this machine."""
    channel = ControlChannel(world, device)
    refuse_missing_inputs(paths, world)
    fingerprint = run_fingerprint(params, paths, device, threads)
    restarts = {"run.max_restarts": params.run.max_restarts}  # Agents restart together or not at all.
    refuse_different_runs({**fingerprint, "run": restarts}, channel)
    check_size(world, params.hardware.num_gpus)
    section = resolved(params, precision_of(params, paths.precision))
    prepare_device(params, section, device, world, paths, _notify)
    snapshots = MemorySnapshots(params.run.memory_snapshot, device, scratch_root(), world, _notify)
    job = make_job(params, section, device, world, paths)
    if job.note is not None and world.is_first:
        echo(job.note)
    stop = StopRequest()
    with ExitStack() as stack:
        stack.callback(snapshots.close)
        marker = stack.enter_context(crash_marker(scratch_root() / "running", _notify, reports=world.local_rank == 0))
        oom_handler = _oom_handler(job, paths, marker, snapshots)

        def acknowledge(name: str) -> None:
            if not sibling_ended():
                _notify(stopping_line(name, oom_handler.position, world.size))

        stack.enter_context(handle_signals(stop, acknowledge))
        where = choose_for_all_ranks(scratch_root(), fingerprint, params.run.resume, _notify, channel)
        checkpoints = stack.enter_context(
            open_checkpointer(
                where,
                run=params.run,
                stop=stop,
                notify=_notify,
                channel=channel,
                sharding=job.division,
                disk_space=_disk_space(params, job, paths),
            )
        )
        position = partial(str, oom_handler.position)
        timeout = params.run.rank_timeout_seconds

        def end_with_nccl(fault: Exception) -> None:
            marker.remove()
            if end is not None:
                end(fault)

        stack.enter_context(watch_nccl(device, world, timeout, position, end_with_nccl))
        stack.enter_context(explain_timeouts(world, timeout, position))
        _train_and_publish(params, job, paths, checkpoints, oom_handler, where)


def _train_and_publish(
    params: Params,
    job: TrainJob,
    paths: Paths,
    checkpoints: Checkpointer,
    oom_handler: OomHandler,
    where: RunDirectory,
) -> None:
    """Train, then write weights, curves, model card and metrics."""
    meter = make_meter(job.device)
    if job.disk is not None:  # Here: its message names the checkpoint that a resumed run goes on from.
        with checkpoints.naming_last_checkpoint():
            check_disk(read_sealed(paths.estimate)["disk_bytes_predicted"] * job.world.local_size, job.disk.directory)
    with oom_handler.reported():
        result = train(job, meter, checkpoints, oom_handler)
    with checkpoints.naming_last_checkpoint(), oom_handler.reported():
        with oom_handler.position.phase(SAVE):
            publish_weights(result, job, params, paths)
        wait_for_all()  # The first process may have merged a large model.
        measured = largest_over_ranks(meter.result(), ControlChannel(job.world, job.device))
        figures = {**train_metrics(job, result, measured), **resumed_figures(where), "lr": job.train.lr}
        if job.world.is_first:
            publish_record(result, figures, params, paths)
            for line in kept_lines(job.train, figures, len(job.plan.steps)):
                _notify(line)
    checkpoints.mark_finished(paths.metrics if job.world.is_first and "DVC_STAGE" in os.environ else None)


def _disk_space(params: Params, job: TrainJob, paths: Paths) -> DiskSpace:
    """Describe what the end of the run will write; a merged model is as large as its base."""
    merged = sum((job.assets.directory / name).stat().st_size for name in job.assets.lock["files"])
    enforce = read_sealed(paths.verdict)["enforce"]
    return DiskSpace(
        out=paths.out,
        merged_bytes=merged if params.train.merge else 0,
        enforce=enforce,
        notify=_notify,
        kept=1 if params.train.keep == "best" else 0,
    )


def _oom_handler(job: TrainJob, paths: Paths, marker: CrashMarker, snapshots: MemorySnapshots) -> OomHandler:
    """Create the handler; it reads the prediction only when memory runs out."""
    name = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "this machine"
    if job.world.size > 1:
        name = f"{name} (process {job.world.rank})"
    snapshot: Path | None = None

    def on_step(step: int) -> None:
        marker.step_started(step)
        snapshots.step_started()

    def on_failure() -> None:
        nonlocal snapshot
        snapshot = snapshots.write(OOM_FILE)

    def report(failure: OomFailure) -> TrainingOutOfMemory:
        prediction = read_prediction(read_sealed(paths.estimate), paths.verdict.parent)
        return oom_error(
            failure,
            prediction,
            device=name,
            train=job.train,
            record=scratch_root() / "oom.json",
            snapshot=snapshot,
        )

    return OomHandler(
        job.device,
        updates_in_backward=job.train.optimizer_in_backward,
        report=report,
        on_step=on_step,
        on_failure=on_failure,
    )


def _notify(line: str) -> None:
    """Write a line for the user, above the progress bar if there is one."""
    write_line(line)
