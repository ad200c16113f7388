"""The objective of single answers with a label, and what such rows are."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import BETA, AnswerObjective, LossParameter, RowSums, StepTotals, rightness
from lean_finetune.objectives.row_kind import KindWords, RowKind

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class RatedRows(RowKind):
    """Rows of one answer each, with a label."""

    def is_balanced(self, good: int, bad: int) -> bool:
        """See the base class."""
        return bad <= good <= 4 / 3 * bad

    def is_better(self, rows: "np.ndarray", labels: "np.ndarray | None") -> "np.ndarray":
        """See the base class: by the labels."""
        if not len(rows):
            return super().is_better(rows, labels)
        assert labels is not None, "the tokens have no labels"
        return labels[rows]


LABELLED = RatedRows(
    name="labelled",
    objective="kto",
    text="rows of one answer with a label",
    token_rows=2,
    compared=True,
    labels=("label", "kto_tag"),  # TRL and ms-swift, LLaMA-Factory.
    label_column="desirable",
    number_labels=("kto_tag",),
    balance="KTO's authors advise {good} x desirable_weight = 1 to 1.33 x {bad} x undesirable_weight "
    "(train.preference; arXiv 2402.01306, eq. 8)",
    words=KindWords(
        title="Labelled answers",
        one="answer",
        right="answers judged right",
        better="desirable",
        worse="undesirable",
        tokenized=(("desirable_rows", "desirable rows"),),
        counts=("evaluated_desirable", "evaluated_undesirable"),
    ),
)
"""An answer with a label, desirable or not. The second row of tokens has the same prompt with another row's answer: a
mismatch, by which the divergence from the reference is estimated."""


class Kto(AnswerObjective):
    """Move the log-ratio to the reference above its mean for desirable answers, and below it for undesirable ones.

    Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306).

    The mean is the divergence of the model from the reference, estimated from the answers to other prompts (eq. 8). No
    gradient flows through it.
    """

    name = "kto"
    kind = LABELLED
    has_reference = True
    figure_name = "kl"
    defaults = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    parameters = {
        "beta": BETA,
        "desirable_weight": LossParameter(text="kto: weight of the losses of desirable answers.", above=0.0),
        "undesirable_weight": LossParameter(text="kto: weight of the losses of undesirable answers.", above=0.0),
    }

    def of_untrained(self, rows: RowSums) -> "Tensor":
        """See the base class: the log-ratios of mismatched answers."""
        return rows.logps - rows.reference

    def of_step(self, mean: "Tensor") -> "Tensor":
        """See the base class: the divergence from the reference, at least 0."""
        return mean.clamp(min=0.0)

    def step_loss(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        import torch

        assert rows.better is not None, "the objective needs labels"
        advantage = self._advantage(rows, step, values)
        weights = torch.where(rows.better, values["desirable_weight"], values["undesirable_weight"])
        losses = weights * (1.0 - torch.sigmoid(advantage))
        return losses.sum() * (1.0 / step.count)

    def judged(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        import torch

        assert rows.better is not None, "the objective needs labels"
        rewards = values["beta"] * (rows.logps - rows.reference)
        sums = [(rewards * chosen).sum() for chosen in (rows.better, ~rows.better)]
        return torch.stack([*sums, rightness(self._advantage(rows, step, values)).sum()])

    def _advantage(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """How far each log-ratio is on the right side of the divergence, times beta."""
        import torch

        assert rows.better is not None and step.untrained is not None
        above = values["beta"] * (rows.logps - rows.reference - step.untrained)
        return torch.where(rows.better, above, -above)
