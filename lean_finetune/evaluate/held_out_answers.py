"""Held-out answers that an objective compares: what figures of them need. Each kind of rows has a class of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

Losses = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""By model: the summed cross-entropy of the better answers, and of `HeldoutAnswers.others`; float64."""


class HeldoutAnswers:
    """Held-out answers; this base class is of rows that are not compared."""

    results: tuple[str, ...] = ()
    """Figures in metrics/evaluate.json, in the order of columns of `dvc exp show`."""

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
