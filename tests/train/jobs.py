"""Small training jobs over random rows."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lean_finetune.config.schema import Train
from lean_finetune.model.model_config import read_config
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.run.assets import Assets
from lean_finetune.step.offload.activation_offload import KEPT
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.job import TrainJob
from tests.kit.specs import changed
from tests.small_model import CPU, VOCABULARY, spec_of
from tests.token_files import Row, heldout, write_tokens

TRAIN = set(Train.model_fields)
Tokens = tuple[TokenRows, TokenRows]
"""Training and held-out rows."""


def random_lengths(shortest: int, longest: int, count: int) -> list[int]:
    return np.random.default_rng(1).integers(shortest, longest, count).tolist()


def random_tokens(directory: Path, lengths: Sequence[int], heldout_rows: int = 4) -> Tokens:
    """Write rows of these lengths, the second half of each supervised."""
    draw = np.random.default_rng(1)
    rows: list[Row] = [(draw.integers(3, VOCABULARY, n).tolist(), [n // 2, n], None) for n in lengths]
    return TokenRows(write_tokens(directory, rows), "train"), heldout(directory, rows[:heldout_rows])


def plan_of(rows: TokenRows, steps: Iterable[Iterable[Sequence[int]]], *, flat: bool = False) -> Plan:
    """Return a plan of one epoch: `steps` has the rows of each micro-batch of each step."""
    planned = []
    for step, micro_batches in enumerate(steps):
        for numbers in micro_batches:
            part = np.array(numbers, dtype=np.int32)
            length = int(rows.lengths[part].sum() if flat else rows.lengths[part].max())
            supervised = int(rows.supervised[part].sum())
            planned.append(
                MicroBatch(epoch=0, step=step, rank=0, rows=part, length=length, supervised=supervised, flat=flat)
            )
    return Plan.of(planned)


def make_job(
    model: Path, tokens: Tokens, plan: Plan, *, train: Train | None = None, adapter: Path | None = None, **changes: Any
) -> TrainJob:
    """Return a job on the CPU; `changes` replace fields of the job and of its section train."""
    values: dict[str, Any] = {"loss_chunk": 16, "heldout_every_steps": 2, "heldout_rows": 4, "max_grad_norm": 1.0}
    values |= {
        name: changes.pop(name) for name in list(changes) if name in TRAIN or name.startswith(("lora_", "quant_"))
    }
    section = changed(train or spec_of(), **values)
    job = TrainJob(
        config=read_config(model, scores=section.scores),
        assets=Assets(directory=model, adapter=adapter),
        plan=plan,
        rows=tokens[0],
        heldout=tokens[1],
        pad_id=0,
        train=section,
        seed=1,
        foreach=False,
        offload=KEPT,
        measured_steps=frozenset(),
        loader_threads=1,
        device=CPU,
        progress=False,
    )
    return replace(job, **changes)
