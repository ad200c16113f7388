"""A reward model (Ouyang et al. 2022, arXiv 2203.02155): a score of an answer, learnt from pairs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import PairObjective, PairSums

if TYPE_CHECKING:
    from torch import Tensor


class Reward(PairObjective):
    """Raise the score of the chosen answer above that of the rejected one (Bradley and Terry 1952)."""

    name = "reward"
    has_reference = False
    scored = True
    defaults = {}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(pairs.chosen - pairs.rejected)

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class: the scores."""
        return pairs.chosen, pairs.rejected
