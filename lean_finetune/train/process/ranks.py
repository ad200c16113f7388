"""Processes of a distributed run: start them, choose their devices, explain their timeouts, combine their peaks."""

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from lean_finetune.config.schema import Params, Run
from lean_finetune.distributed.control_messages import ControlChannel
from lean_finetune.distributed.faults import HOSTS, ConnectionLost, EndProcess, OtherNodeEnded, WaitTimedOut
from lean_finetune.distributed.launch import launch
from lean_finetune.distributed.nodes import Node
from lean_finetune.distributed.processes import World, attempt, check_devices, ended_key, under_torchrun, uses_cuda
from lean_finetune.distributed.progress_barrier import BarrierTimeout
from lean_finetune.train.monitor.measured_peak import MeasuredPeaks
from lean_finetune.train.oom.oom_state import RunPosition
from lean_finetune.train.process.training_device import check_processes, training_device

GLOO_NOTE = "; too high, because buffers that gloo frees in its own threads are not seen"
TIMED_OUT = re.compile("timed out|timeout", re.IGNORECASE)
CONNECTION_LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|communicator was aborted|ncclRemoteError", re.IGNORECASE
)


def launch_ranks(params: Params, directory: Path) -> bool:
    """Run this command in one process per GPU of this node, if there are several GPUs; return True once all have ended.

    Processes exchange messages about their end in `directory`, and have `run.rank_timeout_seconds` to finish a step and
    write a checkpoint after a signal.

    Raises:
        UserError: one of them failed, or other nodes did not come.
    """
    num_gpus, run = params.hardware.num_gpus, params.run
    if num_gpus == 1 or under_torchrun():
        return False
    processes = num_gpus // run.nodes
    check_devices(processes, run.device)
    check_processes(processes, run.device)
    launch(
        "stages.train",
        sys.argv[1:],
        processes=processes,
        directory=directory,
        grace_seconds=run.rank_timeout_seconds,
        node=Node.here(params),
        max_restarts=run.max_restarts,
    )
    return True


def claim_device(world: World, run: Run) -> torch.device:
    """Select this process's GPU, or its share of the CPU cores, and return the device."""
    check_devices(world.local_size, run.device)
    if uses_cuda(run.device):
        torch.cuda.set_device(world.local_rank)
    torch.set_num_threads(run.cpu_threads or max(1, torch.get_num_threads() // world.local_size))
    return training_device(run.device)


@contextmanager
def explain_timeouts(
    world: World, seconds: float, where: Callable[[], str] = lambda: "before or after its steps"
) -> Iterator[None]:
    """Turn a timed-out or broken connection inside the block into an error that names process, time and place.

    Raises:
        WaitTimedOut: this process waited too long for the others.
        ConnectionLost: the others had given up before, or ended.
    """
    try:
        yield
    except RuntimeError as error:
        if world.size == 1:
            raise
        if not TIMED_OUT.search(str(error)):
            if CONNECTION_LOST.search(str(error)):
                raise ConnectionLost(str(error)) from error
            raise
        raise WaitTimedOut(
            f"run.rank_timeout_seconds: limits how long a process waits for the others; process {world.rank} of "
            f"{world.size} waited {seconds:g} s {where()}; raise it if one process may take longer",
            world,
            absent=error.ranks if isinstance(error, BarrierTimeout) else (),
        ) from error


POLL_SECONDS = 1.0
ENDED_SECONDS = 2.0
"""Time for a process to notice a broken connection and report it, before it is killed."""
NO_ERROR = "SUCCESS"
TIMEOUT = "TIMEOUT"

Errors = Callable[[], list[str]]
"""Returns the error names of all process groups; `NO_ERROR` for a group without one."""


def nccl_errors(device: torch.device) -> Errors | None:
    """Return a function that queries NCCL; None on CPUs, where gloo raises its errors."""
    if device.type != "cuda" or not dist.is_initialized():
        return None
    return lambda: [group._get_backend(device).get_error().name for group in list(dist.distributed_c10d._world.pg_map)]


@contextmanager
def watch_nccl(errors: Errors | None, end: Callable[[str], None]) -> Iterator[None]:
    """Poll `errors` in a thread and call `end` with the first one; it must end the process.

    Collectives on GPUs are asynchronous, so no Python call fails when another process hangs. After the timeout of the
    process group PyTorch's watchdog thread records an error, waits for its debug dump
    (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, at least 15 s), and ends the process by SIGABRT; the launcher would blame that
    process, which only waited. With TORCH_NCCL_BLOCKING_WAIT no collective could overlap with computation.

    Not tested on GPUs: the tests simulate NCCL's error.
    """
    if errors is None:
        yield
        return
    finished = threading.Event()

    def poll() -> None:
        while not finished.wait(POLL_SECONDS):
            for error in errors():
                if error != NO_ERROR:
                    end(error)
                    return

    thread = threading.Thread(target=poll, name="nccl_watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


@contextmanager
def watch_other_nodes(world: World, seconds: float, end: EndProcess | None) -> Iterator[None]:
    """End this process soon after the processes of another node, or after `seconds` without an answer of node 0.

    Otherwise NCCL's collectives would wait until their timeout, and calls of the store for a quarter of an hour.
    """
    if end is None or "," not in os.environ.get(HOSTS, ""):
        yield
        return
    finished = threading.Event()
    silent = WaitTimedOut(f"run.rank_timeout_seconds: node 0 did not answer for {seconds:g} s", world, absent=[0])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if attempt():  # Ends processes of the attempt before that still run on other nodes.
        store.set(ended_key(attempt() - 1), "")

    def poll() -> None:
        while not finished.wait(POLL_SECONDS):
            timer = threading.Timer(seconds, end, [silent])
            timer.start()
            fault: Exception | None = None
            try:
                if store.check([ended_key(attempt())]):
                    fault = OtherNodeEnded("the processes of another node have ended")
            except RuntimeError:
                fault = ConnectionLost("the store of node 0 has ended")
            timer.cancel()
            if fault is not None and not finished.wait(ENDED_SECONDS):
                end(fault)

    threading.Thread(target=poll, name="node_watch", daemon=True).start()
    try:
        yield
    finally:
        finished.set()


def nccl_fault(error: str, world: World, seconds: float, where: Callable[[], str]) -> Exception:
    """Return the exception for an error that `watch_nccl` found."""
    try:
        with explain_timeouts(world, seconds, where):
            raise RuntimeError("timed out" if error == TIMEOUT else f"broken pipe: NCCL's {error}")
    except (WaitTimedOut, ConnectionLost) as fault:
        return fault


def describe_position(position: RunPosition) -> str:
    """Name the phase and step of a run in a message."""
    step = "before the first step" if position.step is None else f"of optimizer step {position.step}"
    return f"in phase {position.phase_name} {step}"


def stopping_line(name: str, position: RunPosition, processes: int) -> str:
    """What happens after the first stop signal, called `name`, in one of the `processes` of a run."""
    single = {"heldout": "the held-out losses", "checkpoint": "this checkpoint", "optimizer": "this update"}
    after = "this step" if processes > 1 else single.get(position.phase_name, "this micro-batch")
    return f"train: {name}: stopping after {after}, with a checkpoint of the finished steps; again to stop now"


def largest_over_ranks(measured: MeasuredPeaks, channel: ControlChannel) -> MeasuredPeaks:
    """Return the largest of each figure over all processes: what every GPU must have room for."""
    if channel.size == 1:
        return measured
    by_rank = [MeasuredPeaks(**json.loads(text)) for text in channel.gather_text(json.dumps(asdict(measured)))]

    def largest(figures: Iterable[int | None]) -> int | None:
        return max((figure for figure in figures if figure is not None), default=None)

    phases, note = measured.peak_bytes_by_phase, GLOO_NOTE if channel.device.type == "cpu" else ""
    return MeasuredPeaks(
        peak_bytes=largest(one.peak_bytes for one in by_rank),
        peak_bytes_by_phase={name: max(one.peak_bytes_by_phase[name] for one in by_rank) for name in phases},
        peak_reserved_bytes=largest(one.peak_reserved_bytes for one in by_rank),
        how=f"{measured.how}; the largest of {channel.size} processes{note}",
        peak_bytes_by_rank=tuple(one.step_peak_bytes for one in by_rank if one.step_peak_bytes is not None),
    )
