"""Open the Arrow files of earlier stages: memory-mapped, checked, each fault in one line."""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError

# Compressed columns are unpacked in this thread: once Arrow's own threads exist, this process could not fork.
READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def open_batches(
    path: Path, columns: Mapping[str, Collection[pa.DataType]], *, check_values: bool = True
) -> list[pa.RecordBatch]:
    """Memory-map an Arrow IPC file and check its schema.

    Arrays of the batches are views of the file's pages, unless the file is compressed. `columns` lists the allowed
    types of each column that the caller reads. `check_values` checks list offsets and nulls too, without reading the
    tokens. Raises UserError if the file is missing, truncated, damaged, or of another schema.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)), options=READ_OPTIONS)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run `dvc repro`") from None
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, f"not a complete Arrow file ({error})") from error
    for name, types in columns.items():
        index = reader.schema.get_field_index(name)
        found = reader.schema.field(index).type if index >= 0 else None
        if found not in types:
            raise damaged(path, f"column {name} must be {' or '.join(map(str, types))}, got {found}")
        for batch in batches if check_values else ():
            _check_column(path, name, batch.column(index))
    return batches


def read_column(batches: list[pa.RecordBatch], name: str, dtype: type[np.generic]) -> np.ndarray:
    """A column of all batches as an array, a view if there is one batch."""
    parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in batches]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _check_column(path: Path, name: str, column: pa.Array) -> None:
    """Check that offsets are inside the values and that only strings are null."""
    try:
        column.validate(full=True)
    except pa.ArrowException as error:
        raise damaged(path, f"column {name} is broken ({error})") from error
    nested_nulls = column.values.null_count if pa.types.is_list(column.type) else 0
    if column.null_count + nested_nulls and not pa.types.is_string(column.type):
        raise damaged(path, f"column {name} must not hold nulls")


def damaged(path: Path, rule: str) -> UserError:
    """The error for a file that the pipeline cannot have written."""
    return UserError(f"{path}: {rule}; delete it and run `dvc repro`")
