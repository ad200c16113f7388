"""A run as advice varies it: its setting, its largest micro-batches and the size of its steps."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PretrainedConfig

from cuda_memory.units import GIB
from lean_finetune.config.schema import Params
from lean_finetune.memory.predict.setting import Setting
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.step.batches import BatchShape

FIRST = BatchShape(rows=1, length=8, supervised=7, joined_lengths=None)
"""A micro-batch so small that the next one sets the peak."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how a step is divided into micro-batches."""

    config: PretrainedConfig
    setting: Setting
    steps: TracedSteps
    """The micro-batches that set the peak."""
    mode: Literal["bucketed", "packed", "fixed"]
    max_tokens: int
    """bucket.max_tokens."""
    fixed_rows: int
    """bucket.fixed_rows, for mode fixed."""
    longest: int
    """Padded tokens of the longest row."""
    tokens_per_step: float
    """Mean tokens per step with padding, on one GPU."""
    micro_batches_per_step: float
    unpadded_tokens_per_step: int
    """train.tokens_per_step: of all GPUs."""

    disk_bytes_per_second: float = 2e9
    """hardware.disk_gb_per_second."""
    host_ram_bytes: int | None = None
    """hardware.host_ram_gib."""
    nodes: int = 1
    """run.nodes, where it is known."""

    @property
    def in_flight(self) -> int:
        """Most micro-batches between forward and backward at the same time."""
        return min(self.setting.pipeline_stages, math.ceil(self.micro_batches_per_step))


def host_ram_bytes(p: Params) -> int | None:
    """hardware.host_ram_gib in bytes."""
    return None if p.hardware.host_ram_gib is None else int(p.hardware.host_ram_gib * GIB)


def full_batch(mode: str, length: int, *, max_tokens: int, fixed_rows: int) -> BatchShape:
    """The largest micro-batch of rows of this length, with every token trained except the first of each row."""
    if mode == "packed":
        rows, rest = divmod(max_tokens, length)
        joined = (length,) * rows + ((rest,) if rest else ())
        return BatchShape(rows=1, length=max_tokens, supervised=max_tokens - len(joined), joined_lengths=joined)
    rows = fixed_rows if mode == "fixed" else max_tokens // length
    return BatchShape(rows=rows, length=length, supervised=rows * (length - 1), joined_lengths=None)


def largest_steps(shape: BatchShape, *, several: bool, in_flight: int = 1) -> TracedSteps:
    """A step whose largest micro-batch has this shape. With `several`, it adds to gradients of an earlier one.

    `in_flight` of them can be between forward and backward at the same time, in a pipeline.
    """
    first = replace(FIRST, joined_lengths=None if shape.joined_lengths is None else (FIRST.length,))
    largest = (shape,) * in_flight
    return ((first, *largest),) if several else (largest,)


def in_stages(run: Workload, setting: Setting) -> Workload:
    """The run with another setting, in which its GPUs divide layers and no longer rows."""
    stages = setting.pipeline_stages
    changed = replace(
        run,
        setting=setting,
        tokens_per_step=run.tokens_per_step * stages,
        micro_batches_per_step=run.micro_batches_per_step * stages,
    )
    largest = max((shape for step in run.steps for shape in step), key=lambda shape: shape.rows * shape.length)
    return replace(changed, steps=largest_steps(largest, several=True, in_flight=changed.in_flight))
