"""What a run is made of: parameters, locks, the plan and its rows, held against each other and against the device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_finetune.config.schema import Params
from lean_finetune.core.atomic_files import read_json
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.sharding_modes import ShardSpec
from lean_finetune.model.allocator_settings import use_segments
from lean_finetune.model.model_config import read_config
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.pinning.locate import model_directory, verify_files
from lean_finetune.plan.batch_plan import Plan, read_plan
from lean_finetune.step.activation_offload import make_offload
from lean_finetune.step.batches import refuse_other_ranks, refuse_other_tokens
from lean_finetune.step.optimizer_in_backward import refuse_in_backward
from lean_finetune.step.optimizers import paging_note
from lean_finetune.step.run_optimizer import OptimSpec
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.step.training_step import StepSpec
from lean_finetune.train.loop import TrainJob, measured_steps
from lean_finetune.train.process.training_device import check_attention, check_device, check_host, check_offload

SCRATCH = Path("scratch")


@dataclass(frozen=True, kw_only=True)
class Paths:
    """What the stage reads, then what it writes."""

    tokens: Path
    batches: Path
    verdict: Path
    estimate: Path
    model_lock: Path
    tokenizer_lock: Path
    data_lock: Path
    out: Path
    curves: Path
    metrics: Path

    @property
    def plan(self) -> Path:
        """The file of the plan."""
        return self.batches / "plan.arrow"


def prepare_device(
    params: Params,
    spec: ModelSpec,
    device: torch.device,
    world: World,
    paths: Paths,
    told: Callable[[str], None],
) -> None:
    """Set the device up for the run; `told` gets a line of a setting that has another effect here.

    Raises:
        UserError: it cannot compute the run, or has no room for it.
    """
    predicted: Mapping[str, Any] = read_json(paths.estimate)
    segments = use_segments(params.train.expandable_segments, device)
    check_device(device, spec, read_json(paths.verdict), predicted, world.local_size)
    away = predicted["offloaded_bytes_predicted"] * world.local_size
    check_offload(params.train.offload_activations, away, SCRATCH)
    check_host(params.train.offload, device, predicted, params.train.sharding)
    for note in (segments, paging_note(params.train.optimizer, device)):
        if note is not None:
            told(f"note: {note}")


def make_job(
    params: Params,
    spec: ModelSpec,
    device: torch.device,
    world: World,
    paths: Paths,
) -> TrainJob:
    """The run of the plan on the pinned model, as one of the processes of `world`.

    Raises:
        UserError: the model's files are not those that were pinned, or do not go with the parameters or the device; or
            the plan is of other rows.
    """
    lock = read_json(paths.model_lock)
    directory = model_directory(lock)
    check_attention(device, read_config(directory), spec)
    if world.local_rank == 0:  # Every process of a node reads the same files.
        verify_files(directory, lock["files"])
    plan, rows = _planned(params, spec, world, paths)
    return TrainJob(
        model_directory=directory,
        plan=plan,
        rows=rows,
        heldout=TokenRows(paths.tokens, "heldout"),
        pad_id=read_json(paths.tokens / "meta.json")["pad_id"],
        model_spec=spec,
        optim_spec=OptimSpec.from_params(params),
        step_spec=StepSpec(
            loss_chunk=params.train.loss_chunk,
            max_grad_norm=params.train.max_grad_norm,
            foreach=device.type == "cuda",
            optimizer_in_backward=params.train.optimizer_in_backward,
        ),
        offload=make_offload(params.train.offload_activations, device, SCRATCH),
        heldout_every_steps=params.train.heldout_every_steps,
        heldout_rows=params.train.heldout_rows,
        measured_steps=measured_steps(plan, rows.lengths),
        loader_threads=params.run.loader_threads,
        device=device,
        progress=params.run.progress and world.is_first,
        world=world,
        sharing=ShardSpec.from_params(params),
        settings={
            "train.optimizer": params.train.optimizer,
            # Where auto is eager, a model caps its scores, and sdpa would be refused.
            "train.attention": "sdpa" if params.train.attention == "auto" else params.train.attention,
            "train.expandable_segments": params.train.expandable_segments,
            "run.loader_threads": params.run.loader_threads,
        },
    )


def _planned(params: Params, spec: ModelSpec, world: World, paths: Paths) -> tuple[Plan, TokenRows]:
    """The plan and the rows that it is of.

    Raises:
        UserError: it is of other rows, for another number of GPUs, or has steps that this way of training cannot do.
    """
    plan = read_plan(paths.plan)
    refuse_other_ranks(plan, world.size)
    rows = TokenRows(paths.tokens, "train")
    refuse_other_tokens(plan, rows.lengths)
    if params.train.optimizer_in_backward:
        refuse_in_backward(spec, np.diff(plan.step_bounds))
    return plan, rows
