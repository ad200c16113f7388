"""Parquet and Arrow files, in record batches of bounded size."""

from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_range import Stretch, to_payload

ARROW_FILE_MAGIC = b"ARROW1"
# Where values repeat, a Parquet file's sizes say little of the rows': this bounds a batch of such rows.
MAX_BATCH_ROWS = 4096


def cut_columns(file: BinaryIO, name: str, is_parquet: bool, block_bytes: int) -> Iterator[Stretch]:
    """Rows of about `block_bytes`; no more is held than a page of each Parquet column, or a record batch of the file.

    Raises:
        UserError: the file is damaged, or two columns have one name.
    """
    number = 0
    batches = _parquet_batches(file, block_bytes) if is_parquet else _arrow_batches(file)
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                _check(batch, name)
        except (pa.ArrowException, OSError) as error:
            kind = "Parquet" if is_parquet else "Arrow"
            raise UserError(f"{name}: is no whole {kind} file ({error}); write or download it again") from error
        if batch is None:
            return
        for piece in _pieces(_plain(batch), block_bytes):
            yield Stretch("arrow", to_payload(piece), number)
            number += piece.num_rows


def _parquet_batches(file: BinaryIO, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Batches of as many rows as make a block on average."""
    import pyarrow.parquet as pq  # 5 MB that other formats do without

    parquet = pq.ParquetFile(file, buffer_size=block_bytes, pre_buffer=False)
    about = parquet.metadata
    size_bytes = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
    rows = block_bytes * about.num_rows // max(size_bytes, 1)
    yield from parquet.iter_batches(batch_size=min(max(rows, 1), MAX_BATCH_ROWS), use_threads=False)


def _arrow_batches(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Batches as the file holds them; both forms of Arrow IPC are told by their first bytes."""
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
    """Refuse what would be read wrongly; text that is not UTF-8 is left to be the fault of its row."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        double = next(column for k, column in enumerate(names) if column in names[:k])
        raise UserError(f"{name}: two columns are named {double!r}; rename one")
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without what would travel with each of its pieces: metadata and dictionaries."""
    columns: list[Any] = [
        column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column for column in batch.columns
    ]
    return pa.record_batch(columns, names=batch.schema.names)


def _pieces(batch: pa.RecordBatch, block_bytes: int) -> Iterator[pa.RecordBatch]:
    """Halves, until each is of a block's size or one row."""
    if batch.num_rows > 1 and batch.nbytes > 2 * block_bytes:
        middle = batch.num_rows // 2
        yield from _pieces(batch.slice(0, middle), block_bytes)
        yield from _pieces(batch.slice(middle), block_bytes)
    elif batch.num_rows:
        yield batch
