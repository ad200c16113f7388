"""Contrastive preference optimization (Xu et al. 2024, arXiv 2401.08417)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import PairObjective, PairSums, smoothed_logistic

if TYPE_CHECKING:
    from torch import Tensor


class Cpo(PairObjective):
    """DPO with a uniform reference, and the cross-entropy of the chosen answers."""

    name = "cpo"
    has_reference = False
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 1.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        return smoothed_logistic(values["beta"] * (pairs.chosen - pairs.rejected), values["label_smoothing"])
