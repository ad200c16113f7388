"""data.max_length: chunks of long rows, and counts of lost ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_finetune.data.encode.encoded_rows import EncodedRows, from_segments
from lean_finetune.data.encode.max_length import Chunks, limit_lengths


def rows_of(*rows: list[tuple[int, bool]]) -> EncodedRows:
    """Rows of units (tokens, trained); ids count up over all rows."""
    units = [unit for row in rows for unit in row]
    lengths = np.array([length for length, _ in units], np.int64)
    trained = np.array([is_trained for _, is_trained in units], bool)
    counts = np.array([len(row) for row in rows], np.int64)
    return from_segments(np.arange(lengths.sum(), dtype=np.int32), lengths, trained, counts, [])


def listed(chunks: Chunks) -> list[tuple[int, int, int, list[list[int]]]]:
    """(row, start, length, spans) of each chunk."""
    return [
        (int(row), int(start), int(length), chunks.spans[chunks.span_chunks == number].tolist())
        for number, (row, start, length) in enumerate(zip(chunks.rows, chunks.starts, chunks.lengths, strict=True))
    ]


LONG = [(6, False), (3, True), (5, False), (4, True), (2, False)]
SHORT = [(2, False), (3, True), (4, False)]
LATE = [(12, False), (2, True)]
EXPECTED = {
    "truncate": ([(0, 0, 9, [[6, 9]]), (1, 20, 5, [[2, 5]])], [0, 2], [], [], [2]),
    "drop": ([(1, 20, 5, [[2, 5]])], [], [0, 2], [], []),
    "split": (
        [(0, 0, 9, [[6, 9]]), (0, 10, 8, [[4, 8]]), (1, 20, 5, [[2, 5]]), (2, 39, 4, [[2, 4]])],
        [],
        [],
        [0, 2],
        [],
    ),
}


@pytest.mark.parametrize("over_length", EXPECTED)
def test_long_rows_are_truncated_dropped_or_split_and_end_with_a_trained_token(over_length):
    chunks = limit_lengths(rows_of(LONG, SHORT, LATE), 10, over_length)
    pieces, truncated, dropped, split, no_answer = EXPECTED[over_length]
    assert listed(chunks) == pieces
    found = [list(rows) for rows in (chunks.truncated, chunks.dropped_long, chunks.split, chunks.no_answer)]
    assert found == [truncated, dropped, split, no_answer]


def test_a_row_is_long_only_by_what_is_trained_and_before_it():
    chunks = limit_lengths(rows_of([(5, False), (5, True), (100, False)]), 10, "drop")
    assert listed(chunks) == [(0, 0, 10, [[5, 10]])] and not len(chunks.dropped_long)


def test_a_first_token_alone_is_not_supervised():
    """No token before it predicts it."""
    for over_length in ("truncate", "drop", "split"):
        chunks = limit_lengths(rows_of([(1, True)], [(2, True)]), 10, over_length)
        assert listed(chunks) == [(1, 1, 2, [[0, 2]])]
        assert (chunks.supervised.tolist(), chunks.no_answer.tolist()) == ([1], [0])


UNITS = st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=6)


@given(rows=st.lists(UNITS, max_size=5), max_length=st.integers(2, 9), over_length=st.sampled_from(sorted(EXPECTED)))
@settings(max_examples=80, deadline=None)
def test_chunks_equal_those_of_a_plain_loop(rows, max_length, over_length):
    expected, lost, start = [], [], 0
    for number, row in enumerate(rows):
        mask = [is_trained for length, is_trained in row for _ in range(length)]
        end = max((place + 1 for place, is_trained in enumerate(mask) if is_trained), default=0)
        is_dropped = over_length == "drop" and end > max_length
        pieces = [
            (number, start + first, max(np.flatnonzero(piece)) + 1, sum(piece[1:]))
            for first in range(0, end if over_length == "split" else min(end, 1), max_length)
            if any((piece := mask[first : min(first + max_length, end)])[1:])
        ]
        expected += [] if is_dropped else pieces
        lost += [] if is_dropped or pieces else [number]
        start += len(mask)
    chunks = limit_lengths(rows_of(*rows), max_length, over_length)
    columns = (chunks.rows, chunks.starts, chunks.lengths, chunks.supervised)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert chunks.no_answer.tolist() == lost
    even = chunks.select(chunks.rows % 2 == 0)
    assert listed(even) == [piece for piece in listed(chunks) if piece[0] % 2 == 0]
