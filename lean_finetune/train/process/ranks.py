"""One run in several processes: how the stage starts them, where each computes, what all have measured."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from lean_finetune.distributed.launch import ConnectionLost, WaitTimedOut, launch
from lean_finetune.distributed.processes import World, check_devices, under_torchrun
from lean_finetune.distributed.progress_barrier import BarrierTimeout
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.monitor.measured_peak import LOAD, Measured
from lean_finetune.train.oom.oom_state import Whereabouts
from lean_finetune.train.process.nccl_watchdog import TIMEOUT
from lean_finetune.train.process.training_device import training_device

GLOO = ", and too much: what gloo gives back in threads of its own is not seen"


def started_ranks(num_gpus: int, directory: Path, grace_seconds: float) -> bool:
    """Run this command in as many processes as there are GPUs to use, where that takes several; True once they ended.

    Args:
        num_gpus: hardware.num_gpus.
        directory: of what the processes of all launches say.
        grace_seconds: how long they may take to end after a signal: to finish a step and keep it.

    Raises:
        UserError: one of them failed.
    """
    if num_gpus == 1 or under_torchrun():
        return False
    check_devices(num_gpus)
    launch("stages.train", sys.argv[1:], processes=num_gpus, directory=directory, grace_seconds=grace_seconds)
    return True


def take_place(world: World, cpu_threads: int | None) -> torch.device:
    """Have this process take its GPU, or its share of the cores; where it computes.

    Raises:
        UserError: there are fewer GPUs than processes.
    """
    check_devices(world.local_size)
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
    torch.set_num_threads(cpu_threads or max(1, torch.get_num_threads() // world.local_size))
    return training_device()


WAITED_TOO_LONG = re.compile("timed out|timeout", re.IGNORECASE)
LINK_BROKE = re.compile(
    "connection (closed|reset|refused)|broken pipe|communicator was aborted|ncclRemoteError", re.IGNORECASE
)
OUTSIDE = "before or after its steps"


@contextmanager
def told_of_waiting(world: World, seconds: float, where: Callable[[], str] = lambda: OUTSIDE) -> Iterator[None]:
    """Inside, a process that waited too long for the others says so, and where.

    Raises:
        WaitTimedOut: naming the process, how long it waited and where.
        ConnectionLost: the others had given up before, or ended.
    """
    try:
        yield
    except RuntimeError as error:
        if world.size == 1:
            raise
        if LINK_BROKE.search(str(error)) and not WAITED_TOO_LONG.search(str(error)):
            raise ConnectionLost(str(error)) from error
        if not WAITED_TOO_LONG.search(str(error)):
            raise
        raise WaitTimedOut(
            f"run.rank_timeout_seconds: no process may wait longer for the others; process {world.rank} of "
            f"{world.size} waited {seconds:g} s {where()}; raise it if one may take so long",
            absent=error.ranks if isinstance(error, BarrierTimeout) else (),
        ) from error


def fault_of_link(error: str, world: World, seconds: float, where: Callable[[], str]) -> Exception:
    """What an error that NCCL named (`lean_finetune.train.process.nccl_watchdog`) says of the others."""
    try:
        with told_of_waiting(world, seconds, where):
            raise RuntimeError("timed out" if error == TIMEOUT else f"broken pipe: NCCL's {error}")
    except (WaitTimedOut, ConnectionLost) as fault:
        return fault


def where_in_steps(place: Whereabouts) -> str:
    """The phase and the step that a run is in, for people."""
    step = "before the first step" if place.step is None else f"of optimizer step {place.step}"
    return f"in phase {place.phase_name} {step}"


def most_of_all(measured: Measured, parallel: ParallelModel, device: torch.device) -> Measured:
    """The largest of each figure over all processes: what a GPU must have room for."""
    if parallel.size == 1:
        return measured
    by_phase = {f"phase {name}": size for name, size in measured.peak_bytes_by_phase.items()}
    figures: Mapping[str, int | None] = {
        "peak": measured.peak_bytes,
        "reserved": measured.peak_reserved_bytes,
        **by_phase,
    }
    known = sorted(name for name, figure in figures.items() if figure is not None)
    of_ranks = torch.zeros(parallel.size, len(known), dtype=torch.int64, device=device)
    of_ranks[parallel.rank] = torch.tensor([figures[name] for name in known], dtype=torch.int64)
    of_ranks = parallel.sum_over_ranks(of_ranks)
    most = dict(zip(known, of_ranks.amax(0).tolist(), strict=True))
    steps = [place for place, name in enumerate(known) if name in by_phase and name != f"phase {LOAD}"]
    return Measured(
        peak_bytes=most.get("peak"),
        peak_bytes_by_phase={name: most[f"phase {name}"] for name in measured.peak_bytes_by_phase},
        peak_reserved_bytes=most.get("reserved"),
        how=f"{measured.how}; the most of {parallel.size} processes{GLOO if device.type == 'cpu' else ''}",
        peak_bytes_by_rank=tuple(of_ranks[:, steps].amax(1).tolist()) if steps else (),
    )
