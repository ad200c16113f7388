"""All rows of the pinned data as blocks, read front to back in bounded memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.arrow_batches import read_record_batches
from lean_finetune.data.read.csv_rows import read_table
from lean_finetune.data.read.json_values import LAYOUT_BYTES, json_layout, read_json_values, read_lines
from lean_finetune.data.read.pinned_files import DecompressedFile, PinnedBytes, open_seekable
from lean_finetune.data.read.row_block import BLOCK_BYTES, RowBlock
from lean_finetune.pinning.locate import DataFile, data_files, is_heldout_source

MAX_ROWS_OF_A_FILE = 4_000_000_000
"""The token files number rows in four bytes; the margin is more than any block has."""
DELIMITERS = {"csv": ",", "tsv": "\t"}


def file_names(lock: Mapping[str, Any]) -> list[str]:
    """The name of each file for messages, by `RowBlock.file`. Raises UserError if the lock is of another schema."""
    return [file.name for file in data_files(lock)]


def read_blocks(
    lock: Mapping[str, Any],
    *,
    max_rows: int | None,
    progress: Callable[[int], Any],
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[RowBlock]:
    """Every row of the data lock once, in order. The blocks depend on the files' bytes alone.

    A source with `rows` ends after so many; later files are not opened. Rows of held-out sources do not count towards
    `max_rows`. `progress` is called with the bytes read since its last call, before decompression.

    Raises UserError if a file is gone, differs from what was pinned, cannot be split into rows, or has too many.
    """
    files = data_files(lock)
    number = 0
    left = max_rows
    left_of_source = [source["rows"] for source in lock["sources"]]
    for index, file in enumerate(files):
        counts = not is_heldout_source(lock["sources"][file.source])
        limits = [limit for limit in (left if counts else None, left_of_source[file.source]) if limit is not None]
        limit = min(limits, default=None)
        if limit == 0:
            continue
        for block, rows in _file_blocks(file, progress, block_bytes, limit):
            if block.first_row >= MAX_ROWS_OF_A_FILE:
                raise UserError(
                    f"{file.name}: must have at most {MAX_ROWS_OF_A_FILE:,} rows; split it into several files"
                )
            yield replace(block, number=number, source=file.source, file=index)
            number += 1
            left = left - rows if left is not None and counts else left
            if left_of_source[file.source] is not None:
                left_of_source[file.source] -= rows


def _file_blocks(
    file: DataFile, progress: Callable[[int], Any], block_bytes: int, limit: int | None
) -> Iterator[tuple[RowBlock, int]]:
    """(block, its rows) of one file up to `limit` rows. The hash of the complete file is compared with the lock.

    A file on the hub is fetched only up to the limit; then its hash is not compared.
    """
    if file.kind.is_seekable:
        with open_seekable(file, progress) as seekable:
            blocks = read_record_batches(seekable, file.name, file.kind.format == "parquet", block_bytes)
            yield from _limited(blocks, limit)
        return
    with PinnedBytes(file, progress) as source:
        content = DecompressedFile(source, file)  # Keeps the stream open: Arrow closes `source` with it.
        yield from _limited(_read_forward(file, content, block_bytes), limit)
        if file.path is not None or source.is_at_end:
            source.finish()


def _limited(blocks: Iterator[RowBlock], limit: int | None) -> Iterator[tuple[RowBlock, int]]:
    """(block, its rows) up to `limit` rows. Without a limit rows are not counted, as that parses Arrow blocks."""
    if limit is None:
        yield from ((block, 0) for block in blocks)
        return
    for block in blocks:
        rows = min(block.count_rows(), limit)
        if rows:
            yield replace(block, limit=limit), rows
        limit -= rows
        if limit == 0:
            return


def _read_forward(file: DataFile, content: DecompressedFile, block_bytes: int) -> Iterator[RowBlock]:
    """The blocks of a file that needs no seeking."""
    start = content.peek(max(block_bytes, LAYOUT_BYTES))
    if file.kind.format in DELIMITERS:
        return read_table(content.read, file.name, DELIMITERS[file.kind.format], block_bytes)
    if file.kind.format == "txt":
        return read_lines(content.read, "text", block_bytes)
    # White space longer than `start` hides a bracket; each row is then refused as not JSON.
    layout, before = json_layout(start)
    if layout == "lines":
        return read_lines(content.read, "lines", block_bytes)
    return read_json_values(content.read, file.name, block_bytes, layout, before)
