"""What a batch has by the kind of its rows, beside what their files attach to them."""

import numpy as np
import torch

from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.rows.answers import AnswerRows, Answers
from lean_finetune.rows.batch_part import BatchPart


def parts_of_kind(kind: RowKind, tokens: AnswerRows, rows: np.ndarray) -> tuple[BatchPart, ...]:
    """What objectives need of some rows besides tokens."""
    return (Answers.of(kind, tokens, rows),) if kind.compared else ()


def empty_parts(kind: RowKind, rows: int, trained: int, device: torch.device | str) -> tuple[BatchPart, ...]:
    """The same without values, of so many rows with so many trained tokens together."""
    return (Answers.empty(kind, rows // kind.unit * kind.unit, trained, device),) if kind.compared else ()
