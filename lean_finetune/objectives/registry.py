"""The objectives that `train.objective` can name: one class each, listed in `_ALL`.

Torch is imported inside functions: reading params.yaml imports this module.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import (
    BETA,
    AnswerObjective,
    LossParameter,
    Objective,
    PairObjective,
    PairSums,
    RowSums,
    StepTotals,
    rightness,
    smoothed_logistic,
)
from lean_finetune.objectives.row_kind import RowKind

if TYPE_CHECKING:
    from torch import Tensor


class Sft(Objective):
    """Supervised fine-tuning: the cross-entropy of trained tokens."""

    name = "sft"


class Dpo(PairObjective):
    """Raise the log-ratio to the reference of the chosen answer above that of the rejected one.

    Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).
    """

    name = "dpo"
    has_reference = True
    # label_smoothing: conservative DPO (Mitchell 2023). sft_weight: RPO (Pang et al. 2024, arXiv 2404.19733).
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 0.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        difference = values["beta"] * (pairs.chosen_ratio - pairs.rejected_ratio)
        return smoothed_logistic(difference, values["label_smoothing"])


class Ipo(PairObjective):
    """Bring the difference of the log-ratios to 1 / (2 beta), so that pairs without noise do not drive it to infinity.

    Identity preference optimization (Azar et al. 2023, arXiv 2310.12036).

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


class Simpo(PairObjective):
    """Raise the mean log-probability of the chosen answer above that of the rejected one by a margin gamma.

    Simple preference optimization (Meng et al. 2024, arXiv 2405.14734).
    """

    name = "simpo"
    defaults = {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0, "sft_weight": 0.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        difference = values["beta"] * (pairs.mean_chosen - pairs.mean_rejected) - values["gamma"]
        return smoothed_logistic(difference, values["label_smoothing"])

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class; per token, as in the loss."""
        return values["beta"] * pairs.mean_chosen, values["beta"] * pairs.mean_rejected


class Cpo(PairObjective):
    """DPO with a uniform reference, and the cross-entropy of the chosen answers.

    Contrastive preference optimization (Xu et al. 2024, arXiv 2401.08417).
    """

    name = "cpo"
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "sft_weight": 1.0}

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        return smoothed_logistic(values["beta"] * (pairs.chosen - pairs.rejected), values["label_smoothing"])


class Orpo(PairObjective):
    """The cross-entropy of the chosen answers, and beta times the log-sigmoid of the log odds ratio (eq. 6 and 7).

    Odds ratio preference optimization (Hong et al. 2024, arXiv 2403.07691).
    """

    name = "orpo"
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


class Kto(AnswerObjective):
    """Move the log-ratio to the reference above its mean for desirable answers, and below it for undesirable ones.

    Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306).

    The mean is the divergence of the model from the reference, estimated from the answers to other prompts (eq. 8). No
    gradient flows through it.
    """

    name = "kto"
    kind = RowKind.LABELLED
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
        assert rows.reference is not None, "the objective needs a reference"
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

        assert rows.reference is not None and rows.better is not None
        rewards = values["beta"] * (rows.logps - rows.reference)
        sums = [(rewards * chosen).sum() for chosen in (rows.better, ~rows.better)]
        return torch.stack([*sums, rightness(self._advantage(rows, step, values)).sum()])

    def _advantage(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """How far each log-ratio is on the right side of the divergence, times beta."""
        import torch

        assert rows.reference is not None and rows.better is not None and step.untrained is not None
        above = values["beta"] * (rows.logps - rows.reference - step.untrained)
        return torch.where(rows.better, above, -above)


class Reward(PairObjective):
    """Raise the score of the chosen answer above that of the rejected one (Bradley and Terry 1952).

    A reward model (Ouyang et al. 2022, arXiv 2203.02155): a score of an answer, learnt from pairs.
    """

    name = "reward"
    judges = "scores"

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(pairs.chosen - pairs.rejected)

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class: the scores."""
        return pairs.chosen, pairs.rejected


_ALL: tuple[type[Objective], ...] = (Sft, Dpo, Ipo, Simpo, Cpo, Orpo, Kto, Reward)
OBJECTIVES: dict[str, Objective] = {kind.name: kind() for kind in _ALL}
"""By name."""
LOSS_PARAMETERS = {name: one for objective in OBJECTIVES.values() for name, one in objective.parameters.items()}
"""The keys of train.preference."""
OWN_FIGURES = tuple(
    one.figure_name for one in OBJECTIVES.values() if isinstance(one, AnswerObjective) and one.figure_name
)
"""Names of the figures of a step that single objectives have."""
SFT = Sft.name
