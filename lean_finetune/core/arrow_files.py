"""Arrow files between stages: written with checksums, which are compared when a column is first read.

Each record batch has, in its own metadata, a checksum of every column and of the schema; the last batch also has the
number of all. So a changed value, a lost batch or another order is found, without a second file, and without reading
columns or batches that nobody needs. CRC-32 takes 1 s for a GB: it finds damage and edits, not forgery.
"""

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import NotRegular, refuse_irregular

# Compressed columns are unpacked in this thread: once Arrow's own threads exist, this process could not fork.
READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
SUMS, BATCHES = b"crc32", b"batches"
"""Keys of a batch's metadata: checksums by column, the schema's under a blank name; and in the last batch, of how many
it is the last."""


def damaged(path: Path, rule: str) -> UserError:
    """The error for a file that the pipeline cannot have written."""
    return UserError(f"{path}: {rule}; delete it and run `dvc repro`")


def _column_crc(column: pa.Array, number: int) -> int:
    """Checksum of a column of batch `number`, of which a reader sees the same buffers as its writer."""
    crc = zlib.crc32(str(number).encode())
    for buffer in column.buffers():
        crc = zlib.crc32(b"-" if buffer is None else buffer, crc)
    return crc


class ArrowWriter:
    """Writes an Arrow file with checksums; the caller makes the file atomic.

    It holds one batch back, because the last one is marked.
    """

    def __init__(self, path: Path, schema: pa.Schema, options: pa.ipc.IpcWriteOptions | None = None):
        """Open the file. Raises OSError if the disk refuses, as all methods."""
        self._schema, self._number = schema, 0
        self._held: tuple[pa.RecordBatch, dict[bytes, bytes]] | None = None
        with ExitStack() as opened:
            file = opened.enter_context(pa.OSFile(str(path), "wb"))
            self._writer = opened.enter_context(pa.ipc.new_file(file, schema, options=options))
            self._opened = opened.pop_all()

    def write(self, batch: pa.RecordBatch) -> None:
        """Add a batch of the file's schema."""
        # Its buffers after a round trip, without those of other rows and without a bitmap of no nulls.
        seen = pa.ipc.read_record_batch(batch.serialize(), self._schema)
        sums = {name: _column_crc(seen.column(name), self._number) for name in self._schema.names}
        sums[""] = zlib.crc32(self._schema.serialize())
        self._flush({})
        self._held = batch, {SUMS: json.dumps(sums).encode()}
        self._number += 1

    def _flush(self, more: dict[bytes, bytes]) -> None:
        if self._held is not None:
            batch, metadata = self._held
            self._writer.write_batch(batch, custom_metadata={**metadata, **more})
        self._held = None

    def __enter__(self) -> "ArrowWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        """Write the end of the file, unless there was an exception."""
        with self._opened:
            if kind is None:
                self._flush({BATCHES: str(self._number).encode()})


class StoredBatch:
    """A record batch of a file, whose columns are compared with their checksums when they are first read."""

    def __init__(self, path: Path, number: int, batch: pa.RecordBatch, metadata: Any):
        """Of batch `number` in a file, with its metadata."""
        self._path, self._number, self._batch, self._metadata = path, number, batch, metadata
        self._checked: set[str] = set()

    @property
    def schema(self) -> pa.Schema:
        """The file's."""
        return self._batch.schema

    @property
    def num_rows(self) -> int:
        """Number of its rows."""
        return int(self._batch.num_rows)

    @cached_property
    def _sums(self) -> dict[str, int]:
        try:
            sums = json.loads((self._metadata or {})[SUMS])
            return dict(sums)
        except (KeyError, ValueError, TypeError):
            raise damaged(self._path, f"batch {self._number} has no checksums, so another program wrote it") from None

    def check_schema(self) -> None:
        """Raise UserError if the schema or its metadata changed."""
        self._compare("", zlib.crc32(self.schema.serialize()), "its schema")

    def column(self, name: str) -> pa.Array:
        """A column. Raises UserError if its values changed since they were written. Threads may call it."""
        column = self._batch.column(name)
        if name not in self._checked:
            self._compare(name, _column_crc(column, self._number), f"column {name} of batch {self._number}")
            self._checked.add(name)
        return column

    def _compare(self, name: str, crc: int, what: str) -> None:
        if self._sums.get(name) != crc:
            raise damaged(self._path, f"{what} differs from its checksum: the file was changed")

    @property
    def unchecked(self) -> pa.RecordBatch:
        """The batch itself."""
        return self._batch

    def is_last_of(self, batches: int) -> bool:
        """Whether it is marked as the last of so many."""
        return bool((self._metadata or {}).get(BATCHES) == str(batches).encode())


def open_batches(
    path: Path, columns: Mapping[str, Collection[pa.DataType]], *, check_values: bool = True
) -> list[StoredBatch]:
    """Memory-map a file of `ArrowWriter` and check its schema, and the columns that the caller reads.

    Arrays of the batches are views of the file's pages, unless the file is compressed. `columns` lists the allowed
    types of each column that the caller reads. Without `check_values`, columns are compared with their checksums when
    they are first read, so that this does not read them.

    Raises:
        UserError: the file is missing, no regular one, truncated, changed, or of another schema.
    """
    try:
        refuse_irregular(path)
        reader = pa.ipc.open_file(pa.memory_map(str(path)), options=READ_OPTIONS)
        numbers = range(reader.num_record_batches)
        batches = [StoredBatch(path, number, *reader.get_batch_with_custom_metadata(number)) for number in numbers]
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run `dvc repro`") from None
    except NotRegular:
        raise damaged(path, "is no regular file") from None
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, f"not a complete Arrow file ({error})") from error
    for name, types in columns.items():
        index = reader.schema.get_field_index(name)
        found = reader.schema.field(index).type if index >= 0 else None
        if found not in types:
            raise damaged(path, f"column {name} must be {' or '.join(map(str, types))}, got {found}")
    for batch in batches[:1]:
        batch.check_schema()
    if batches and not batches[-1].is_last_of(len(batches)):
        raise damaged(path, f"the end is missing after batch {len(batches) - 1}")
    for batch in batches if check_values else ():
        for name in columns:
            _check_column(path, name, batch)
    return batches


def read_column(batches: Sequence[StoredBatch | pa.RecordBatch], name: str, dtype: type[np.generic]) -> np.ndarray:
    """A column of all batches as an array, a view if there is one batch."""
    parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in batches]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _check_column(path: Path, name: str, batch: StoredBatch) -> None:
    """Check that offsets are inside the values, that only strings are null, and the checksum."""
    column = batch.unchecked.column(name)
    try:
        column.validate(full=True)  # First: it names what is wrong in a file that another program wrote.
    except pa.ArrowException as error:
        raise damaged(path, f"column {name} is broken ({error})") from error
    nested_nulls = column.values.null_count if pa.types.is_list(column.type) else 0
    if column.null_count + nested_nulls and not pa.types.is_string(column.type):
        raise damaged(path, f"column {name} must not hold nulls")
    batch.column(name)
