"""Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import PairObjective, PairSums

if TYPE_CHECKING:
    from torch import Tensor


class Orpo(PairObjective):
    """The cross-entropy of the chosen answers, and beta times the log-sigmoid of the log odds ratio (eq. 6 and 7)."""

    name = "orpo"
    has_reference = False
    defaults = {"beta": 0.1, "sft_weight": 1.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        from torch.nn.functional import logsigmoid

        odds = _log_odds(pairs.mean_chosen) - _log_odds(pairs.mean_rejected)
        return -values["beta"] * logsigmoid(odds)

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class; per token, as in the loss."""
        return values["beta"] * pairs.mean_chosen, values["beta"] * pairs.mean_rejected


def _log_odds(mean: "Tensor") -> "Tensor":
    """log(p / (1 - p)) of a mean log-probability log p; 1 - p = -expm1(log p) is exact for p near 1 too."""
    import torch

    smallest = torch.finfo(mean.dtype).tiny  # log p of exactly 0 would divide by zero.
    return mean - torch.log((-torch.expm1(mean)).clamp_min(smallest))
