"""The stage as one of its processes: job, checkpoint, training, what it writes."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from lean_finetune.config.declared_params import read_params
from lean_finetune.config.schema import Params, Run
from lean_finetune.core.atomic_files import read_json
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.distributed.launch import EndProcess, report_faults_once
from lean_finetune.distributed.processes import World, check_size, process_group
from lean_finetune.distributed.progress_barrier import wait_for_all
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.model.precision import precision_of
from lean_finetune.train.checkpoint.disk_space import Room
from lean_finetune.train.checkpoint.distributed_checkpoint import opened_by_all
from lean_finetune.train.checkpoint.scratch_dir import mark_finished, scratch_root
from lean_finetune.train.job import Paths, make_job, prepare_device
from lean_finetune.train.loop import TrainJob, train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.oom.oom_handler import Ending
from lean_finetune.train.oom.oom_report import Running, out_of_memory, read_forecast
from lean_finetune.train.oom.oom_state import SAVE, Failure, OutOfMemory
from lean_finetune.train.process.best_effort_output import never_refused
from lean_finetune.train.process.crash_marker import heartbeat
from lean_finetune.train.process.nccl_watchdog import link_errors, watched
from lean_finetune.train.process.ranks import (
    fault_of_link,
    most_of_all,
    started_ranks,
    take_place,
    told_of_waiting,
    where_in_steps,
)
from lean_finetune.train.process.stop_signals import Stop, stopped_by_signals
from lean_finetune.train.publish_outputs import publish_record, publish_weights
from lean_finetune.train.run_fingerprint import decided, run_parts
from lean_finetune.train.same_settings import parts_of_run, refuse_different_runs
from lean_finetune.train.train_metrics import train_metrics
from lean_finetune.train.unfinished_runs import choose_together, told_of_mixture


def run_stage(**paths: Path) -> None:
    """Fine-tune as planned; `paths` are those of `Paths`."""
    never_refused()  # Not before: an explanation that cannot be written is a fault.
    world = World.here()
    launches = scratch_root() / "ranks"
    with report_faults_once(world, launches) as end:
        params = read_params()
        patience = params.run.rank_timeout_seconds
        if started_ranks(params.hardware.num_gpus, launches, patience):
            return
        threads = params.run.cpu_threads or torch.get_num_threads()
        device = take_place(world, params.run.cpu_threads)
        with told_of_waiting(world, patience), process_group(world, device, patience):
            _run(params, world, device, threads, Paths(**paths), end)


def _run(
    params: Params, world: World, device: torch.device, threads: int, paths: Paths, end: EndProcess | None
) -> None:
    """The stage, as one of the processes of `world`, which have so many `threads` on this machine."""
    channel = ControlChannel(world, device)
    if world.size > 1:
        refuse_different_runs(parts_of_run(params, paths), channel)
    check_size(world, params.hardware.num_gpus)
    spec = ModelSpec.from_params(params, precision_of(params, paths.verdict))
    prepare_device(params, spec, device, world, paths, _told)
    job = make_job(params, spec, device, world, paths)
    meter, stop = make_meter(device), Stop()
    with ExitStack() as stack:
        beats = stack.enter_context(heartbeat(scratch_root() / "running", _told, tells=world.local_rank == 0))
        stack.enter_context(stopped_by_signals(stop))
        choice = choose_together(
            scratch_root(),
            lambda: run_parts(decided(params, job, paths.plan), _read(paths), device, threads),
            params.run.resume,
            _told,
            channel,
        )
        room, cut = _room(params, job, paths), job.sharing.layout
        keeper = stack.enter_context(
            opened_by_all(choice, run=params.run, stop=stop, told=_told, channel=channel, sharding=cut, room=room)
        )
        ending = _ending(job, params.run, paths, beats.begun)
        patience, where = params.run.rank_timeout_seconds, partial(where_in_steps, ending.place)

        def end_at_once(error: str) -> None:
            beats.forget()
            if end is not None:
                end(fault_of_link(error, world, patience, where))

        stack.enter_context(watched(link_errors(device), end_at_once))
        with told_of_waiting(world, patience, where), ending.told():
            result = train(job, meter, keeper, ending)
        with told_of_waiting(world, patience, where), keeper.publishing(), ending.told():
            with ending.place.inside(SAVE):
                publish_weights(result, job, params, paths)
            wait_for_all()  # The first process may have merged a large model.
            measured = most_of_all(meter.result(), result.parallel, device)
            numbers = {**train_metrics(result, measured, device), **told_of_mixture(choice)}
            if world.is_first:
                publish_record(result, numbers, params, paths)
        if world.is_first and "DVC_STAGE" in os.environ:
            mark_finished(choice.directory, paths.metrics)


def _read(paths: Paths) -> dict[str, Path]:
    """The files whose content decides the result, by name; the plan and the verdict do so by what they say."""
    return {
        "tokens": paths.tokens,
        "model": paths.model_lock,
        "tokenizer": paths.tokenizer_lock,
        "data": paths.data_lock,
    }


def _room(params: Params, job: TrainJob, paths: Paths) -> Room:
    """What the end of the run will write; a merged model is as large as its base."""
    merged = sum((job.model_directory / name).stat().st_size for name in read_json(paths.model_lock)["files"])
    enforce = read_json(paths.verdict)["enforce"]
    return Room(out=paths.out, merged_bytes=merged if params.train.merge else 0, enforce=enforce, told=_told)


def _ending(job: TrainJob, run: Run, paths: Paths, begun: Callable[[int], None]) -> Ending:
    """What is done when memory ends; what was predicted is read then."""
    name = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "this machine"
    split = run.oom_recovery == "split"
    running = Running(
        method=job.model_spec.method,
        precision=job.model_spec.precision,
        optimizer=job.optim_spec.name,
        can_split=not (split or job.world.size > 1 or job.step_spec.optimizer_in_backward),
    )

    def report(failure: Failure) -> OutOfMemory:
        forecast = read_forecast(read_json(paths.estimate), paths.verdict.parent)
        return out_of_memory(failure, forecast, device=name, running=running, record=scratch_root() / "oom.json")

    return Ending(
        job.device,
        split=split,
        updates_in_backward=job.step_spec.optimizer_in_backward,
        report=report,
        begun=begun,
    )


def _told(line: str) -> None:
    """A line for the user, above the progress bar where there is one."""
    tqdm.write(line, file=sys.stderr)
