"""The answers of a batch: their trained tokens, log-probabilities under the reference, and labels.

Shapes: R rows of a micro-batch (of pairs: chosen, rejected, chosen, …).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from lean_finetune.objectives.row_kind import REFERENCE, RowKind
from lean_finetune.rows.batch_part import BatchPart


class AnswerRows(Protocol):
    """Rows of tokens in files."""

    supervised: np.ndarray

    def column(self, name: str) -> np.ndarray | None:
        """What every row has in a column; None without it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers(BatchPart):
    """The trained tokens of each of R rows; none for an idle process."""

    counts: tuple[int, ...]
    """Trained tokens of each row."""
    tokens_R: torch.Tensor
    """The same as fp32."""
    reference_R: torch.Tensor | None
    """fp32: log-probability of a row's trained tokens under the reference; None for objectives without one."""
    better_R: torch.Tensor | None = None
    """bool: the labels of rows; None for kinds of rows without labels."""

    @staticmethod
    def of(kind: RowKind, tokens: AnswerRows, rows: np.ndarray) -> "Answers":
        """Those of some rows."""
        counts, reference, better = tokens.supervised[rows], tokens.column(REFERENCE), tokens.column(kind.label_column)
        return Answers(
            counts=tuple(counts.tolist()),
            tokens_R=torch.from_numpy(counts.astype(np.float32)),
            reference_R=None if reference is None else torch.from_numpy(reference[rows]),
            better_R=None if better is None else torch.from_numpy(better[rows]),
        )

    @staticmethod
    def empty(kind: RowKind, rows: int, trained: int, device: torch.device | str) -> "Answers":
        """Uninitialised, of equally many trained tokens, with a reference, and with labels if the kind has them."""
        most, more = divmod(trained, rows)
        tokens_R, reference_R = (torch.empty(rows, device=device) for _ in range(2))
        return Answers(
            counts=tuple(most + (number < more) for number in range(rows)),
            tokens_R=tokens_R,
            reference_R=reference_R,
            better_R=torch.empty(rows, dtype=torch.bool, device=device) if kind.labels else None,
        )

    def to(self, device: torch.device | str) -> "Answers":
        """See the base class."""
        pinned = self.tokens_R.is_pinned()

        def moved(values_R: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_R is None else values_R.to(device, non_blocking=pinned)

        return replace(
            self,
            tokens_R=self.tokens_R.to(device, non_blocking=pinned),
            reference_R=moved(self.reference_R),
            better_R=moved(self.better_R),
        )

    def pinned(self) -> "Answers":
        """See the base class."""

        def pinned(values_R: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_R is None else values_R.pin_memory()

        return replace(
            self,
            tokens_R=self.tokens_R.pin_memory(),
            reference_R=pinned(self.reference_R),
            better_R=pinned(self.better_R),
        )


NO_ANSWERS = Answers(counts=(), tokens_R=torch.empty(0), reference_R=None)
"""Of padding for a process without work."""


def answers_of(parts: Iterable[BatchPart]) -> Answers:
    """The answers among what the rows of a batch carry."""
    return next((part for part in parts if isinstance(part, Answers)), NO_ANSWERS)
