"""All rows of the pinned data as blocks, read front to back in bounded memory."""

import codecs
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from lean_finetune.core.atomic_files import READ_BLOCK_BYTES
from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import NotRegular, open_regular
from lean_finetune.data.read.arrow_batches import read_record_batches
from lean_finetune.data.read.csv_rows import read_table
from lean_finetune.data.read.json_values import LAYOUT_BYTES, json_layout, read_json_values, read_lines
from lean_finetune.data.read.row_block import BLOCK_BYTES, RowBlock
from lean_finetune.pinning.hub import hub_errors, open_stream
from lean_finetune.pinning.locate import DataFile, data_files, file_version, is_heldout_source, new_digest

Progress = Callable[[int], Any]

_CHANGED = "{}: changed since it was pinned; run `dvc repro` again"


def open_local(path: Path, name: str) -> io.FileIO:
    """Open a regular file, which messages call `name`; a pipe would wait for a writer. Raises UserError."""
    try:
        return open_regular(path)
    except NotRegular:
        raise UserError(f"{name}: is no regular file any more; put it back or run `dvc repro` again") from None
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read any more ({error.strerror}); put it back or run `dvc repro` again"
        ) from error


class PinnedBytes(io.RawIOBase):
    """The bytes of a pinned file, read forward and hashed."""

    def __init__(self, file: DataFile, progress: Progress):
        """Open the file. Raises UserError if it is gone, or on a hub that cannot be reached."""
        self._file, self._progress = file, progress
        self._digest, self._read_bytes = new_digest(file.digest, file.size_bytes), 0
        self._stream = self._open()
        self._hashed: tuple[int, ...] = ()

    def _open(self) -> BinaryIO:
        if self._file.path is None:
            return open_stream("data.source", self._file.repo_id, self._file.revision, self._file.path_in_repo)
        stream = open_local(self._file.path, self._file.name)
        if os.fstat(stream.fileno()).st_size != self._file.size_bytes:  # Before rows of it are judged.
            stream.close()
            raise UserError(_CHANGED.format(self._file.name))
        return stream

    def readable(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Close the file below."""
        if not self.closed:
            self._stream.close()
        super().close()

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, or fewer as the system returns them.

        Raises UserError if the disk or the network fails.
        """
        if self._file.path is None:
            with hub_errors("data.source", self._file.repo_id):
                block = self._stream.read(size)
        else:
            try:
                block = self._stream.read(size)
            except OSError as error:
                raise UserError(
                    f"{self._file.name}: cannot be read ({error.strerror}); check its disk, then rerun"
                ) from error
        self._digest.update(block)
        self._read_bytes += len(block)
        self._progress(len(block))
        return block

    @property
    def is_at_end(self) -> bool:
        """Whether all pinned bytes were read."""
        return self._read_bytes >= self._file.size_bytes

    def finish(self) -> None:
        """Read to the end and compare the file's hash with the lock.

        Raises UserError if the file differs from what was pinned.
        """
        if self._file.path is not None:
            self._hashed = file_version(self._file.path)
        while self.read(READ_BLOCK_BYTES):
            pass
        if self._digest.hexdigest() == self._file.digest:
            return
        if self._file.path is None:
            raise UserError(
                f"{self._file.name}: the hub sent other bytes than were pinned ({self._read_bytes} of "
                f"{self._file.size_bytes} bytes came); run `dvc repro` again"
            )
        raise UserError(_CHANGED.format(self._file.name))

    def refuse_change(self, path: Path) -> None:
        """Raise UserError unless `path` is the file that was hashed, unchanged since then."""
        if file_version(path) != self._hashed:
            raise UserError(_CHANGED.format(self._file.name))


MOST_UNPACKED_BYTES, MOST_RATIO = 1 << 30, 500
"""A compressed file may have so many bytes, and this multiple of its size: a kilobyte can hold a terabyte of rows."""
MOST_BLANK_BYTES = 8 << 20
"""Of white space in a row: no limit of rows ends a file of line ends."""


class DecompressedFile:
    """The content of a pinned file, decompressed and without a byte order mark."""

    def __init__(self, source: PinnedBytes, file: DataFile):
        """Decompress `source`, the bytes of `file`."""
        self._source, self._file = source, file
        compression = file.kind.compression
        # Unlike others, Arrow's reader raises on a truncated file.
        self._stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), compression) if compression else source
        self._ahead = b""
        self._bytes = self._blank_bytes = 0
        self._most_bytes = MOST_UNPACKED_BYTES + MOST_RATIO * file.size_bytes if compression else sys.maxsize

    def peek(self, size: int) -> bytes:
        """The first bytes without the byte order mark; `read` returns them again.

        Raises UserError if the text is UTF-16.
        """
        start = self.read(size)
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(f"{self._file.name}: is UTF-16 text; save it as UTF-8")
        self._ahead = start.removeprefix(codecs.BOM_UTF8)
        return self._ahead

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end. Raises UserError if the compressed data is damaged."""
        parts, parts_bytes = [self._ahead[:size]], min(len(self._ahead), size)
        self._ahead = self._ahead[size:]
        while parts_bytes < size and (part := self._read_once(size - parts_bytes)):
            parts.append(part)
            parts_bytes += len(part)
        return parts[-1] if len(parts) == 2 and not parts[0] else b"".join(parts)

    def _read_once(self, size: int) -> bytes:
        try:
            part = cast(bytes, self._stream.read(size))
        except OSError as error:
            self._source.finish()  # Reports a changed file as changed.
            raise UserError(
                f"{self._file.name}: the compressed data is damaged or truncated ({error}); write or download it again"
            ) from error
        self._bytes += len(part)
        if self._bytes > self._most_bytes:
            raise UserError(
                f"{self._file.name}: has more than {self._most_bytes} bytes, {MOST_RATIO} times as many as compressed; "
                "decompress it, and name that file"
            )
        self._blank_bytes = self._blank_bytes + len(part) if part.isspace() else 0
        if self._blank_bytes > MOST_BLANK_BYTES:
            raise UserError(
                f"{self._file.name}: has more than {MOST_BLANK_BYTES >> 20} MiB of blank lines in a row; remove them"
            )
        return part


@contextmanager
def open_seekable(file: DataFile, progress: Progress) -> Iterator[BinaryIO]:
    """A seekable pinned file, compared with the lock before anything is read from it.

    A file on the hub, or a compressed one, is first copied to an unnamed temporary file. Raises UserError if it is
    gone, changed, damaged, or cannot be reached.
    """
    with ExitStack() as stack:
        source = stack.enter_context(PinnedBytes(file, progress))
        if file.path is not None and file.kind.compression is None:
            source.finish()
            local = stack.enter_context(io.BufferedReader(open_local(file.path, file.name)))
            source.refuse_change(file.path)
            try:
                yield local
            except UserError:  # A changed file may have been called damaged.
                source.refuse_change(file.path)
                raise
            source.refuse_change(file.path)
            return
        content = DecompressedFile(source, file)
        try:
            copy = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile()))
            shutil.copyfileobj(cast(Any, content), copy, READ_BLOCK_BYTES)
        except OSError as error:
            raise UserError(
                f"{file.name}: no room for a copy in {tempfile.gettempdir()} ({error.strerror}); free some, or "
                "set TMPDIR to a directory on another disk"
            ) from error
        source.finish()
        copy.seek(0, os.SEEK_SET)
        yield copy


# Blocks of all pinned files.

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
