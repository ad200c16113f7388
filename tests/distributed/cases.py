"""Short runs for one process or several: the same rows, divided into micro-batches as a case says."""

import contextlib
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuda_memory.units import round_up
from lean_finetune.config.field_types import CompressActivations
from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.schema import Train
from lean_finetune.distributed.processes import World
from lean_finetune.distributed.sharding_modes import load_parallel
from lean_finetune.model.model_config import read_config
from lean_finetune.objectives.objective import StepTotals
from lean_finetune.rows.answers import Answers
from lean_finetune.step.batches import Batch, collate, idle_batch, part_of, token_part
from lean_finetune.step.offload.activation_offload import KEPT, ActivationOffload, DiskStore
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import loss_scaler
from tests.distributed.image_rows import image_batches
from tests.small_model import CPU, spec_of
from tests.step.common import rows

MOST_PARTS = 4
"""Lengths are multiples of this, so that rows that are divided have as much padding as those that are not."""
PLAIN: dict[str, Any] = {
    "optimizer": "adamw",
    "lr": 2e-3,
    "weight_decay": 0.01,
    "schedule": "constant",
    "warmup_fraction": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short run."""

    directory: str
    """Of the model."""
    mode: str = "ddp"
    group_gpus: int | None = None
    context: int = 1
    """Processes that divide each row's tokens."""
    tensor: int = 1
    """Processes that compute each product together."""
    stages: tuple[int, ...] | None = None
    """Layers of each stage of a pipeline."""
    sizes: tuple[int, ...] = (8,)
    """Rows of each micro-batch of a step, eight together."""
    flat: bool = False
    chunk: int | None = None
    steps: int = 20
    offload: bool = False
    """Keep activations in a file between forward and backward."""
    compression: CompressActivations = "none"
    in_backward: bool = False
    """Update in backward, without clipping."""
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    """Directory of an adapter that goes on."""
    images: bool = False
    """Whether some rows have images, in every second step."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a run."""

    losses: list[float]
    norms: list[float]
    expert_loads: list[list[float]]
    """Of each step of a mixture of experts."""
    rewards: list[list[float]]
    """`step_loss.FIGURES` of each step, of preferences."""
    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    offloaded_bytes: int
    """Of offloaded activations."""


class CountingStore(DiskStore):
    """Counts the bytes that are stored."""

    offloaded_bytes = 0

    def put(self, values: torch.Tensor) -> Any:
        """See ActivationStore."""
        self.offloaded_bytes += values.nbytes
        return super().put(values)


def sharing_of(case: Case) -> dict[str, Any]:
    """Parameters of section train that say how the processes divide the work."""
    return {
        "sharding": case.mode,
        "shard_group_gpus": case.group_gpus,
        "context_parallel": case.context,
        "tensor_parallel": case.tensor,
        "pipeline_stages": len(case.stages or (0,)),
    }


def layout_of(case: Case, processes: int) -> ParallelLayout:
    """How the processes divide the work."""
    return spec_of(**sharing_of(case)).layout(processes)


def divided(case: Case, layout: ParallelLayout, rank: int) -> tuple[list[Batch], int]:
    """The micro-batches of one process, and the trained tokens of all processes."""
    batches, start, part = [], 0, token_part(layout, rank)
    for size in case.sizes:
        group = rows()[start : start + size]
        lengths = [len(ids) for ids, _ in group]
        length = round_up(sum(lengths) + 3 if case.flat else max(lengths), MOST_PARTS)
        batches.append(collate(group, length, 0, flat=case.flat))
        start += size
    supervised = sum(len(batch.supervised_index_N) for batch in batches)
    own = batches if part is None else [part_of(batch, part) for batch in batches]
    own += [idle_batch(0, part)] * (-len(own) % layout.data)
    return own[layout.coordinates(rank).data :: layout.data], supervised


REFERENCE = np.linspace(-60, -20, len(rows())).astype(np.float32)
"""Log-probabilities of the eight rows under a reference, of preferences."""
DESIRABLE = np.arange(len(rows())) % 2 == 0


def with_answers(case: Case, layout: ParallelLayout, rank: int, turned: int = 0) -> list[Batch]:
    """`divided` for preferences: rows 0 and 1, 2 and 3, … are pairs, or the even ones desirable.

    `turned`: each row has the place of the one so far behind it, as mismatched answers do.
    """
    every = rows()
    found, start = [], 0
    for size in case.sizes:
        numbers = (np.arange(start, start + size) + turned) % len(every)
        group = [every[number] for number in numbers]
        lengths = [len(ids) for ids, _ in group]
        counts = [int((spans[:, 1] - spans[:, 0]).sum()) for _, spans in group]
        answers = Answers(
            counts=tuple(counts),
            tokens_R=torch.tensor(counts, dtype=torch.float32),
            reference_R=torch.from_numpy(REFERENCE[numbers]),
            better_R=torch.from_numpy(DESIRABLE[numbers]),
        )
        batch = collate(group, sum(lengths) if case.flat else max(lengths), 0, flat=case.flat)
        found.append(replace(batch, parts=(answers,)))
        start += size
    found += [idle_batch(0)] * (-len(found) % layout.data)
    return found[layout.coordinates(rank).data :: layout.data]


def goal_of(train: Train, supervised_tokens: int) -> StepGoal:
    """The objective with its figures of the eight rows."""
    supervised = [int((spans[:, 1] - spans[:, 0]).sum()) for _, spans in rows()]
    totals = StepTotals(
        count=len(rows()) // train.goal.kind.unit, better=4, worse=4, better_tokens=sum(supervised[::2])
    )
    values = train.preference_values
    return StepGoal(objective=train.goal, values=values, totals=totals, supervised_tokens=supervised_tokens)


def learn(case: Case, world: World) -> Outcome:
    """Train as the case says."""
    train = spec_of(
        **case.model,
        **sharing_of(case),
        offload=case.optim.get("offload", "none"),
        loss_chunk=case.chunk,
        max_grad_norm=None if case.in_backward else 1.0,
        optimizer_in_backward=case.in_backward,
    )
    optim = {**PLAIN, **case.optim}
    disk = optim.pop("disk", None)
    layout = layout_of(case, world.size)
    adapter = None if case.adapter is None else Path(case.adapter)
    directory = Path(case.directory)
    config = read_config(directory, scores=train.scores, whole=case.images)
    parallel = load_parallel(directory, config, train, 1, world, CPU, adapter=adapter, stage_layers=case.stages)
    optimizer = build_optimizer(parallel.local_shard, spec_of(**optim), disk=disk)
    torch.manual_seed(0)
    scaler = loss_scaler(train)
    store = CountingStore(CPU, Path(tempfile.gettempdir()))
    offload = ActivationOffload(store if case.offload else None, case.compression)
    batches, supervised = divided(case, layout, world.rank)
    every_second: list[Batch] | None = None
    if case.images:
        (batches, supervised), (every_second, _) = (
            image_batches(
                case.directory, case.sizes, layout, world.rank, shown=shown, together=train.runs_towers_together
            )
            for shown in (True, False)
        )
    before = list[Batch]()
    if train.goal.compares:
        batches = with_answers(case, layout, world.rank)
        if train.row_kind.passes > 1:
            before = with_answers(case, layout, world.rank, turned=1)
    results = [
        training_step(
            parallel,
            optimizer,
            iter(batches if step % 2 == 0 or every_second is None else every_second),
            before=iter(before),
            micro_batches=len(batches),
            goal=goal_of(train, supervised),
            train=train,
            foreach=False,
            phase=lambda name: contextlib.nullcontext(),
            guard=lambda losses, norm: None,
            scaler=scaler,
            offload=offload if case.offload or case.compression != "none" else KEPT,
        )
        for step in range(case.steps)
    ]
    return Outcome(
        losses=[result.loss.item() for result in results],
        norms=[result.grad_norm.item() for result in results],
        rewards=[values.tolist() for result in results for values in result.figures],
        expert_loads=[result.expert_load.tolist() for result in results if result.expert_load is not None],
        parallel=parallel,
        optimizer=optimizer,
        offloaded_bytes=store.offloaded_bytes,
    )
