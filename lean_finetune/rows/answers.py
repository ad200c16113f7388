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
    reference_R: torch.Tensor
    """fp32: log-probability of a row's trained tokens under the reference; 0 for objectives without one."""
    better_R: torch.Tensor | None = None
    """bool: the labels of rows; None for kinds of rows without labels."""

    @staticmethod
    def of(kind: RowKind, tokens: AnswerRows, rows: np.ndarray) -> "Answers":
        """Those of some rows."""
        counts, better, logps = tokens.supervised[rows], tokens.column(kind.label_column), tokens.column(REFERENCE)
        assert logps is not None, "rows without what `complete_rows` gives them"
        return Answers(
            counts=tuple(counts.tolist()),
            tokens_R=torch.from_numpy(counts.astype(np.float32)),
            reference_R=torch.from_numpy(logps[rows]),
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
        pinned, better_R = self.tokens_R.is_pinned(), self.better_R
        return replace(
            self,
            tokens_R=self.tokens_R.to(device, non_blocking=pinned),
            reference_R=self.reference_R.to(device, non_blocking=pinned),
            better_R=None if better_R is None else better_R.to(device, non_blocking=pinned),
        )

    def pinned(self) -> "Answers":
        """See the base class."""
        return replace(
            self,
            tokens_R=self.tokens_R.pin_memory(),
            reference_R=self.reference_R.pin_memory(),
            better_R=None if self.better_R is None else self.better_R.pin_memory(),
        )


NO_ANSWERS = Answers(counts=(), tokens_R=torch.empty(0), reference_R=torch.empty(0))
"""Of padding for a process without work."""


def answers_of(parts: Iterable[BatchPart]) -> Answers:
    """The answers among what the rows of a batch carry."""
    return next((part for part in parts if isinstance(part, Answers)), NO_ANSWERS)
