"""The tokens of one block: Arrow columns filled from flat arrays, row digests, and counts."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from lean_finetune.data.encode.row_tokenizer import Chunks
from lean_finetune.data.read.arrow_batches import from_numpy, from_texts, to_numpy

LARGEST_UINT16 = (1 << 16) - 1
DIGEST_BYTES = 8
MAX_UNREAD_COLUMNS = 32
"""Unread columns, and unknown keys of turns, listed for a source: rows may have any number of keys."""
MAX_REJECTS = 100
"""Rejected rows that are listed: a broken source would fill the list with all its rows."""


class Reject(NamedTuple):
    """A row that was not used."""

    file: int
    row: int
    line: int
    reason: str


@dataclass(kw_only=True)
class Tally:
    """Counts of rows, of a block, a shard, or all shards.

    The names of the counts:
        rows: read, without empty lines
        bad_rows: left out by on_bad_row: skip
        empty_answer_rows: left out: a trained answer is empty
        reasoning_left_out_rows: the template shows an earlier trained turn without its reasoning
        truncated_rows: lost trained tokens to max_length
        dropped_long_rows: longer than max_length, over_length: drop
        split_rows: split into several, over_length: split
        no_answer_rows: left out: no trained token is left (of a split row, in none of its chunks)
        control_tokens_as_text, surrogates_replaced: occurrences in the text of rows
        engine_fallback_rows: tiktoken could not encode them
        sampled_rows, sampled_rows_differing: also encoded as one text, to see whether the ids differ
    """

    counts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By source, then by name."""
    rejects: list[Reject] = field(default_factory=list)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By name of a count: (file, line) of its first row."""
    unread: dict[int, list[str]] = field(default_factory=dict)
    """By source: columns that its format does not read, sorted."""
    unknown: dict[int, list[str]] = field(default_factory=dict)
    """By source: keys of turns that we do not know and pass to the chat template, sorted."""

    def add(self, other: "Tally") -> None:
        """Add the counts of later rows. At most MAX_REJECTS rejects and MAX_UNREAD_COLUMNS columns remain."""
        for source, counts in other.counts.items():
            self.counts[source].update(counts)
        self.rejects += other.rejects[: MAX_REJECTS - len(self.rejects)]
        self.first = other.first | self.first
        for mine, theirs in ((self.unread, other.unread), (self.unknown, other.unknown)):
            for source, names in theirs.items():
                mine[source] = sorted({*mine.get(source, ()), *names})[:MAX_UNREAD_COLUMNS]


class SideTokens(NamedTuple):
    """The tokens of one side of the split."""

    rows: pa.RecordBatch
    """Rows in order, of `token_schema`; may be empty."""
    supervised: np.ndarray
    """int32, shape (rows,): trained tokens of each row."""
    digests: np.ndarray
    """uint64, shape (rows,): hash of each row's ids and spans; empty unless `drop_duplicates`."""


class BlockTokens(NamedTuple):
    """The tokens of one block, and the counts of its rows."""

    train: SideTokens
    heldout: SideTokens
    tally: Tally


def token_schema(vocab_size: int, max_length: int, files: int) -> pa.Schema:
    """Columns of the token files. Ids, positions and files take two bytes each where the largest value fits."""
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(_narrowest(vocab_size - 1)), nullable=False),
            pa.field("loss_spans", pa.list_(_narrowest(max_length)), nullable=False),
            pa.field("family", pa.string()),
            pa.field("source_file", _narrowest(files - 1), nullable=False),
            pa.field("source_row", pa.uint32(), nullable=False),  # read_blocks refuses files with more rows.
        ]
    )


def _narrowest(largest: int) -> pa.DataType:
    return pa.uint16() if largest <= LARGEST_UINT16 else pa.int32()


def record_batch(
    schema: pa.Schema,
    chunks: Chunks,
    ids: np.ndarray,
    families: Sequence[str | None],
    source_file: int,
    source_rows: np.ndarray,
) -> pa.RecordBatch:
    """The chunks of a block as one record batch of `token_schema`.

    `chunks.starts` are indices in `ids`, int32. `families` and `source_rows`, uint32, have one item per encoded row.
    """
    starts, ends = chunks.starts.tolist(), (chunks.starts + chunks.lengths).tolist()
    parts = [ids[start:end] for start, end in zip(starts, ends, strict=True)]
    values = np.concatenate(parts) if parts else ids[:0]
    span_counts = np.bincount(chunks.span_chunks, minlength=len(chunks.rows))
    columns = [
        _lists(values, chunks.lengths, schema.field("input_ids").type),
        _lists(chunks.spans.ravel(), 2 * span_counts, schema.field("loss_spans").type),
        from_texts([families[row] for row in chunks.rows.tolist()]),
        from_numpy(np.full(len(chunks.rows), source_file), schema.field("source_file").type),
        from_numpy(source_rows[chunks.rows], schema.field("source_row").type),
    ]
    return pa.record_batch(columns, schema=schema)


def digests(batch: pa.RecordBatch) -> np.ndarray:
    """64-bit hash of each row's ids and spans, uint64. Equal rows have equal hashes."""
    hashes = [blake2b(digest_size=DIGEST_BYTES) for _ in range(len(batch))]
    for column in (batch.column("input_ids"), batch.column("loss_spans")):
        values = to_numpy(column.flatten()).data.cast("B")
        offsets = (to_numpy(column.offsets) * column.type.value_type.byte_width).tolist()
        for digest, start, end in zip(hashes, offsets, offsets[1:], strict=False):
            digest.update(values[start:end])
    return np.frombuffer(b"".join(digest.digest() for digest in hashes), np.dtype("<u8"))


def _lists(values: np.ndarray, lengths: np.ndarray, list_type: pa.ListType) -> pa.ListArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = from_numpy(values, list_type.value_type)
    return pa.ListArray.from_arrays(from_numpy(offsets, pa.int32()), flat, type=list_type)
