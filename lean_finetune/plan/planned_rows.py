"""The rows of a run with the plan of their micro-batches, and other plans of the same rows."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lean_finetune.config.parallel_layout import ParallelLayout
from lean_finetune.config.schema import Bucket
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.micro_batches import limits_of
from lean_finetune.plan.optimizer_steps import RowIndex, read_index
from lean_finetune.plan.planner import PlanSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRows:
    """The rows of a run, and the plan of their micro-batches."""

    plan: Plan
    """Micro-batches of all GPUs."""
    lengths: np.ndarray
    """Tokens of every training row."""
    index: Path | RowIndex
    """Of the training rows; its file, which advice reads where it plans anew."""
    settings: PlanSettings
    """Settings of the plan."""

    @property
    def own_plan(self) -> Plan:
        """The micro-batches of one GPU."""
        return self.plan.of_rank(0) if self.plan.ranks > 1 else self.plan

    @property
    def accumulates_gradients(self) -> bool:
        """Whether a GPU has more than one micro-batch in some step."""
        return bool((np.diff(self.plan.step_bounds) > self.plan.ranks).any())

    def planned_anew(
        self, bucket: Bucket, tokens_per_step: int, layout: ParallelLayout, *, longest: int | None
    ) -> "PlannedRows":
        """The rows with the plan of other settings, and cut to `longest` tokens unless it is None.

        Raises:
            UserError: a row does not fit in a micro-batch.
        """
        index = read_index(self.index, self.settings.weights) if isinstance(self.index, Path) else self.index
        index = index if longest is None else index.shortened(longest)
        micro_batches = replace(
            self.settings.micro_batches,
            mode=bucket.mode,
            max_tokens=bucket.max_tokens,
            fixed_rows=bucket.fixed_rows,
            limits=limits_of(bucket),
            pad_multiple=math.lcm(self.settings.micro_batches.pad_multiple, layout.context),
            ranks=layout.data,
        )
        settings = replace(self.settings, micro_batches=micro_batches, tokens_per_step=tokens_per_step)
        return replace(self, plan=settings.plan(index), lengths=index.lengths, settings=settings)
