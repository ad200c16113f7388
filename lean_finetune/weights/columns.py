"""The column of rows with weights: the factor of the loss of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.row_values import show
from lean_finetune.rows.columns import InspectedRows, RowColumns

if TYPE_CHECKING:
    from lean_finetune.data.format.format_base import Example, SourceFormat
    from lean_finetune.objectives.row_kind import RowKind

WEIGHT = "weight"
"""Key of data.columns, and column of the index."""
SMALLEST, LARGEST = 1e-6, 1e6
"""Of a weight, so that their sums stay exact enough in fp32."""


@dataclass(frozen=True, kw_only=True)
class WeightColumns(RowColumns):
    """The weights of rows. Rows of a source without them have weight 1.

    Of rows with equal tokens, the first one is kept with its weight: a weight does not make a row another one, so that
    held-out rows stay unseen.
    """

    rows_text = "rows with weights"
    index_fields = (pa.field(WEIGHT, pa.float32(), nullable=False),)

    @classmethod
    def keys(cls, kind: "RowKind") -> tuple[str, ...]:
        """See the base class. The loss of an objective that compares answers has no weights of rows."""
        return () if kind.compared else (WEIGHT,)

    @classmethod
    def of(cls, rows: InspectedRows) -> Self | None:
        """See the base class."""
        return cls() if any(WEIGHT in source.carried for source in rows.sources) else None

    def value(self, row: Mapping[str, Any], example: "Example", source: "SourceFormat", file: int) -> float:
        """See the base class."""
        if WEIGHT not in source.carried:
            return 1.0
        column = source.column(WEIGHT)
        weight = _number(row[column])
        if not SMALLEST <= weight <= LARGEST:
            raise RowFault(
                f"{column!r} must be a number from {SMALLEST:g} to {LARGEST:,.0f}, which multiplies the loss of the "
                f"row, got {show(row[column])}; change it, or remove the row"
            )
        return weight

    def index_arrays(self, values: Sequence[float]) -> list[pa.Array]:
        """See the base class."""
        return [pa.array(values, pa.float32())]


def _number(value: Any) -> float:
    """A number, also as text, as in a CSV file; NaN for anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else float("nan")
    except (ValueError, OverflowError):
        return float("nan")
