"""data.max_length: chunks of long rows, and counts of lost ones."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_finetune.data.encode.row_tokenizer import Chunks, limit_lengths
from lean_finetune.data.encode.whole_row_encoder import EncodedRows, from_segments


def rows_of(*rows: list[tuple[int, bool]]) -> EncodedRows:
    """Rows of units (tokens, trained); ids count up over all rows."""
    units = [unit for row in rows for unit in row]
    lengths = np.array([length for length, _ in units], np.int64)
    trained = np.array([is_trained for _, is_trained in units], bool)
    counts = np.array([len(row) for row in rows], np.int64)
    return from_segments(np.arange(lengths.sum(), dtype=np.int32), lengths, trained, counts, [])


def listed(chunks: Chunks) -> list[tuple[int, int, int, int, list[list[int]]]]:
    """(row, start, length, supervised, spans) of each chunk."""
    columns = zip(chunks.rows, chunks.starts, chunks.lengths, chunks.supervised, strict=True)
    return [
        (*map(int, values), chunks.spans[chunks.span_chunks == number].tolist())
        for number, values in enumerate(columns)
    ]


def spans_of(mask: list[bool]) -> list[list[int]]:
    """The ranges in which a mask is true."""
    changes = np.flatnonzero(np.diff([False, *mask, False]))
    return changes.reshape(-1, 2).tolist()


UNITS = st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=6)


@given(
    rows=st.lists(UNITS, max_size=5),
    max_length=st.integers(2, 9),
    over_length=st.sampled_from(["truncate", "drop", "split"]),
)
@example(rows=[[(6, False), (3, True), (5, False), (4, True), (2, False)]], max_length=10, over_length="split")
@example(rows=[[(1, True)], [(2, True)], [(5, False), (5, True), (100, False)]], max_length=10, over_length="drop")
@settings(max_examples=80, deadline=None)
def test_chunks_equal_those_of_a_plain_loop(rows, max_length, over_length):
    """A row ends with its last trained token. A chunk's first token is not supervised, as nothing predicts it."""
    expected, lost, long, start = [], [], [], 0
    for number, row in enumerate(rows):
        mask = [is_trained for length, is_trained in row for _ in range(length)]
        end = max((place + 1 for place, is_trained in enumerate(mask) if is_trained), default=0)
        long += [number] if end > max_length else []
        is_dropped = over_length == "drop" and end > max_length
        pieces = [
            (number, start + first, max(np.flatnonzero(piece)) + 1, sum(piece[1:]), spans_of(piece))
            for first in range(0, end if over_length == "split" else min(end, 1), max_length)
            if any((piece := mask[first : min(first + max_length, end)])[1:])
        ]
        expected += [] if is_dropped else pieces
        lost += [] if is_dropped or pieces else [number]
        start += len(mask)
    chunks = limit_lengths(rows_of(*rows), max_length, over_length)
    assert listed(chunks) == expected
    assert chunks.no_answer.tolist() == lost
    for kind, found in (("truncate", chunks.truncated), ("drop", chunks.dropped_long), ("split", chunks.split)):
        assert found.tolist() == (long if kind == over_length else [])
    even = chunks.select(chunks.rows % 2 == 0)
    assert listed(even) == [piece for piece in expected if piece[0] % 2 == 0]
