"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import Objective, RowKind, RowSums, StepTotals, rightness

if TYPE_CHECKING:
    from torch import Tensor


class Kto(Objective):
    """Move the log-ratio to the reference above its mean for desirable answers, and below it for undesirable ones.

    The mean is the divergence of the model from the reference, estimated from the answers to other prompts (eq. 8). No
    gradient flows through it.
    """

    name = "kto"
    kind = RowKind.LABELLED
    has_reference = True
    defaults = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}

    def step_loss(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        import torch

        assert rows.desirable is not None, "the objective needs labels"
        advantage = self._advantage(rows, step, values)
        weights = torch.where(rows.desirable, values["desirable_weight"], values["undesirable_weight"])
        losses = weights * (1.0 - torch.sigmoid(advantage))
        return losses.sum() * (1.0 / step.count)

    def judged(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        import torch

        assert rows.reference is not None and rows.desirable is not None
        rewards = values["beta"] * (rows.logps - rows.reference)
        sums = [(rewards * chosen).sum() for chosen in (rows.desirable, ~rows.desirable)]
        return torch.stack([*sums, rightness(self._advantage(rows, step, values)).sum()])

    def _advantage(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """How far each log-ratio is on the right side of the divergence, times beta."""
        import torch

        assert rows.reference is not None and rows.desirable is not None and step.kl is not None
        above = values["beta"] * (rows.logps - rows.reference - step.kl)
        return torch.where(rows.desirable, above, -above)
