"""The processes of a run, one per GPU: their ranks, and joining their process group."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lean_finetune.config.field_types import DeviceChoice
from lean_finetune.core.errors import UserError
from lean_finetune.core.signals import default_signal_actions
from lean_finetune.distributed.progress_barrier import progress_barrier


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank of this process, and the number of processes of the run."""

    rank: int
    """Among all processes, from 0."""
    size: int
    """Number of processes of the run."""
    local_rank: int
    """Among the processes on this node, from 0: the index of its GPU."""
    local_size: int
    """Number of processes on this node."""

    @classmethod
    def here(cls) -> "World":
        """Read torchrun's environment; without torchrun this is a single process."""
        if not under_torchrun():
            return SINGLE_PROCESS
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
        return cls(rank=rank, size=size, local_rank=local_rank, local_size=local_size)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which shows progress and writes the outputs."""
        return self.rank == 0


SINGLE_PROCESS = World(rank=0, size=1, local_rank=0, local_size=1)


def listen_on_loopback() -> None:
    """Let gloo and NCCL, here and in processes that this one starts, listen where no other machine can connect.

    Neither asks who connects. On its own, gloo listens on the address that this machine's name resolves to.
    """
    if sys.platform == "linux":
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # NCCL takes a name for a prefix.


def under_torchrun() -> bool:
    """Whether torchrun's agent started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def attempt() -> int:
    """How often torchrun's agent has restarted the processes of this run (run.max_restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def ended_key(attempt: int) -> str:
    """Key of the store of torchrun's agent that exists once a node's processes of an attempt have ended."""
    return f"attempts/{attempt}/ended"


def check_size(world: World, num_gpus: int) -> None:
    """Raise UserError if the number of processes is not the planned one."""
    if world.size != num_gpus:
        raise UserError(
            f"hardware.num_gpus: must be the number of processes; got {num_gpus} where torchrun started {world.size}; "
            f"set hardware.num_gpus={world.size}, or start as many processes (python -m stages.train does)"
        )


def uses_cuda(choice: DeviceChoice) -> bool:
    """Whether this machine computes on CUDA devices; `choice` is run.device."""
    return choice == "auto" and torch.cuda.is_available()


def check_devices(processes: int, choice: DeviceChoice) -> None:
    """Raise UserError for more processes on this node than it has GPUs; without GPUs, processes share the CPU."""
    if uses_cuda(choice) and processes > torch.cuda.device_count():
        raise UserError(
            f"hardware.num_gpus: must be at most the GPUs here; got {processes} for {torch.cuda.device_count()}; lower "
            "hardware.num_gpus, or use several machines (run.nodes)"
        )


@contextmanager
def process_group(world: World, device: torch.device, timeout_seconds: float, *, alone: bool = False) -> Iterator[None]:
    """Join torch.distributed's process group for the length of the block.

    A single process joins nothing, or with `alone` a group of itself, in which FSDP2 works.

    `timeout_seconds` is the longest wait for another process; at a progress barrier, the longest time without progress.
    """
    gpu = device.type == "cuda"
    if world.size == 1:
        if alone:
            listen_on_loopback()
            dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        if alone:
            dist.destroy_process_group()
        return
    if gpu:  # The least time between a fault that NCCL's watchdog finds and its SIGABRT.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000")
    # Waiting ignores signals, and the others would wait for a process that a signal ends.
    timeout = timedelta(seconds=timeout_seconds)
    with default_signal_actions():
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            # The store of torchrun's agent has the addresses of processes that a restart has replaced.
            store=dist.PrefixStore(f"attempts/{attempt()}/group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if gpu else None,
        )
    with progress_barrier(world.rank, world.size, timeout_seconds):
        yield
    # Not after a fault: this waits for the others, who wait for this process.
    dist.destroy_process_group()
