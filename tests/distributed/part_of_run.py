"""A short run that stops after a step or resumes, on any number of processes."""

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.torch import save_file

from lean_finetune.core.errors import UserError
from lean_finetune.distributed.processes import ControlChannel, World
from lean_finetune.model.files.safetensors_files import write_loaded
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.train.checkpoint.checkpoint_files import CheckpointStore
from lean_finetune.train.checkpoint.checkpointer import Checkpointer
from lean_finetune.train.checkpoint.training_state import TrainingRun, layout_of
from lean_finetune.train.job import TrainJob
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.process.stop_signals import Stopped, StopRequest
from tests.kit.specs import changed
from tests.small_model import CPU
from tests.train.image_jobs import MIXED
from tests.train.image_jobs import job_of as job_of_images
from tests.train.interrupted import small_job, with_weights

FILE_BYTES = 1024
"""Less than a part of any checkpoint here."""
SLOW_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class PartOfRun:
    """The run."""

    model: str
    directory: str
    """Of checkpoints, tokens and results."""
    mode: str
    method: str = "full"
    optimizer: str = "adamw"
    dropout: float = 0.0
    experts: str = "none"
    """Whether experts have adapters."""
    stop_after: int | None = None
    """A step after which only the last process gets a stop signal."""
    full_disk_rank: int | None = None
    """A process whose files may not grow, as under a quota: it cannot write its part of any checkpoint."""
    vision: str = "frozen"
    workspace: str | None = None
    """Of `image_workspace`, for rows with images."""
    weights: bool = False
    """Whether rows have weights."""
    every_step: bool = False
    """Make a checkpoint after each step."""


def job_of(part: PartOfRun, world: World) -> TrainJob:
    """The run with its micro-batches divided among the processes; the last may be without rows."""
    tokens = Path(part.directory) / f"tokens-{world.size}-{world.rank}"
    options: dict[str, Any] = {
        "method": part.method,
        "optim": {"optimizer": part.optimizer},
        "lora_experts": part.experts,
    }
    if part.workspace is None:
        job = small_job(Path(part.model), tokens, **options, lora_dropout=part.dropout)
        if part.weights:
            job = with_weights(job)
    else:
        job = job_of_images(Path(part.workspace), MIXED, method=part.method, vision=part.vision)
    train = changed(job.train, **sharing_of(part.mode))
    dealt, ranks = [], train.layout(world.size).data
    for step in job.plan.steps:
        idle = replace(step[0], rows=np.empty(0, np.int32), supervised=0)
        full = [*step, *[idle] * (-len(step) % ranks)]
        dealt += [replace(one, rank=number % ranks) for number, one in enumerate(full)]
    plan, layers = Plan.of(dealt, ranks=ranks), LAYERS.get(part.mode)
    plan = replace(plan, attached=tuple(one.trained_by(train) for one in job.plan.attached))
    return replace(job, plan=plan, train=train, world=world, stage_layers=layers)


LAYERS = {"pp": (1, 1)}
"""Layers of each stage, by mode."""


def sharing_of(name: str) -> dict[str, Any]:
    """The mode; `hsdp` in groups of two; after `tp `, two processes compute each product; `pp`: stages of a layer."""
    if name == "pp":
        return {"sharding": "none", "pipeline_stages": 2}
    mode, tensor = (name.removeprefix("tp "), 2) if name.startswith("tp ") else (name, 1)
    return {"sharding": mode, "tensor_parallel": tensor, "shard_group_gpus": 2 if mode == "hsdp" else None}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may have more than a few bytes."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@contextmanager
def slow_disk() -> Iterator[None]:
    """A part of a checkpoint is still being written long after another process failed to write its own."""

    def file_by_file(path: Path, tensors: Any) -> None:
        end = time.monotonic() + SLOW_SECONDS
        for number in takewhile(lambda _: time.monotonic() < end, count()):
            path.with_name(str(number)).touch()
        write_loaded(path, tensors)

    with patch("lean_finetune.train.checkpoint.checkpoint_files.write_loaded", file_by_file):
        yield


def disk_of(part: PartOfRun, rank: int) -> AbstractContextManager[None]:
    """The disk of this process: full, slow while another process's is full, or ordinary."""
    if part.full_disk_rank is None:
        return nullcontext()
    return full_disk() if part.full_disk_rank == rank else slow_disk()


def run_part(part: PartOfRun, world: World) -> dict[str, Any]:
    """Run it; the messages and, if the run ended, its losses and weights."""
    directory, messages, stop = Path(part.directory), list[str](), StopRequest()

    class StoppedByRank(Checkpointer):
        def after_step(self, run: TrainingRun, kept: int | None = None) -> bool:
            if run.step == part.stop_after and world.rank == world.size - 1:
                stop.request(signal.SIGTERM)
            return super().after_step(run, kept)

        def is_due(self) -> bool:
            return part.every_step

    job = job_of(part, world)
    store = CheckpointStore(directory / "checkpoints", 2, messages.append, ControlChannel(world, CPU))
    checkpoints = StoppedByRank(
        store,
        seconds=None,
        stop=stop,
        notify=messages.append,
        layout=layout_of(world.size, job.division),
    )
    first_step = checkpoints.first_step
    try:
        with disk_of(part, world.rank):
            result = train(job, make_meter(CPU), checkpoints)
            checkpoints.wait()
    except Stopped:
        checkpoints.wait()
        return {"first_step": first_step, "messages": messages, "stopped_at": store.last_step()}
    except UserError as error:
        return {"first_step": first_step, "messages": messages, "error": str(error)}
    weights = {name: tensor.clone() for name, tensor in result.parallel.full_parameters()}
    path = directory / f"weights-{part.stop_after}-{world.size}.safetensors"
    if world.is_first:
        save_file(weights, path)
    losses = [row["loss"] for row in result.curves]
    return {
        "first_step": first_step,
        "messages": messages,
        "losses": losses,
        "heldout": [row["heldout_loss"] for row in result.curves if row.get("heldout_loss") is not None],
        "weights": str(path),
        "last_step": store.last_step(),
    }
