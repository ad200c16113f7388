"""Encoded rows as flat arrays, without a Python object per row."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Token ids of rows, and their trained spans."""

    ids: np.ndarray
    """int32: the ids of all rows, concatenated."""
    offsets: np.ndarray
    """int64, shape (rows + 1,): where each row starts in `ids`, and the end of the last."""
    span_rows: np.ndarray
    """int64, shape (spans,): the row of each span, ascending."""
    spans: np.ndarray
    """int64, shape (spans, 2): half-open ranges of positions in the row; ascending, with gaps between them."""
    failed: frozenset[int]
    """Rows with text that the engine could not encode, so that the tokenizers library did."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64."""
        return np.diff(self.offsets)


def from_segments(
    ids: np.ndarray,
    segment_lengths: np.ndarray,
    segment_trained: np.ndarray,
    segment_counts: np.ndarray,
    failed: list[int],
) -> EncodedRows:
    """Rows from the ids of their segments, each trained completely or not at all.

    Args:
        ids: int32, of all segments.
        segment_lengths: int64, tokens of each segment.
        segment_trained: bool, of each segment.
        segment_counts: int64, segments of each row.
        failed: indices of segments that the engine could not encode.
    """
    segment_rows = np.repeat(np.arange(len(segment_counts)), segment_counts)
    bounds = np.concatenate(([0], np.cumsum(segment_lengths)))
    offsets = bounds[np.concatenate(([0], np.cumsum(segment_counts)))]
    trained = np.flatnonzero(segment_trained & (segment_lengths > 0))
    starts, ends, rows = bounds[trained], bounds[trained + 1], segment_rows[trained]
    # Trained segments that touch become one span.
    is_gap = (starts[1:] != ends[:-1]) | (rows[1:] != rows[:-1])
    one = np.ones(min(len(trained), 1), bool)
    first, last = np.concatenate((one, is_gap)), np.concatenate((is_gap, one))
    rows = rows[first]
    spans = np.stack((starts[first], ends[last]), axis=1) - offsets[rows][:, None]
    return EncodedRows(
        ids=ids, offsets=offsets, span_rows=rows, spans=spans, failed=frozenset(segment_rows[failed].tolist())
    )
