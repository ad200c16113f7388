"""Identity preference optimization (Azar et al. 2023, arXiv 2310.12036)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import PairObjective, PairSums

if TYPE_CHECKING:
    from torch import Tensor


class Ipo(PairObjective):
    """Bring the difference of the log-ratios to 1 / (2 beta), so that pairs without noise do not drive it to infinity.

    Log-ratios are per token, as the paper's authors trained it (docs of TRL's DPOTrainer).
    """

    name = "ipo"
    has_reference = True
    defaults = {"beta": 0.1}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        chosen = pairs.chosen_ratio / pairs.chosen_tokens
        rejected = pairs.rejected_ratio / pairs.rejected_tokens
        return (chosen - rejected - 1.0 / (2.0 * values["beta"])).square()
