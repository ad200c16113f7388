"""The batch plan: which rows form each micro-batch of each optimizer step, as an Arrow file."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.bucket.arrow import open_batches
from stages.errors import UserError

SCHEMA = pa.schema(
    [
        ("epoch", pa.int32()),
        ("step", pa.int32()),
        ("rows", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("supervised", pa.int32()),
    ]
)
RECORDS_PER_BLOCK = 4096
"""Micro-batches per Arrow record batch: bounds the writer's memory, whatever the run's length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that pass through the model together."""

    epoch: int
    """Pass over the training rows, from 0."""
    step: int
    """Optimizer step of the whole run, from 0."""
    rows: np.ndarray
    """Row numbers in train.arrow, int32, longest row first."""
    length: int
    """Tokens to which every row is padded."""
    supervised: int
    """Tokens of these rows that are predicted and count in the loss."""

    @property
    def padded_tokens(self) -> int:
        """Rows times padded length: what activations grow with."""
        return len(self.rows) * self.length


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """All micro-batches of a run, by optimizer step, in execution order."""

    steps: list[list[MicroBatch]]

    @property
    def supervised_per_step(self) -> list[int]:
        """Supervised tokens of each optimizer step: the divisor of its loss."""
        return [sum(micro_batch.supervised for micro_batch in step) for step in self.steps]


def write_plan(path: Path, micro_batches: Iterable[MicroBatch]) -> None:
    """Write micro-batches, in execution order, as they come; the caller makes the writing atomic."""
    stream = iter(micro_batches)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        while block := list(islice(stream, RECORDS_PER_BLOCK)):
            offsets = np.cumsum([0, *(len(micro_batch.rows) for micro_batch in block)], dtype=np.int32)
            rows = np.concatenate([micro_batch.rows for micro_batch in block])
            columns = [
                pa.array([micro_batch.epoch for micro_batch in block], pa.int32()),
                pa.array([micro_batch.step for micro_batch in block], pa.int32()),
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows, pa.int32())),
                pa.array([micro_batch.length for micro_batch in block], pa.int32()),
                pa.array([micro_batch.supervised for micro_batch in block], pa.int32()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))


def read_plan(path: Path) -> Plan:
    """Read a plan; the rows of its micro-batches are views of the memory-mapped file.

    Raises:
        UserError: the file is missing or damaged, or its steps are not 0, 1, 2, ….
    """
    steps: list[list[MicroBatch]] = []
    for number, micro_batch in enumerate(_read_micro_batches(path)):
        if micro_batch.step == len(steps):
            steps.append([])
        if micro_batch.step != len(steps) - 1 or not micro_batch.padded_tokens or micro_batch.supervised < 1:
            raise UserError(
                f"{path}: record {number} cannot be right (step {micro_batch.step} after {len(steps) - 1}, "
                f"{len(micro_batch.rows)} rows of {micro_batch.length} tokens, {micro_batch.supervised} supervised); "
                "delete it and run `dvc repro`"
            )
        steps[-1].append(micro_batch)
    if not steps:
        raise UserError(f"{path}: holds no micro-batch; delete it and run `dvc repro`")
    return Plan(steps=steps)


def _read_micro_batches(path: Path) -> Iterator[MicroBatch]:
    """The records of a plan file, in order."""
    for batch in open_batches(path, {field.name: (field.type,) for field in SCHEMA}):
        lists = batch.column("rows")
        rows, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
        scalars = (batch.column(name).to_pylist() for name in ("epoch", "step", "length", "supervised"))
        for number, (epoch, step, length, supervised) in enumerate(zip(*scalars, strict=True)):
            yield MicroBatch(
                epoch=epoch,
                step=step,
                rows=rows[ends[number] : ends[number + 1]],
                length=length,
                supervised=supervised,
            )
