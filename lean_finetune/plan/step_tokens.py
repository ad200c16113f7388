"""What `train.tokens_per_step: auto` means for some rows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lean_finetune.config.schema import Params, Train
from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import AUTO_STEP_TOKENS, open_batches
from lean_finetune.plan.optimizer_steps import RowIndex
from lean_finetune.plan.planner import FEW_STEPS, steps_of_epoch

MOST_STEP_TOKENS = 2**16
"""As many as 16 rows of 4,096 tokens, or 200 of a usual chat: larger steps are for those who ask for them."""


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Tokens of an optimizer step, and why."""

    tokens: int
    reason: str
    is_auto: bool = True
    """Whether params.yaml leaves it open."""

    @property
    def text(self) -> str:
        """What `auto` stands for, in words."""
        return f"train.tokens_per_step: auto is {self.tokens}, {self.reason}"


def step_tokens_of(index: RowIndex | None, train: Train, *, share: float = 1.0) -> StepTokens:
    """What train.tokens_per_step means for the training rows.

    `auto` is the largest power of two, or 1.5 times one, with which all epochs have `FEW_STEPS` optimizer steps: it
    seldom changes with a few more rows. It is at most `MOST_STEP_TOKENS`, and no less than the longest row. It depends
    on nothing else, so it is the same for any number of GPUs and any micro-batches.

    Args:
        index: the training rows, or a sample of them; None if no row is known.
        train: epochs, and what a row is for the objective.
        share: number of training rows for one of `index`.
    """
    if train.tokens_per_step != "auto":
        return StepTokens(tokens=train.tokens_per_step, reason="as set", is_auto=False)
    if index is None:
        return StepTokens(tokens=MOST_STEP_TOKENS, reason="the most that it takes, as no rows are known")
    rows, epochs = index.of_kind(train.row_kind, joined=False), train.epochs
    count = tokens = 0.0
    for source, weight in enumerate(rows.weights):
        own = rows.step_tokens[(rows.sources == source) & ~rows.dropped]
        count, tokens = count + share * weight * len(own), tokens + share * weight * int(own.sum(dtype=np.int64))

    def steps(size: int) -> int:
        return epochs * steps_of_epoch(tokens, tokens / count, size)

    longest = int(rows.step_tokens.max())
    sizes = (size for power in range(16, 1, -1) for size in (2**power, 3 * 2 ** (power - 2)))
    size = next((size for size in sizes if steps(size) >= FEW_STEPS), 0)
    why = "the most that it takes" if size == MOST_STEP_TOKENS else f"the most that gives {FEW_STEPS} optimizer steps"
    if size < longest:
        size, why = longest, "the tokens of the longest row"
    return StepTokens(tokens=size, reason=f"{why}: about {steps(size):,} steps in all")


def planned_step_tokens(plan: Path, train: Train) -> int:
    """What train.tokens_per_step was when the rows of a plan were chosen.

    Raises UserError if the file is missing or damaged, or has no such number for `auto`.
    """
    if train.tokens_per_step != "auto":
        return train.tokens_per_step
    metadata = open_batches(plan, {})[0].schema.metadata or {}
    found = metadata.get(AUTO_STEP_TOKENS.encode(), b"")
    if not (found.isdigit() and 0 < int(found) < 2**31):
        raise UserError(f"{plan}: was not planned with train.tokens_per_step: auto; run `dvc repro bucket`")
    return int(found)


def with_step_tokens(p: Params, step: StepTokens) -> Params:
    """Parameters with the tokens of a step as a number."""
    return p.model_copy(update={"train": p.train.model_copy(update={"tokens_per_step": step.tokens})})
