"""Rows as tokens, held together as flat arrays: no object per row."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class EncodedRow(NamedTuple):
    """One row as tokens."""

    ids: np.ndarray
    """int32, shape (tokens,)."""
    spans: np.ndarray
    """int64, shape (spans, 2): half-open token positions that are trained, ascending and disjoint."""


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Token ids of some rows, and the half-open spans of them that are trained."""

    ids: np.ndarray
    """int32: all rows' ids, one row after the other."""
    offsets: np.ndarray
    """int64, shape (rows + 1,): where each row begins in `ids`, and their end."""
    span_rows: np.ndarray
    """int64, shape (spans,): the row of each span, ascending."""
    spans: np.ndarray
    """int64, shape (spans, 2): positions in the row; ascending, disjoint, and none touches the next."""
    failed: frozenset[int]
    """Rows with text that the faster engine gave up on."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64."""
        return np.diff(self.offsets)

    def __getitem__(self, number: int) -> EncodedRow:
        """One row, counted from 0."""
        ids = self.ids[self.offsets[number] : self.offsets[number + 1]]
        return EncodedRow(ids=ids, spans=self.spans[self.span_rows == number])


def from_units(
    ids: np.ndarray, unit_lengths: np.ndarray, unit_trained: np.ndarray, unit_counts: np.ndarray, failed: list[int]
) -> EncodedRows:
    """Rows of units, which are trained as a whole or not at all.

    Args:
        ids: int32, of all units.
        unit_lengths: int64, tokens of each unit.
        unit_trained: bool, of each unit.
        unit_counts: int64, units of each row.
        failed: units that the faster engine gave up on.
    """
    unit_rows = np.repeat(np.arange(len(unit_counts)), unit_counts)
    bounds = np.concatenate(([0], np.cumsum(unit_lengths)))
    offsets = bounds[np.concatenate(([0], np.cumsum(unit_counts)))]
    trained = np.flatnonzero(unit_trained & (unit_lengths > 0))
    starts, ends, rows = bounds[trained], bounds[trained + 1], unit_rows[trained]
    # Units that touch are one span.
    apart = (starts[1:] != ends[:-1]) | (rows[1:] != rows[:-1])
    any_span = np.ones(min(len(trained), 1), bool)
    first, last = np.concatenate((any_span, apart)), np.concatenate((apart, any_span))
    rows = rows[first]
    spans = np.stack((starts[first], ends[last]), axis=1) - offsets[rows][:, None]
    return EncodedRows(
        ids=ids, offsets=offsets, span_rows=rows, spans=spans, failed=frozenset(unit_rows[failed].tolist())
    )
