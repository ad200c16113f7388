"""A step cut into smaller micro-batches than planned, where memory ended: its rows stay, so that it learns the same."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lean_finetune.plan.batch_plan import MicroBatch


def split_micro_batches(
    micro_batches: Iterable[MicroBatch], max_tokens: int, lengths: np.ndarray, supervised: np.ndarray
) -> list[MicroBatch]:
    """The same rows in the same order, in micro-batches of at most so many padded tokens, or of a single row.

    Those that are small enough stay as they are; others are halved until they are. The parts of a padded one keep its
    length; those of joined rows hold no padding.

    Args:
        micro_batches: of one step.
        max_tokens: padding counted.
        lengths: tokens of every training row.
        supervised: trained tokens of every training row.
    """
    found: list[MicroBatch] = []
    for one in micro_batches:
        if one.padded_tokens <= max_tokens or len(one.rows) < 2:
            found.append(one)
        else:
            found += split_micro_batches(_halves(one, lengths, supervised), max_tokens, lengths, supervised)
    return found


def _halves(one: MicroBatch, lengths: np.ndarray, supervised: np.ndarray) -> list[MicroBatch]:
    """Two micro-batches of the rows of one; joined rows are parted where half of their tokens lie before."""
    middle = (len(one.rows) + 1) // 2
    if one.flat:
        tokens = np.cumsum(lengths[one.rows])
        middle = min(int(np.searchsorted(tokens, tokens[-1] / 2)) + 1, len(one.rows) - 1)
    parts = (one.rows[:middle], one.rows[middle:])
    return [
        replace(
            one,
            rows=rows,
            length=int(lengths[rows].sum()) if one.flat else one.length,
            supervised=int(supervised[rows].sum()),
        )
        for rows in parts
    ]
