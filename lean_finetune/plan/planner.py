"""Plan all micro-batches of a run, and summarize the plan."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np

from cuda_memory.units import counted
from lean_finetune.config.schema import Params
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.micro_batches import MicroBatchSettings, limits_of, split_steps
from lean_finetune.plan.optimizer_steps import RowIndex, run_steps, source_weights
from lean_finetune.rows.attachment import sums_between


def pad_multiple(p: Params) -> int:
    """Padded lengths are multiples of this: of bucket.pad_multiple and of the GPUs of context parallelism."""
    return lcm(p.bucket.pad_multiple, p.layout.context)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The settings that determine a plan."""

    micro_batches: MicroBatchSettings
    seed: int
    epochs: int
    tokens_per_step: int
    weights: Sequence[float]
    """Of the data sources."""
    kind: RowKind = RowKind.ANSWER
    """What the rows are for the objective."""

    @classmethod
    def from_params(cls, p: Params, tokens_per_step: int | None = None) -> "PlanSettings":
        """Read section `bucket`, the data sources, and the settings that decide the rows of a step.

        `tokens_per_step` is what train.tokens_per_step means; None if it is a number.
        """
        return cls(
            micro_batches=MicroBatchSettings(
                mode=p.bucket.mode,
                max_tokens=p.bucket.max_tokens,
                pad_multiple=pad_multiple(p),
                constant_shape=p.bucket.constant_shape,
                fixed_rows=p.bucket.fixed_rows,
                limits=limits_of(p.bucket),
                ranks=p.layout.data,
            ),
            seed=p.seed,
            epochs=p.train.epochs,
            tokens_per_step=p.train.step_tokens if tokens_per_step is None else tokens_per_step,
            weights=source_weights(p.data.source),
            kind=p.train.row_kind,
        )

    def parts(self, index: RowIndex) -> Iterator[Plan]:
        """The plan in consecutive parts; raises UserError if the longest row does not fit, or there is no row."""
        units = index.of_kind(self.kind, joined=self.micro_batches.flat)
        steps = run_steps(units, seed=self.seed, epochs=self.epochs, tokens_per_step=self.tokens_per_step)
        return (part.of_kind(self.kind) for part in split_steps(steps, units, self.micro_batches.of_kind(self.kind)))

    def plan(self, index: RowIndex) -> Plan:
        """The complete plan; raises as `parts`."""
        return replace(Plan.joined(list(self.parts(index))), attached=index.attached)


# Summarise a plan: padding, time that GPUs wait for each other, evenness and randomness of its steps.

FEW_STEPS = 100
"""Optimizer steps below which a run is short: published fine-tunings take hundreds or thousands (LIMA about 480,
Alpaca about 1,200, Guanaco of 7B 1,875), and AdamW's average of squared gradients spans 1 / (1 - 0.999) steps."""
USUAL_EPOCHS = 15
"""More passes over the same rows are not suggested: LIMA's, which has 1,000 rows."""


def summarise(plan: Plan, lengths: np.ndarray, *, mode: str) -> dict[str, Any]:
    """The figures of a plan, rounded so that every machine writes the same bytes."""
    planned = lengths[plan.rows]
    tokens_per_step = sums_between(planned, plan.bounds[plan.step_bounds])
    return {
        "mode": mode,
        "optimizer_steps": len(plan.steps),
        "micro_batches": int((plan.sizes > 0).sum()),
        "padding_percent": round(100 * (1 - int(tokens_per_step.sum()) / int(plan.padded_tokens.sum())), 3),
        "straggler_percent": straggler_percent(plan.padded_tokens, plan.ranks),
        "max_batch_tokens": int(plan.padded_tokens.max()),
        "max_batch_rows": int(plan.sizes.max()),
        "max_batch_length": int(plan.length.max()),
        "tokens_per_step_mean": round(float(tokens_per_step.mean()), 2),
        "tokens_per_step_cv": round(float(tokens_per_step.std() / tokens_per_step.mean()), 4),
        "randomness": randomness(planned, plan.bounds[plan.step_bounds]),
    }


def steps_of_epoch(tokens: float, mean_length: float, tokens_per_step: int) -> int:
    """About how many optimizer steps an epoch has: a step ends with the row that reaches its tokens.

    Args:
        tokens: of the epoch's rows.
        mean_length: tokens of a row.
        tokens_per_step: train.tokens_per_step.
    """
    return max(1, min(math.ceil(tokens / (tokens_per_step + mean_length / 2)), round(tokens / mean_length)))


def few_steps_note(
    steps: int, rows: int, *, mean_length: float, tokens_per_step: int, epochs: int, is_auto: bool = False
) -> str | None:
    """What would give a plan of few optimizer steps more; None if it has `FEW_STEPS`.

    Args:
        steps: of all epochs.
        rows: of all steps, so a row counts once in each epoch.
        mean_length: tokens of a row.
        tokens_per_step: train.tokens_per_step.
        epochs: train.epochs.
        is_auto: whether tokens_per_step was chosen for the rows, so that fewer are no remedy.
    """
    if steps >= FEW_STEPS:
        return None
    remedies = []
    smaller = 2 ** int(math.log2(tokens_per_step))
    while (
        smaller > mean_length and epochs * steps_of_epoch(rows / epochs * mean_length, mean_length, smaller) < FEW_STEPS
    ):
        smaller //= 2
    expected = epochs * steps_of_epoch(rows / epochs * mean_length, mean_length, smaller)
    if expected >= FEW_STEPS and not is_auto:
        remedies.append(f"lower train.tokens_per_step (now {tokens_per_step}; {smaller} gives about {expected})")
    more = math.ceil(epochs * FEW_STEPS / steps)
    if more <= USUAL_EPOCHS:
        remedies.append(f"raise train.epochs (now {epochs}; {more} gives about {round(more * steps / epochs)})")
    remedy = ", or ".join(remedies) or "add rows"
    return f"{counted(steps, 'optimizer step')} in all, and most fine-tunings take {FEW_STEPS} or more: {remedy}"


def straggler_percent(padded_tokens: np.ndarray, ranks: int) -> float:
    """Share of the GPUs' time spent waiting for the largest of the `ranks` concurrent micro-batches."""
    turns = padded_tokens.reshape(-1, ranks)
    return round(100 * (1 - int(turns.sum()) / (ranks * int(turns.max(axis=1).sum()))), 3)


def randomness(lengths: np.ndarray, bounds: np.ndarray) -> float | None:
    """Spread of the steps' mean log-length relative to independent draws: 1 means fully random.

    Sorting or packing across steps separates short from long rows and makes this figure ten times larger. None for a
    single step or rows of equal length. `lengths` are the rows' tokens, step after step; `bounds` start and end of
    steps.
    """
    counts = np.bincount(lengths)
    known = np.flatnonzero(counts)
    logs = np.zeros(len(counts))
    logs[known] = np.log(known)
    mean = float(np.average(logs, weights=counts))
    spread = float(np.average((logs - mean) ** 2, weights=counts)) ** 0.5
    if len(bounds) < 3 or len(known) == 1:
        return None
    rows = np.diff(bounds)
    means = np.add.reduceat(logs[lengths], bounds[:-1]) / rows
    return round(float(((means - mean) / spread * np.sqrt(rows)).std()), 3)
