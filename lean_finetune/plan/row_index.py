"""Read the index that tokenize writes next to its shards: all that planning needs of every training row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import damaged, open_batches, read_column

if TYPE_CHECKING:
    from lean_finetune.config.data_schema import Source

COLUMNS = {
    "length": (pa.int32(),),
    "supervised": (pa.int32(),),
    "source": (pa.uint16(),),
    "dropped": (pa.bool_(),),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RowIndex:
    """The training rows by row number, and how often the rows of each source are used."""

    lengths: np.ndarray
    """Tokens, int32."""
    supervised: np.ndarray
    """Tokens that are predicted and count in the loss, int32."""
    sources: np.ndarray
    """Index of the row's source in data.source, uint16."""
    dropped: np.ndarray
    """Whether the row is a duplicate that must never be trained, bool."""
    weights: Sequence[float]
    """Mean number of uses of a row per epoch, by source."""

    @property
    def takes_every_row(self) -> bool:
        """Whether each epoch uses each row exactly once."""
        return all(weight == 1.0 for weight in self.weights) and not self.dropped.any()


def source_weights(source: "str | Sequence[Source]") -> tuple[float, ...]:
    """The weight of each source, from the value of data.source."""
    return (1.0,) if isinstance(source, str) else tuple(one.weight for one in source)


def read_index(path: Path, weights: Sequence[float]) -> RowIndex:
    """Read train-index.arrow.

    Raises UserError if the file is missing or damaged, is empty, or has a row without supervised tokens or of an
    unknown source.
    """
    batches = open_batches(path, COLUMNS)
    columns = [read_column(batches, name, types[0].to_pandas_dtype()) for name, types in COLUMNS.items()]
    lengths, supervised, sources, dropped = columns
    index = RowIndex(lengths=lengths, supervised=supervised, sources=sources, dropped=dropped, weights=tuple(weights))
    if index.dropped.all():
        raise UserError(f"{path}: has no training row; delete it, check data.source and run `dvc repro`")
    wrong = np.flatnonzero((index.supervised < 1) | (index.supervised >= index.lengths))
    if len(wrong):
        row = wrong[0]
        found = f"got {index.supervised[row]} of {index.lengths[row]}"
        raise damaged(path, f"row {row}: needs 1 or more supervised tokens and fewer than its tokens, {found}")
    if index.sources.max() >= len(index.weights):
        row = int(index.sources.argmax())
        raise UserError(
            f"{path}: row {row}: its source is number {index.sources[row]} but data.source has {len(index.weights)}; "
            "run `dvc repro`"
        )
    return index
