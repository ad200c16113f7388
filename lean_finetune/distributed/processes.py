"""The processes of a run, one per GPU: their ranks and group, a barrier for long work, messages between them."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import numpy as np
import psutil
import torch
import torch.distributed as dist

from lean_finetune.config.field_types import DeviceChoice
from lean_finetune.core import progress
from lean_finetune.core.errors import UserError
from lean_finetune.core.signals import default_signal_actions

ANNOUNCE_SECONDS = 1.0
"""Least time between two announcements of progress; one takes about 0.1 ms."""
LONGEST_PAUSE_SECONDS = 0.5
"""Between two checks of who has arrived."""


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


def sibling_ended() -> bool:
    """Whether a process of the same torchrun agent has ended: then SIGTERM comes from the agent, not from a user."""
    return under_torchrun() and len(psutil.Process(os.getppid()).children()) < World.here().local_size


def attempt() -> int:
    """How often torchrun's agent has restarted the processes of this run (run.max_restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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


class BarrierTimeout(RuntimeError):
    """Processes did not arrive and made no progress."""

    def __init__(self, ranks: list[int]):
        super().__init__(f"timed out waiting for process {', '.join(map(str, ranks))}")
        self.ranks = ranks


class ProgressBarrier:
    """A barrier that waits for a busy process as long as it makes progress; every process calls it equally often.

    A collective waits for a fixed time (`run.rank_timeout_seconds`), but quantising 70B weights to 4 bits on one CPU
    takes longer. So processes first meet here, through torch.distributed's key-value store. Each announces its arrival,
    and until then its progress. The timeout counts from the last progress of those that have not arrived.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float):
        """Meet through `store` as process `rank` of `size`; `timeout_seconds` is the longest wait without progress."""
        self._store, self._timeout = dist.PrefixStore("lean-finetune", store), timeout_seconds
        self._rank, self._size = rank, size
        self._numbers = count()
        self._due = time.monotonic()

    def progress(self) -> None:
        """Announce that this process makes progress."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + ANNOUNCE_SECONDS
        with suppress(RuntimeError):  # The store ended with its process: the next collective reports that.
            self._store.add(f"progress/{self._rank}", 1)

    def wait_for_all(self) -> None:
        """Wait until every process has called this as often as this one.

        Raises:
            BarrierTimeout: some did not and made no progress for `timeout_seconds`.
        """
        number = next(self._numbers)
        self._store.set(f"{number}/{self._rank}", "")
        absent, seen, due, pause = list(range(self._size)), None, 0.0, 0.001
        while absent := [rank for rank in absent if not self._store.check([f"{number}/{rank}"])]:
            now = {rank: self._store.add(f"progress/{rank}", 0) for rank in absent}  # `get` would wait for the first.
            if now != seen:
                seen, due = now, time.monotonic() + self._timeout
            elif time.monotonic() > due:
                raise BarrierTimeout(absent)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


_barriers: list[ProgressBarrier] = []


@contextmanager
def progress_barrier(rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """A context in which this process announces progress, and `wait_for_all` waits for the others."""
    barrier = ProgressBarrier(dist.distributed_c10d._get_default_store(), rank, size, timeout_seconds)
    _barriers.append(barrier)
    try:
        with progress.callback(barrier.progress):
            yield
    finally:
        _barriers.remove(barrier)


def wait_for_all() -> None:
    """Wait for the other processes before a collective, after work that may take one long; raises BarrierTimeout."""
    for barrier in _barriers:
        barrier.wait_for_all()


class ControlChannel:
    """Collectives over Python integers and strings; every process makes the same calls in the same order."""

    def __init__(self, world: World = SINGLE_PROCESS, device: torch.device = torch.device("cpu")):  # noqa: B008 - immutable
        """`device` is where the backend's tensors must be: a GPU for NCCL."""
        self.rank, self.size = world.rank, world.size
        self.node = world.rank // world.local_size
        self.device = device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def gather(self, *numbers: int) -> list[list[int]]:
        """The numbers of every process, by rank; all send equally many."""
        if self.size == 1:
            return [list(numbers)]
        table = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers)
        table = table.to(self.device)
        dist.all_reduce(table)  # The others add 0.
        return table.tolist()

    def gather_after_work(self, *numbers: int) -> list[list[int]]:
        """`gather` after a barrier that waits for a process as long as it makes progress."""
        wait_for_all()
        return self.gather(*numbers)

    def failed_ranks(self, failed: bool) -> list[int]:
        """The ranks that call this with an error, after work; all processes call it."""
        return [rank for rank, (one,) in enumerate(self.gather_after_work(int(failed))) if one]

    def from_first(self, *numbers: int) -> list[int]:
        """The numbers of rank 0."""
        return self.gather(*numbers)[0]

    def gather_text(self, text: str) -> list[str]:
        """The text of every process, by rank: its bytes travel as 64-bit numbers, without pickle."""
        data = text.encode()
        sizes = [size for (size,) in self.gather(len(data))]
        words = -(-max(sizes) // 8)
        padded = np.frombuffer(data.ljust(8 * words, b"\0"), np.int64)
        table = np.array(self.gather(*padded.tolist()), np.int64)
        return [row.tobytes()[:size].decode() for row, size in zip(table, sizes, strict=True)]
