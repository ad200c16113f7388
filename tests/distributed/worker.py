"""One process of a group, and what it can do."""

import os
import time
import warnings
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import _set_pg_timeout

from lean_finetune.config.field_types import Sharding
from lean_finetune.config.schema import Train
from lean_finetune.distributed.processes import BarrierTimeout, World, progress_barrier, wait_for_all
from lean_finetune.distributed.sharding_modes import load_parallel
from lean_finetune.model.files.safetensors_files import StoredTensor
from lean_finetune.model.model_config import read_config
from lean_finetune.train.monitor.memory_monitor import host_peak
from lean_finetune.train.process.stop_signals import ignore_output_errors
from tests.distributed.cases import Case, learn
from tests.distributed.part_of_run import PartOfRun, run_part
from tests.small_model import CPU, spec_of

GATHERS_AND_SCATTERS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single")
"""Those that FSDP2 calls: the last two since torch 2.13."""
SMALL_BYTES = 64
"""Bytes of the largest message that `do_count_sent` ignores: norms and losses."""
TIMEOUT_SECONDS = 60
"""Of a process that waits for the others: one of them failed."""


def do_learn(world: World, directory: Path, case: Case) -> dict[str, Any]:
    """Train a case; losses, norms, bytes of optimizer state, and a file of the weights."""
    outcome = learn(case, world)
    weights = {name: tensor.clone() for name, tensor in outcome.parallel.full_parameters()}
    path = directory / "weights.safetensors"
    if world.is_first:
        save_file(weights, path)
    state = [value for state in outcome.optimizer.state.values() for value in state.values()]
    return {
        "losses": outcome.losses,
        "norms": outcome.norms,
        "expert_loads": outcome.expert_loads,
        "rewards": outcome.rewards,
        "offloaded_bytes": int(outcome.parallel.sum_over_ranks(torch.tensor(outcome.offloaded_bytes)).item()),
        "state_bytes": sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
        "weights": str(path),
    }


def do_count_sent(world: World, directory: Path, case: Case) -> int:
    """Most bytes that a process sends in a step by rings: collectives are counted in runs of one and of two steps."""
    sent, factors = 0, {"all_reduce": 2, **dict.fromkeys(("broadcast", "all_to_all_single", *GATHERS_AND_SCATTERS), 1)}
    factors["isend"] = 2  # To one of the two processes of a group.

    def counted(name: str) -> Any:
        call = getattr(dist, name)

        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal sent
            whole = max(value.nbytes for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor))
            others = dist.get_world_size(options.get("group")) - 1
            if whole > SMALL_BYTES:
                sent += factors[name] * whole * others // (others + 1)
            return call(*arguments, **options)

        return patch.object(dist, name, count)

    counts = []
    with ExitStack() as stack:
        for name in filter(partial(hasattr, dist), factors):
            stack.enter_context(counted(name))
        for steps in (1, 2):
            sent = 0
            learn(replace(case, steps=steps), world)
            counts.append(sent)
    most = torch.tensor(counts[1] - counts[0])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def do_run_part(world: World, directory: Path, part: PartOfRun) -> dict[str, Any]:
    """Run a part of a run."""
    return run_part(part, world)


def do_wait_in_vain(world: World, directory: Path, model_directory: Path, seconds: float) -> float:
    """Share a model by hsdp; return the seconds that the first process then waits for the second."""
    train = spec_of(method="full", sharding="hsdp", shard_group_gpus=2)
    parallel = load_parallel(
        model_directory, read_config(model_directory), train, 1, world, CPU, timeout=timedelta(seconds=seconds)
    )
    start = time.monotonic()
    if world.is_first:
        with suppress(RuntimeError):
            parallel.gradient_norm([torch.ones(1)], foreach=False)
    elif world.rank == 1:
        time.sleep(3 * seconds)
    return time.monotonic() - start


def do_slow_first_process(
    world: World, directory: Path, case: Case, seconds: float, seconds_a_tensor: float
) -> dict[str, Any]:
    """Share a model that the first process loads for longer than the others may wait; then the first process hangs.

    Returns the seconds of loading, and how many processes reported that the first one hung.
    """
    start, read = time.monotonic(), StoredTensor.read

    def slow(tensor: StoredTensor) -> torch.Tensor:
        time.sleep(seconds_a_tensor)
        return read(tensor)

    reports = torch.zeros(1)
    _set_pg_timeout(timedelta(seconds=seconds))
    try:
        with progress_barrier(world.rank, world.size, seconds):
            with patch.object(StoredTensor, "read", slow):
                learn(case, world)
            took = time.monotonic() - start
            if world.is_first:
                time.sleep(2 * seconds)
            try:
                wait_for_all()
            except BarrierTimeout as late:
                reports += late.ranks == [0]
    finally:
        _set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    dist.all_reduce(reports)
    return {"load_seconds": took, "reports": reports.item()}


def do_load_peaks(world: World, directory: Path, source: Path, mode: Sharding, spec: Train) -> dict[str, int]:
    """Load a model as training does; the most of the host's memory that the first process and another one took."""
    with host_peak() as host:
        load_parallel(source, read_config(source), spec.model_copy(update={"sharding": mode}), 1, world, CPU)
    assert host.added_bytes is not None
    peaks = torch.zeros(world.size, dtype=torch.int64)
    peaks[world.rank] = host.added_bytes
    dist.all_reduce(peaks)
    return {"first": int(peaks[0]), "other": int(peaks[1])}


def work(rank: int, size: int, directory: Path, pipe: Connection) -> None:
    """Join the group, and call what comes through the pipe until it is closed."""
    log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.simplefilter("error")
    ignore_output_errors()  # As train does: in some cases no file of this process can grow, not even its log.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    with suppress(EOFError):
        while True:
            task, arguments = pipe.recv()
            pipe.send(task(world, directory, *arguments))
