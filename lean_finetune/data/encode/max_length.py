"""Encoded rows limited to data.max_length: truncated, left out, or split into chunks."""

from dataclasses import dataclass, replace

import numpy as np

from lean_finetune.data.encode.encoded_rows import EncodedRows

DROP, SPLIT = "drop", "split"


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Parts of encoded rows of at most data.max_length tokens, as the token files store them."""

    rows: np.ndarray
    """int64, shape (chunks,): the encoded row of each chunk, ascending. Only split rows have several."""
    starts: np.ndarray
    """int64, shape (chunks,): index of its first token in the ids of all rows."""
    lengths: np.ndarray
    """int64, shape (chunks,): its tokens; the last one is trained."""
    supervised: np.ndarray
    """int64, shape (chunks,): its trained tokens except the first of the chunk, which nothing predicts; at least 1."""
    span_chunks: np.ndarray
    """int64, shape (spans,): the chunk of each span, ascending."""
    spans: np.ndarray
    """int64, shape (spans, 2): token positions in the chunk."""
    truncated: np.ndarray
    """Rows that lost trained tokens to truncation."""
    dropped_long: np.ndarray
    """Rows left out because of their length."""
    split: np.ndarray
    """Rows split into several chunks."""
    no_answer: np.ndarray
    """Rows without a supervised token in any chunk."""

    def select(self, wanted: np.ndarray) -> "Chunks":
        """The chunks for which `wanted`, bool of shape (chunks,), is true."""
        new_index = np.cumsum(wanted) - 1
        wanted_spans = wanted[self.span_chunks]
        return replace(
            self,
            rows=self.rows[wanted],
            starts=self.starts[wanted],
            lengths=self.lengths[wanted],
            supervised=self.supervised[wanted],
            span_chunks=new_index[self.span_chunks[wanted_spans]],
            spans=self.spans[wanted_spans],
        )


def limit_lengths(encoded: EncodedRows, max_length: int, over_length: str) -> Chunks:
    """Truncate, drop or split rows over `max_length`, and remove tokens behind the last trained one.

    Attention is causal, so tokens behind the last trained one change no loss and only cost memory. They do not count
    towards a row's length.
    """
    row_count = len(encoded.offsets) - 1
    rows, spans = encoded.span_rows, encoded.spans
    ends = np.zeros(row_count, np.int64)
    np.maximum.at(ends, rows, spans[:, 1])
    long = np.flatnonzero(ends > max_length)
    none = long[:0]
    if len(long) == 0:
        number = np.zeros(len(rows), np.int64)  # Of each span's chunk in its row.
    else:
        if over_length == DROP:
            fits = ends[rows] <= max_length
            rows, spans = rows[fits], spans[fits]
        rows, spans, number = _split_spans(rows, spans, max_length)
        if over_length != SPLIT:
            fits = number == 0
            rows, spans, number = rows[fits], spans[fits], number[fits]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:] != rows[:-1]) | (number[1:] != number[:-1])
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(rows)) - 1
    span_chunks = np.cumsum(is_new) - 1
    span_supervised = spans[:, 1] - np.maximum(spans[:, 0], 1)
    supervised = np.bincount(span_chunks, weights=span_supervised, minlength=len(first)).astype(np.int64)
    is_answered = np.zeros(row_count, bool)
    is_answered[rows[first][supervised > 0]] = True
    if over_length == DROP:
        is_answered[long] = True
    chunks = Chunks(
        rows=rows[first],
        starts=encoded.offsets[rows[first]] + number[first] * max_length,
        lengths=spans[last, 1] if len(first) else none,
        supervised=supervised,
        span_chunks=span_chunks,
        spans=spans,
        truncated=none if over_length in (DROP, SPLIT) else long,
        dropped_long=long if over_length == DROP else none,
        split=long if over_length == SPLIT else none,
        no_answer=np.flatnonzero(~is_answered),
    )
    return chunks.select(supervised > 0)


def _split_spans(rows: np.ndarray, spans: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split spans at multiples of `size`: (rows, spans in their chunk, number of the chunk in its row)."""
    first, last = spans[:, 0] // size, (spans[:, 1] - 1) // size
    parts = last - first + 1
    span = np.repeat(np.arange(len(rows)), parts)
    number = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(parts) - parts, parts)
    inside = np.clip(spans[span] - (number * size)[:, None], 0, size)
    return rows[span], inside, number
