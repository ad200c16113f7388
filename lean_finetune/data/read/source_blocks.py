"""The pinned source as blocks of whole rows: the one place that reads it, front to back, in bounded memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.arrow_batches import cut_columns
from lean_finetune.data.read.csv_rows import cut_cells
from lean_finetune.data.read.json_lines import cut_lines
from lean_finetune.data.read.json_values import FORM_BYTES, cut_values, json_form
from lean_finetune.data.read.pinned_files import Content, PinnedBytes, open_seekable
from lean_finetune.data.read.row_block import Block
from lean_finetune.data.read.row_range import BLOCK_BYTES, Stretch, count_rows, first_rows
from lean_finetune.pinning.descriptions import is_heldout_source
from lean_finetune.pinning.locate import DataFile, data_files

__all__ = ["BLOCK_BYTES", "file_names", "read_blocks"]

# The token files hold a row's number in four bytes; no block has so many rows that it leads from here past them.
MOST_ROWS_OF_A_FILE = 4_000_000_000
DELIMITERS = {"csv": ",", "tsv": "\t"}


def file_names(lock: Mapping[str, Any]) -> list[str]:
    """The name to show of each file, by `Block.file`.

    Raises:
        UserError: the lock is of another schema.
    """
    return [file.name for file in data_files(lock)]


def read_blocks(
    lock: Mapping[str, Any],
    *,
    max_rows: int | None,
    progress: Callable[[int], Any],
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Every row of the data lock once, in order; the blocks are a function of the source's bytes.

    Ends after `max_rows` rows (None: all), and each source after its own `rows`; files behind that are not opened. Rows
    of held-out sources are not counted in `max_rows`.
    `progress` is told the bytes of the files, as they lie on disk, read since its last call.

    Raises:
        UserError: a file is gone, is not what was pinned, cannot be cut into rows, or has too many.
    """
    files = data_files(lock)
    number = 0
    left = max_rows
    left_of_source = [source["rows"] for source in lock["sources"]]
    for place, file in enumerate(files):
        counts = not is_heldout_source(lock["sources"][file.source])
        limit = _smaller(left if counts else None, left_of_source[file.source])
        if limit == 0:
            continue
        for stretch, rows in _file_stretches(file, progress, block_bytes, limit):
            if stretch.first_row >= MOST_ROWS_OF_A_FILE:
                raise UserError(
                    f"{file.name}: must hold no more than {MOST_ROWS_OF_A_FILE:,} rows; cut it into several files"
                )
            yield Block(number=number, source=file.source, file=place, **stretch._asdict())
            number += 1
            left = left - rows if left is not None and counts else left
            if left_of_source[file.source] is not None:
                left_of_source[file.source] -= rows


def _smaller(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits, None being none."""
    limits = [limit for limit in (one, other) if limit is not None]
    return min(limits) if limits else None


def _file_stretches(
    file: DataFile, progress: Callable[[int], Any], block_bytes: int, limit: int | None
) -> Iterator[tuple[Stretch, int]]:
    """(stretch, its rows) of one file up to `limit` rows, compared with the lock as a whole.

    Of a file on the hub that is not needed to its end, the end is not fetched, and so not compared.
    """
    if file.kind.is_seekable:
        with open_seekable(file, progress) as seekable:
            yield from _limited(cut_columns(seekable, file.name, file.kind.format == "parquet", block_bytes), limit)
        return
    with PinnedBytes(file, progress) as source:
        content = Content(source, file)  # Held here: when it goes, Arrow closes what it reads from.
        yield from _limited(_cut(file, content, block_bytes), limit)
        if file.path is not None or source.is_at_end:
            source.finish()


def _cut(file: DataFile, content: Content, block_bytes: int) -> Iterator[Stretch]:
    """The rows of a file that is read front to back."""
    start = content.peek(max(block_bytes, FORM_BYTES))
    if file.kind.format in DELIMITERS:
        return cut_cells(content.read, file.name, DELIMITERS[file.kind.format], block_bytes)
    if file.kind.format == "txt":
        return cut_lines(content.read, "text", block_bytes)
    # Only the start is looked at, so white space longer than it hides a bracket; its rows then say so.
    form, before = json_form(start)
    if form == "lines":
        return cut_lines(content.read, "lines", block_bytes)
    return cut_values(content.read, file.name, block_bytes, form, before)


def _limited(stretches: Iterator[Stretch], limit: int | None) -> Iterator[tuple[Stretch, int]]:
    """(stretch, its rows) up to `limit` rows; without a limit nobody asks for the rows, and they are not counted."""
    for stretch in stretches:
        if limit is None:
            yield stretch, 0
            continue
        rows = count_rows(stretch)
        if rows > limit:
            stretch, rows = first_rows(stretch, limit), limit
        if rows:
            yield stretch, rows
        limit -= rows
        if limit == 0:
            return
