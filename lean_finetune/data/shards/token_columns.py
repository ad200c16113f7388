"""The columns of the token files, filled from flat arrays without a Python object per token."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from lean_finetune.data.encode.max_length import CutRows
from lean_finetune.data.read.arrow_arrays import from_numpy, from_texts, to_numpy

LARGEST_UINT16 = (1 << 16) - 1
DIGEST_BYTES = 8


def token_schema(vocab_size: int, max_length: int, files: int) -> pa.Schema:
    """Columns of the shards; ids, positions and files take two bytes each where the largest of them allows it."""
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(_narrowest(vocab_size - 1)), nullable=False),
            pa.field("loss_spans", pa.list_(_narrowest(max_length)), nullable=False),
            pa.field("family", pa.string()),
            pa.field("source_file", _narrowest(files - 1), nullable=False),
            # read_blocks sees to it that no file has more rows.
            pa.field("source_row", pa.uint32(), nullable=False),
        ]
    )


def _narrowest(largest: int) -> pa.DataType:
    """The type for numbers from 0 to `largest`."""
    return pa.uint16() if largest <= LARGEST_UINT16 else pa.int32()


def record_batch(
    schema: pa.Schema,
    cut: CutRows,
    ids: np.ndarray,
    families: Sequence[str | None],
    source_file: int,
    source_rows: np.ndarray,
) -> pa.RecordBatch:
    """The pieces of a block as one record batch.

    Args:
        schema: of `token_schema`.
        cut: the pieces.
        ids: int32, the ids that `cut.starts` points into.
        families: of each encoded row.
        source_file: `Block.file`.
        source_rows: uint32, the number of each encoded row in its file.
    """
    pieces = [
        ids[start:end] for start, end in zip(cut.starts.tolist(), (cut.starts + cut.lengths).tolist(), strict=True)
    ]
    values = np.concatenate(pieces) if pieces else ids[:0]
    span_counts = np.bincount(cut.span_pieces, minlength=len(cut.rows))
    columns = [
        _lists(values, cut.lengths, schema.field("input_ids").type),
        _lists(cut.spans.ravel(), 2 * span_counts, schema.field("loss_spans").type),
        from_texts([families[row] for row in cut.rows.tolist()]),
        from_numpy(np.full(len(cut.rows), source_file), schema.field("source_file").type),
        from_numpy(source_rows[cut.rows], schema.field("source_row").type),
    ]
    return pa.record_batch(columns, schema=schema)


def digests(batch: pa.RecordBatch) -> np.ndarray:
    """64-bit hash of each row's ids and spans, uint64: equal rows have equal ones."""
    hashes = [blake2b(digest_size=DIGEST_BYTES) for _ in range(len(batch))]
    for column in (batch.column("input_ids"), batch.column("loss_spans")):
        values = to_numpy(column.flatten()).data.cast("B")
        places = (to_numpy(column.offsets) * column.type.value_type.byte_width).tolist()
        for digest, start, end in zip(hashes, places, places[1:], strict=False):
            digest.update(values[start:end])
    return np.frombuffer(b"".join(digest.digest() for digest in hashes), np.dtype("<u8"))


def _lists(values: np.ndarray, lengths: np.ndarray, list_type: pa.ListType) -> pa.ListArray:
    """Flat values as one Arrow list column."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = from_numpy(values, list_type.value_type)
    return pa.ListArray.from_arrays(from_numpy(offsets, pa.int32()), flat, type=list_type)
