"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import PairObjective, PairSums, smoothed_logistic

if TYPE_CHECKING:
    from torch import Tensor


class Dpo(PairObjective):
    """Raise the log-ratio to the reference of the chosen answer above that of the rejected one."""

    name = "dpo"
    has_reference = True
    # label_smoothing: conservative DPO (Mitchell 2023). sft_weight: RPO (Pang et al. 2024, arXiv 2404.19733).
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 0.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        difference = values["beta"] * (pairs.chosen_ratio - pairs.rejected_ratio)
        return smoothed_logistic(difference, values["label_smoothing"])
