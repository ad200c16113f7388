"""Reading of pinned files: hashed while they are read, decompressed, and seekable where the format needs it."""

import codecs
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from lean_finetune.core.atomic_files import READ_BLOCK_BYTES
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.hub import hub_errors, open_stream
from lean_finetune.pinning.locate import DataFile, file_version, new_digest

Progress = Callable[[int], Any]


_CHANGED = "{}: changed since it was pinned; run `dvc repro` again"


def open_local(path: Path, name: str) -> io.FileIO:
    """Open a regular file, which messages call `name`; a pipe would wait for a writer. Raises UserError."""
    try:
        # Without waiting: this changes nothing for regular files.
        stream = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.close()
            raise UserError(f"{name}: is no regular file any more; put it back or run `dvc repro` again")
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read any more ({error.strerror}); put it back or run `dvc repro` again"
        ) from error
    return stream


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


class DecompressedFile:
    """The content of a pinned file, decompressed and without a byte order mark."""

    def __init__(self, source: PinnedBytes, file: DataFile):
        """Decompress `source`, the bytes of `file`."""
        self._source, self._file = source, file
        compression = file.kind.compression
        # Unlike others, Arrow's reader raises on a truncated file.
        self._stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), compression) if compression else source
        self._ahead = b""

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
            return cast(bytes, self._stream.read(size))
        except OSError as error:
            self._source.finish()  # Reports a changed file as changed.
            raise UserError(
                f"{self._file.name}: the compressed data is damaged or truncated ({error}); write or download it again"
            ) from error


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
