"""Rows of Arrow and Parquet files."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_block import RowBlock, to_payload
from lean_finetune.data.read.worker_memory import limited_memory_growth

ARROW_FILE_MAGIC = b"ARROW1"
# Parquet compresses repeated values, so rows can be much larger than the file suggests: this bounds their number.
MAX_BATCH_ROWS = 4096
DECODED_BYTES = 1 << 28
BATCH_BYTES = 4 << 30
"""Most memory for reading a batch: a file of 500 KB can hold one of 40 GB."""


def read_record_batches(file: BinaryIO, name: str, is_parquet: bool, block_bytes: int) -> Iterator[RowBlock]:
    """Blocks of about `block_bytes`. Memory holds one page of each Parquet column, or one record batch of the file.

    Raises UserError if the file is damaged, or two columns have the same name.
    """
    number = 0
    batches = _parquet_batches(file, block_bytes) if is_parquet else _arrow_batches(file)
    try:
        while (batch := _next(batches)) is not None:
            _check(batch, name)
            for plain in _plain(batch):
                for part in _halves(plain, block_bytes):
                    yield RowBlock(kind="arrow", payload=to_payload(part), first_row=number)
                    number += part.num_rows
    except MemoryError:  # Arrow's too.
        raise UserError(
            f"{name}: one batch of its rows needs more than {BATCH_BYTES >> 30} GiB of memory; write it again with "
            "fewer rows in a batch"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{name}: the name of a column is not UTF-8 text; write the file again") from None
    except (pa.ArrowException, OSError) as error:
        kind = "Parquet" if is_parquet else "Arrow"
        raise UserError(f"{name}: is damaged or no {kind} file ({error}); write or download it again") from error


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """The next batch; None after the last. Raises MemoryError if it takes more than BATCH_BYTES."""
    with limited_memory_growth(BATCH_BYTES):
        return next(batches, None)


def _parquet_batches(file: BinaryIO, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Batches of the number of rows that makes a block on average."""
    import pyarrow.parquet as pq  # Here: other formats save its 5 MB.

    parquet = pq.ParquetFile(file, buffer_size=block_bytes, pre_buffer=False)
    metadata = parquet.metadata
    size_bytes = sum(metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))
    rows = block_bytes * metadata.num_rows // max(size_bytes, 1)
    yield from parquet.iter_batches(batch_size=min(max(rows, 1), MAX_BATCH_ROWS), use_threads=False)


def _arrow_batches(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow IPC file or stream; the first bytes say which it is."""
    source = pa.PythonFile(file, mode="r")
    is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
    source.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(source)
        return
    reader = pa.ipc.open_file(source)
    for k in range(reader.num_record_batches):
        yield reader.get_batch(k)


def _check(batch: pa.RecordBatch, name: str) -> None:
    """Refuse a batch that would be read wrongly. Text that is not UTF-8 is later a fault of its row."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        repeated = next(column for k, column in enumerate(names) if column in names[:k])
        raise UserError(f"{name}: two columns are named {repeated!r}; rename one")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        # What is behind the first such text was not validated.
        fields = [
            (column, _with_bytes(column_type)) for column, column_type in zip(names, batch.schema.types, strict=True)
        ]
        batch.cast(pa.schema(fields)).validate(full=True)


def _with_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes for text, so that validation accepts text that is not UTF-8."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.binary() if pa.types.is_string(kind) else pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_field.with_type(_with_bytes(kind.value_type))
        return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    return kind


def _plain(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch without metadata and dictionaries, which would be copied into every block.

    It comes in parts that take at most DECODED_BYTES, or have one row, even if every row has the longest value.
    """
    longest = sum(column.dictionary.nbytes for column in batch.columns if isinstance(column, pa.DictionaryArray))
    rows = max(1, DECODED_BYTES // longest) if longest else max(1, batch.num_rows)
    for start in range(0, batch.num_rows, rows):
        columns: list[Any] = [
            column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
            for column in batch.slice(start, rows).columns
        ]
        yield pa.record_batch(columns, names=batch.schema.names)


def _halves(batch: pa.RecordBatch, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch split in halves until each part has a block's size or one row."""
    if batch.num_rows > 1 and batch.nbytes > 2 * block_bytes:
        middle = batch.num_rows // 2
        yield from _halves(batch.slice(0, middle), block_bytes)
        yield from _halves(batch.slice(middle), block_bytes)
    elif batch.num_rows:
        yield batch


# Conversion between numpy and Arrow without pandas.
#
# `pa.array` and `to_numpy` import pandas wherever it is installed, which costs 40 MB in each process. So does
# `to_pandas_dtype` in older releases of pyarrow.


def from_numpy(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Numbers or booleans as an Arrow array of a type of the same width. Numbers are not copied."""
    if pa.types.is_boolean(kind):
        packed = np.packbits(values, bitorder="little")
    else:
        packed = np.ascontiguousarray(values, to_numpy(pa.nulls(0, kind)).dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(packed)])


def from_texts(texts: Sequence[str | None]) -> pa.Array:
    """Texts as an Arrow array of strings. None is null. Raises UnicodeEncodeError if a text has a lone surrogate."""
    if all(text is None for text in texts):
        return pa.nulls(len(texts), pa.string())
    encoded = [b"" if text is None else text.encode() for text in texts]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int32, len(texts) + 1)
    validity = np.packbits([text is not None for text in texts], bitorder="little") if None in texts else None
    buffers = [
        None if validity is None else pa.py_buffer(validity),
        pa.py_buffer(offsets),
        pa.py_buffer(b"".join(encoded)),
    ]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def to_numpy(numbers: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Numbers without nulls as a numpy array: a view of an array, a copy of a chunked array."""
    contiguous = numbers.combine_chunks() if isinstance(numbers, pa.ChunkedArray) else numbers
    return np.from_dlpack(contiguous)
