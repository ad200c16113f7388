"""Opening the Arrow files of earlier stages: memory-mapped, checked once, faults told in one line."""

from collections.abc import Collection, Mapping
from pathlib import Path

import pyarrow as pa

from lean_finetune.core.errors import UserError

# Columns that are compressed are unpacked here: threads of Arrow's, once started, would forbid to fork this process.
READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def open_batches(path: Path, columns: Mapping[str, Collection[pa.DataType]]) -> list[pa.RecordBatch]:
    """Memory-map an Arrow IPC file and check its schema, offsets and absence of nulls.

    Arrays read from the batches are views of the file's pages, unless the file is compressed. The check reads list
    offsets and strings, not the tokens.

    Args:
        path: the file.
        columns: name → allowed types of each column the caller reads; other columns are left alone. A column of
            strings may hold nulls, the others may not.

    Raises:
        UserError: the file is missing, cut short, damaged, or of another schema.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)), options=READ_OPTIONS)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run `dvc repro`") from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, f"not a whole Arrow file ({error})") from error
    for name, types in columns.items():
        index = reader.schema.get_field_index(name)
        found = reader.schema.field(index).type if index >= 0 else None
        if found not in types:
            raise _damaged(path, f"column {name} must be {' or '.join(map(str, types))}, got {found}")
        for batch in batches:
            _check_column(path, name, batch.column(index))
    return batches


def _check_column(path: Path, name: str, column: pa.Array) -> None:
    """Offsets must lie inside the values; only strings may be null."""
    try:
        column.validate(full=True)
    except pa.ArrowException as error:
        raise _damaged(path, f"column {name} is broken ({error})") from error
    nested_nulls = column.values.null_count if pa.types.is_list(column.type) else 0
    if column.null_count + nested_nulls and not pa.types.is_string(column.type):
        raise _damaged(path, f"column {name} must not hold nulls")


def _damaged(path: Path, rule: str) -> UserError:
    """The one line for a file that this version of the pipeline cannot have written whole."""
    return UserError(f"{path}: {rule}; delete it and run `dvc repro`")
