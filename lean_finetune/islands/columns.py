"""What rows may carry from their source to the files of tokens: one class each, in a package of its own.

Importing it makes the formats of rows known. Beside `attachments`, so that the code that makes tokens is not that of
models and batches.
"""

from pathlib import Path

from lean_finetune.data.format import row_formats  # noqa: F401 - registers its formats
from lean_finetune.images.columns import ImageColumns
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.preferences import pair_formats  # noqa: F401 - registers its formats
from lean_finetune.preferences.labels import LabelColumns
from lean_finetune.rows.columns import InspectedRows, RowColumns
from lean_finetune.weights.columns import WeightColumns

COLUMNS: tuple[type[RowColumns], ...] = (LabelColumns, ImageColumns, WeightColumns)


def carried_keys(kind: RowKind) -> tuple[str, ...]:
    """Keys of what rows of a kind may carry, for which data.columns may name a column."""
    return tuple(key for one in COLUMNS for key in one.keys(kind))


def model_takes_others(directory: Path) -> bool:
    """Whether the model in a directory takes something in the place of text. Raises UserError if a file is damaged."""
    return any(one.model_takes(directory) for one in COLUMNS)


def columns_of(rows: InspectedRows) -> tuple[RowColumns, ...]:
    """What a run's rows carry."""
    found = (kind.of(rows) for kind in COLUMNS)
    return tuple(one for one in found if one is not None)
