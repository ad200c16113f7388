"""Columns of labelled rows: whether the answer is desirable."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import Labelled
from lean_finetune.data.read.arrow_batches import from_numpy
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.rows.columns import InspectedRows, RowColumns

if TYPE_CHECKING:
    from lean_finetune.data.format.format_base import Example, SourceFormat

COLUMN = RowKind.LABELLED.label_column


@dataclass(frozen=True, kw_only=True)
class LabelColumns(RowColumns):
    """The labels of answers. A mismatch has that of its row."""

    rows_text = "rows with labels"
    fields = (pa.field(COLUMN, pa.bool_(), nullable=False),)

    kind: str
    """Name of the kind of rows."""

    @classmethod
    def of(cls, rows: InspectedRows) -> Self | None:
        """See the base class."""
        return cls(kind=rows.kind.name) if rows.kind.labels else None

    def value(self, row: Mapping[str, Any], example: "Example", source: "SourceFormat", file: int) -> bool:
        """See the base class."""
        assert isinstance(example, Labelled)
        return example.desirable

    def arrays(self, values: Sequence[bool]) -> list[pa.Array]:
        """See the base class."""
        return [from_numpy(np.array(values, bool), pa.bool_())]

    def digest(self, value: bool) -> bytes:
        """See the base class."""
        return bytes([value])

    def published(self, store: Path, out: Path, rows: Path, dropped: np.ndarray | None) -> int:
        """See the base class: desirable answers that are no duplicates; mismatches do not count."""
        found = start = 0
        for path in sorted(rows.glob("*.arrow")):
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    labels = reader.get_batch(number).column(COLUMN).to_numpy(zero_copy_only=False)
                    used = True if dropped is None else ~dropped[start : start + len(labels)]
                    start += len(labels)
                    found += int((labels & used)[::2].sum())
        return found

    def check(self, found: Mapping[str, int], rows: Mapping[str, int], why: str) -> None:
        """See the base class: training rows that all have one label."""
        if found["train"] in (0, rows["train"]):
            label = "undesirable" if found["train"] == 0 else "desirable"
            raise UserError(
                f"data.source: training rows must have both labels; all {rows['train']} are {label}{why}; add rows of "
                "the other label, or set train.objective=sft"
            )

    def figures(self, found: Mapping[str, int]) -> Mapping[str, int]:
        """See the base class."""
        return {"desirable_rows": found["train"]}

    def advice(self, found: Mapping[str, int], rows: Mapping[str, int]) -> Iterable[str]:
        """See the base class: as many desirable rows as the usual objective wants."""
        kind, good = RowKind.ALL[self.kind], found["train"]
        bad = rows["train"] - good
        if not kind.is_balanced(good, bad):
            balance = kind.balance.format(good=good, bad=bad)
            yield f"{good} training rows are desirable and {bad} are not; {balance}"
