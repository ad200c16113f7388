"""Simple preference optimization (Meng et al. 2024, arXiv 2405.14734)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import PairObjective, PairSums, smoothed_logistic

if TYPE_CHECKING:
    from torch import Tensor


class Simpo(PairObjective):
    """Raise the mean log-probability of the chosen answer above that of the rejected one by a margin gamma."""

    name = "simpo"
    has_reference = False
    defaults = {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0, "sft_weight": 0.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        difference = values["beta"] * (pairs.mean_chosen - pairs.mean_rejected) - values["gamma"]
        return smoothed_logistic(difference, values["label_smoothing"])

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class; per token, as in the loss."""
        return values["beta"] * pairs.mean_chosen, values["beta"] * pairs.mean_rejected
