"""Kinds of rows: what a row of the data is for an objective, as index, plan, batches and reports need it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

REFERENCE = "reference"
"""What stage reference gives rows of tokens: the log-probability of their trained tokens, float32."""


@dataclass(frozen=True, kw_only=True)
class KindWords:
    """How reports call the rows of a kind whose answers are compared, and their answers."""

    title: str = ""
    rows: str = "rows"
    """The rows of the data."""
    one: str = ""
    """One that is evaluated."""
    right: str = ""
    """What the accuracy is a share of."""
    better: str = ""
    """Answers that the objective makes more likely."""
    worse: str = ""
    tokenized: tuple[tuple[str, str], ...] = ()
    """Counts of training rows that stage tokenize has of such rows, and their titles."""
    counts: tuple[str, ...] = ()
    """Figures of stage evaluate that together are the number of evaluated rows."""

    def evaluated(self, figures: Mapping[str, Any]) -> int:
        """Number of rows that were evaluated, from the figures of stage evaluate."""
        return sum(figures.get(name) or 0 for name in self.counts)


@dataclass(frozen=True, kw_only=True)
class RowKind:
    """What a row of the data is.

    It becomes `token_rows` consecutive rows of tokens. The first `unit` of them are trained, in one micro-batch.
    The others pass through the model before the step, without gradients (`StepLoss.before`).
    """

    ANSWER: ClassVar["RowKind"]

    name: str
    """In metadata of files."""
    objective: str
    """An objective that trains such rows, for messages."""
    text: str
    """How messages call such rows."""
    unit: int = 1
    token_rows: int = 1
    compared: bool = False
    """Whether the objective compares answers. Then batches have the length of each, and no parts beside tokens."""
    labels: tuple[str, ...] = ()
    """Columns of the data, of which each row has one: true if its answer is to become more likely."""
    label_column: str = ""
    """The column of token files with these; blank for kinds without labels."""
    balance: str = ""
    """What the number of rows of either label, {good} and {bad}, should be, where `is_balanced` is false."""
    number_labels: tuple[str, ...] = ()
    """Those of `labels` in which 0 and 1 are labels in any rows; elsewhere a number may be a class."""
    words: KindWords = KindWords()

    @property
    def metadata(self) -> dict[str, str]:
        """Of Arrow files of such rows; the usual kind has none."""
        return {} if self == RowKind.ANSWER else {"kind": self.name}

    @property
    def passes(self) -> int:
        """Batches that a micro-batch needs: itself, and those of its rows that are not trained."""
        return 1 + self.token_rows - self.unit

    def trained(self, numbers: "np.ndarray") -> "np.ndarray":
        """Numbers of the trained rows of tokens of rows of the data, (rows of the data, unit)."""
        import numpy as np

        return self.token_rows * numbers[:, None] + np.arange(self.unit, dtype=numbers.dtype)

    def is_balanced(self, good: int, bad: int) -> bool:
        """Whether rows with labels are as many of either label as their usual objective wants."""
        return True

    def is_better(self, rows: "np.ndarray", labels: "np.ndarray | None") -> "np.ndarray":
        """Of trained rows of tokens, whether the objective makes the answer more likely, bool: the first of each row.

        `labels`: those of all rows of tokens, bool; None for kinds without labels, and where there are no rows.
        """
        return rows % self.token_rows == 0


RowKind.ANSWER = RowKind(name="answer", objective="sft", text="rows of one answer")
"""An answer to learn."""
