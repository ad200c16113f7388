"""Held-out answers that an objective compares: what figures of them need. Each kind of rows has a class of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.objectives.row_kind import REFERENCE

if TYPE_CHECKING:
    from lean_finetune.objectives.objective import Objective

Losses = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""By model: the summed cross-entropy of the better answers, and of `HeldoutAnswers.others`; float64."""


class AnswerTokens(Protocol):
    """Rows of tokens in files, with the log-probabilities of the reference."""

    supervised: np.ndarray

    def column(self, name: str) -> np.ndarray | None:
        """What every row has in a column; None without it."""

    def ids(self, row: int) -> np.ndarray:
        """Token ids of a row."""

    def spans(self, row: int) -> np.ndarray:
        """Trained tokens of a row as half-open token positions, (spans, 2)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldoutAnswers:
    """Held-out answers; this base class is of rows that are not compared."""

    results: ClassVar[tuple[str, ...]] = ()
    """Figures in metrics/evaluate.json, in the order of columns of `dvc exp show`."""

    rows: AnswerTokens
    better: np.ndarray
    """Numbers of the chosen rows of tokens whose answers the objective makes more likely."""
    worse: np.ndarray
    """Those of the other chosen rows; none where each better answer has a worse one behind it."""
    objective: "Objective"
    values: Mapping[str, float]
    """Of the objective's parameters."""

    @property
    def reference(self) -> np.ndarray:
        """Log-probabilities of all rows of tokens under the reference; 0 for objectives without one."""
        logps = self.rows.column(REFERENCE)
        assert logps is not None, "rows without what `complete_rows` gives them"
        return logps

    @property
    def others(self) -> list[int]:
        """Rows whose losses are needed besides those of the better answers."""
        return []

    @property
    def scored(self) -> bool:
        """Whether the models are reward models. What is called a loss is then less the score of an answer."""
        return False

    def metrics(self, losses: Losses) -> dict[str, Any]:
        """Figures of all models by name; None where there is no answer."""
        return {}

    def lines(self, losses: Losses, tokenizer: Tokenizer) -> Sequence[Mapping[str, Any]] | None:
        """Records of pairs.jsonl; None for rows without such a file."""
        return None
