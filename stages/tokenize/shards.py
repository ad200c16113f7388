"""The token files: uncompressed Arrow IPC in record batches of a constant number of rows, mapped by later stages."""

from array import array
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from stages.tokenize.encode import EncodedRow

ROWS_PER_RECORD_BATCH = 512
INDEX_ROWS_PER_RECORD_BATCH = 1 << 16
LARGEST_UINT16_VOCABULARY = 1 << 16


def token_schema(vocab_size: int) -> pa.Schema:
    """Columns of train.arrow and heldout.arrow; ids take two bytes where the vocabulary allows it."""
    id_type = pa.uint16() if vocab_size <= LARGEST_UINT16_VOCABULARY else pa.int32()
    return pa.schema(
        [
            pa.field("input_ids", pa.list_(id_type), nullable=False),
            pa.field("loss_spans", pa.list_(pa.int32()), nullable=False),
            pa.field("family", pa.string()),
            pa.field("source_row", pa.int64(), nullable=False),
        ]
    )


class TokenWriter:
    """Writes rows of tokens to one Arrow file, holding at most one record batch of them.

    The file is only whole after the `with` block.
    """

    def __init__(self, path: Path, vocab_size: int):
        """Open the file."""
        self._schema = token_schema(vocab_size)
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, self._schema)
        self._rows: list[tuple[EncodedRow, str | None, int]] = []
        self.lengths = array("i")
        self.supervised = array("i")

    def __enter__(self) -> "TokenWriter":
        """Begin to write."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write the last rows and the footer, or, after a fault, only close the file, which its owner discards."""
        try:
            if error is None:
                self._flush()
                self._writer.close()
        finally:
            self._sink.close()

    def add(self, row: EncodedRow, family: str | None, source_row: int) -> None:
        """Append one row."""
        self._rows.append((row, family, source_row))
        self.lengths.append(len(row.ids))
        self.supervised.append(row.supervised)
        if len(self._rows) == ROWS_PER_RECORD_BATCH:
            self._flush()

    def _flush(self) -> None:
        """Write the rows held as one record batch."""
        if not self._rows:
            return
        rows, families, numbers = zip(*self._rows, strict=True)
        columns = [
            _lists([row.ids for row in rows], self._schema.field("input_ids").type),
            _lists([row.spans.ravel() for row in rows], self._schema.field("loss_spans").type),
            pa.array(families, pa.string()),
            pa.array(numbers, pa.int64()),
        ]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows.clear()


def _lists(values: list[np.ndarray], list_type: pa.ListType) -> pa.ListArray:
    """Arrays as one Arrow list column, without a Python object per value."""
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    flat = np.concatenate(values).astype(list_type.value_type.to_pandas_dtype(), copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=list_type)


def write_index(path: Path, lengths: array, supervised: array) -> None:
    """Write the training rows' lengths and supervised tokens: all that bucket reads."""
    schema = pa.schema(
        [pa.field("length", pa.int32(), nullable=False), pa.field("supervised", pa.int32(), nullable=False)]
    )
    columns = [pa.array(np.frombuffer(column, np.int32)) for column in (lengths, supervised)]
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema), max_chunksize=INDEX_ROWS_PER_RECORD_BATCH)
