"""Checks that a plan belongs to the tokens and the GPUs of a run."""

import numpy as np

from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import Plan, sums_between


def refuse_other_ranks(plan: Plan, ranks: int) -> None:
    """Raise UserError for a plan for another number of GPUs with different rows: some would never be trained."""
    if plan.ranks != ranks:
        raise UserError(
            f"data/batches/plan.arrow: must be made for as many GPUs as train different rows; got a plan for "
            f"{plan.ranks} where there are {ranks}; run `dvc repro bucket`"
        )


def refuse_other_tokens(plan: Plan, lengths: np.ndarray) -> None:
    """Raise UserError for a plan whose rows are missing from the index, or are longer there.

    `lengths` are the tokens of every training row.
    """
    if plan.rows.max() < len(lengths):
        planned = lengths[plan.rows]
        room = plan.length if plan.flat else np.repeat(plan.length, plan.sizes)
        needed = sums_between(planned, plan.bounds) if plan.flat else planned
        if (needed <= room).all():
            return
    raise UserError(
        "data/batches/plan.arrow: its rows differ from data/tokens/train-index.arrow: the plan was made for other "
        "tokens; run `dvc repro bucket`"
    )
