"""Split the micro-batches of a step after an out-of-memory error; the step keeps its rows and learns the same."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lean_finetune.plan.batch_plan import MicroBatch


def split_micro_batches(
    micro_batches: Iterable[MicroBatch], max_tokens: int, lengths: np.ndarray, supervised: np.ndarray
) -> list[MicroBatch]:
    """Halve micro-batches until each has at most `max_tokens` padded tokens or a single row.

    Rows keep their order. Halves of a padded micro-batch keep its length; halves of joined rows have no padding.
    `lengths` and `supervised` are the tokens and trained tokens of every training row.
    """
    found: list[MicroBatch] = []
    for one in micro_batches:
        if one.padded_tokens <= max_tokens or len(one.rows) < 2:
            found.append(one)
        else:
            found += split_micro_batches(_halves(one, lengths, supervised), max_tokens, lengths, supervised)
    return found


def _halves(one: MicroBatch, lengths: np.ndarray, supervised: np.ndarray) -> list[MicroBatch]:
    """Two micro-batches with the rows of one; joined rows are split in the middle of their tokens."""
    middle = (len(one.rows) + 1) // 2
    if one.flat:
        tokens = np.cumsum(lengths[one.rows])
        middle = min(int(np.searchsorted(tokens, tokens[-1] / 2)) + 1, len(one.rows) - 1)
    return [
        replace(
            one,
            rows=rows,
            length=int(lengths[rows].sum()) if one.flat else one.length,
            supervised=int(supervised[rows].sum()),
        )
        for rows in (one.rows[:middle], one.rows[middle:])
    ]
