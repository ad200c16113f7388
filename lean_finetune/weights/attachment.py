"""The weights of training rows, as a plan and a training step see them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from lean_finetune.core.arrow_files import read_column
from lean_finetune.rows.attachment import AttachedShape, Attachment, Measure
from lean_finetune.weights.columns import WEIGHT

if TYPE_CHECKING:
    import torch

    from lean_finetune.rows.attachment import IndexBatch, StoredRows
    from lean_finetune.weights.weight_part import WeightPart

TRAIN_INDEX = "train-index.arrow"
"""Held-out rows have no weights: their loss is the mean over all trained tokens."""


@dataclass(frozen=True, kw_only=True)
class WeightShape(AttachedShape):
    """The weights of a micro-batch: one for each trained token."""

    @property
    def of_rows(self) -> bool:
        """See the base class."""
        return True

    @property
    def attachment(self) -> "type[WeightAttachment]":
        """See the base class."""
        return WeightAttachment

    def largest(self, rows: int) -> "WeightShape":
        """See the base class."""
        return self

    def empty(self, trained: int, device: "torch.device | str") -> "WeightPart":
        """See the base class."""
        import torch

        from lean_finetune.weights.weight_part import WeightPart

        return WeightPart(torch.empty(trained, device=device))


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightAttachment(Attachment):
    """The weight of every row of the training split."""

    columns = {WEIGHT: (pa.float32(),)}
    name = "weights"
    rows_text = "rows with weights"

    weights: np.ndarray
    """fp32, shape (rows,)."""

    @classmethod
    def read(cls, index: Path) -> Self | None:
        """See the base class; None for held-out rows."""
        return super().read(index) if index.name == TRAIN_INDEX else None

    @classmethod
    def from_columns(cls, batches: "Sequence[IndexBatch]", tokens: Path | None = None) -> Self:
        """See the base class."""
        return cls(weights=read_column(batches, WEIGHT, np.float32))

    @property
    def measures(self) -> Sequence[Measure]:
        """See the base class: none."""
        return ()

    @property
    def is_empty(self) -> bool:
        """See the base class."""
        return False

    def shape_of(self, rows: np.ndarray, *, beside: bool = False) -> WeightShape | None:
        """See the base class."""
        return WeightShape() if len(rows) else None

    def part(self, tokens: "StoredRows", rows: np.ndarray, ids_BT: "torch.Tensor") -> "WeightPart":
        """See the base class."""
        import torch

        from lean_finetune.weights.weight_part import WeightPart

        return WeightPart(torch.from_numpy(np.repeat(self.weights[rows], tokens.supervised[rows])))

    def with_row(self, other: Self, row: int) -> Self:
        """See the base class."""
        return replace(self, weights=np.append(self.weights, other.weights[row]))

    def loss_scale(self, rows: np.ndarray, supervised: np.ndarray) -> float:
        """See the base class: it makes the mean weight over the trained tokens of a step 1."""
        tokens = supervised[rows].astype(np.float64)
        return float(tokens.sum() / (tokens @ self.weights[rows].astype(np.float64)))
