"""Encoded rows brought to data.max_length: cut there, left out, or split into several."""

from dataclasses import dataclass

import numpy as np

from lean_finetune.data.encode.encoded_rows import EncodedRows

DROP, SPLIT = "drop", "split"


@dataclass(frozen=True, kw_only=True)
class CutRows:
    """What goes into the token files: pieces of encoded rows, each no longer than data.max_length."""

    rows: np.ndarray
    """int64, shape (pieces,): the encoded row of each piece, ascending; one row has several only when split."""
    starts: np.ndarray
    """int64: where the piece begins in the ids of all rows."""
    lengths: np.ndarray
    """int64: its tokens; the last one is trained."""
    supervised: np.ndarray
    """int64: its trained tokens that have a token before them to be predicted from; at least 1."""
    span_pieces: np.ndarray
    """int64, shape (spans,): the piece of each span, ascending."""
    spans: np.ndarray
    """int64, shape (spans, 2): positions in the piece."""
    truncated: np.ndarray
    """Rows that lost trained tokens to truncation, those that lost all of them too."""
    dropped_long: np.ndarray
    """Rows left out for their length."""
    split: np.ndarray
    """Rows cut into several."""
    no_answer: np.ndarray
    """Rows of which no piece has a supervised token; of a split row such pieces are left out alone."""

    def of(self, wanted: np.ndarray) -> "CutRows":
        """The pieces for which `wanted`, bool of shape (pieces,), is true."""
        number = np.cumsum(wanted) - 1
        kept = wanted[self.span_pieces]
        return CutRows(
            rows=self.rows[wanted],
            starts=self.starts[wanted],
            lengths=self.lengths[wanted],
            supervised=self.supervised[wanted],
            span_pieces=number[self.span_pieces[kept]],
            spans=self.spans[kept],
            truncated=self.truncated,
            dropped_long=self.dropped_long,
            split=self.split,
            no_answer=self.no_answer,
        )


def cut_rows(encoded: EncodedRows, max_length: int, over_length: str) -> CutRows:
    """Cut rows at `max_length`, and take away what stands behind the last trained token.

    Attention is causal, so tokens behind the last trained one change no loss: they would only cost memory. A row is
    long when it is longer than `max_length` without them.
    """
    row_count = len(encoded.offsets) - 1
    rows, spans = encoded.span_rows, encoded.spans
    ends = np.zeros(row_count, np.int64)
    np.maximum.at(ends, rows, spans[:, 1])
    long = np.flatnonzero(ends > max_length)
    none = long[:0]
    if len(long) == 0:
        pieces = np.zeros(len(rows), np.int64)
    else:
        if over_length == DROP:
            kept = ends[rows] <= max_length
            rows, spans = rows[kept], spans[kept]
        rows, spans, pieces = _cut_spans(rows, spans, max_length)
        if over_length != SPLIT:
            kept = pieces == 0
            rows, spans, pieces = rows[kept], spans[kept], pieces[kept]
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (pieces[1:] != pieces[:-1])
    first = np.flatnonzero(new)
    span_pieces = np.cumsum(new) - 1
    supervised = np.bincount(
        span_pieces, weights=spans[:, 1] - np.maximum(spans[:, 0], 1), minlength=len(first)
    ).astype(np.int64)
    last = np.append(first[1:], len(rows)) - 1
    answered = np.zeros(row_count, bool)
    answered[rows[first][supervised > 0]] = True
    if over_length == DROP:
        answered[long] = True
    found = CutRows(
        rows=rows[first],
        starts=encoded.offsets[rows[first]] + pieces[first] * max_length,
        lengths=spans[last, 1] if len(first) else none,
        supervised=supervised,
        span_pieces=span_pieces,
        spans=spans,
        truncated=none if over_length in (DROP, SPLIT) else long,
        dropped_long=long if over_length == DROP else none,
        split=long if over_length == SPLIT else none,
        no_answer=np.flatnonzero(~answered),
    )
    return found.of(supervised > 0)


def _cut_spans(rows: np.ndarray, spans: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans cut where each row's pieces of `size` tokens meet: (rows, spans in their piece, piece in the row)."""
    first, last = spans[:, 0] // size, (spans[:, 1] - 1) // size
    parts = last - first + 1
    whole = np.repeat(np.arange(len(rows)), parts)
    pieces = first[whole] + np.arange(len(whole)) - np.repeat(np.cumsum(parts) - parts, parts)
    cut = np.clip(spans[whole] - (pieces * size)[:, None], 0, size)
    return rows[whole], cut, pieces
