"""Objectives of pairs: a chosen and a rejected answer to one prompt."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lean_finetune.objectives.objective import BETA, AnswerObjective, LossParameter, RowSums, StepTotals, rightness
from lean_finetune.objectives.row_kind import KindWords, RowKind

if TYPE_CHECKING:
    from torch import Tensor

PAIR = RowKind(
    name="pair",
    objective="dpo",
    text="preference pairs",
    unit=2,
    token_rows=2,
    compared=True,
    words=KindWords(
        title="Preference pairs",
        rows="pairs",
        one="pair",
        right="pairs in the right order",
        better="chosen",
        worse="rejected",
        counts=("evaluated_pairs",),
    ),
)
"""A chosen and a rejected answer to one prompt, both trained."""


@dataclass(frozen=True, kw_only=True)
class PairSums:
    """Log-probabilities of the answers of P pairs, each summed over the answer's trained tokens; all fp32 (P,)."""

    chosen: "Tensor"
    rejected: "Tensor"
    chosen_tokens: "Tensor"
    """Number of trained tokens."""
    rejected_tokens: "Tensor"
    chosen_reference: "Tensor"
    """Sums under the reference model; 0 for objectives without one."""
    rejected_reference: "Tensor"

    @classmethod
    def of(cls, rows: RowSums) -> "PairSums":
        """The sums of pairs: rows 0 and 1, 2 and 3, and so on."""
        return cls(
            chosen=rows.logps[::2],
            rejected=rows.logps[1::2],
            chosen_tokens=rows.tokens[::2],
            rejected_tokens=rows.tokens[1::2],
            chosen_reference=rows.reference[::2],
            rejected_reference=rows.reference[1::2],
        )

    @cached_property
    def mean_chosen(self) -> "Tensor":
        """Mean log-probability of a token of the chosen answer."""
        return self.chosen / self.chosen_tokens

    @cached_property
    def mean_rejected(self) -> "Tensor":
        """Mean log-probability of a token of the rejected answer."""
        return self.rejected / self.rejected_tokens

    @cached_property
    def chosen_ratio(self) -> "Tensor":
        """Log-probability of the chosen answer less that under the reference."""
        return self.chosen - self.chosen_reference

    @cached_property
    def rejected_ratio(self) -> "Tensor":
        """Log-probability of the rejected answer less that under the reference."""
        return self.rejected - self.rejected_reference


class PairObjective(AnswerObjective):
    """A mean of losses of pairs, plus `sft_weight` times the cross-entropy of the chosen answers if it reads that."""

    kind = PAIR
    parameters = {
        "beta": BETA,
        "gamma": LossParameter(text="simpo: the margin between the rewards.", least=0.0),
        "label_smoothing": LossParameter(
            text="Share of the pairs that are taken to be in the wrong order.", least=0.0, below=0.5
        ),
        "sft_weight": LossParameter(
            text="Weight of the cross-entropy of the chosen answers, a mean over their tokens.", least=0.0
        ),
    }

    @abstractmethod
    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """The loss of each pair, fp32 (P,), without the term of sft_weight; `values` are those of `defaults`' keys."""

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """Rewards of the chosen and of the rejected answers, fp32 (P,): what the figures call reward and margin."""
        return values["beta"] * pairs.chosen_ratio, values["beta"] * pairs.rejected_ratio

    def step_loss(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        pairs = PairSums.of(rows)
        loss = self.losses(pairs, values).sum() * (1.0 / step.count)
        if sft_weight := values.get("sft_weight", 0.0):
            loss = loss - pairs.chosen.sum() * (sft_weight / step.better_tokens)
        return loss

    def judged(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        import torch

        chosen, rejected = self.rewards(PairSums.of(rows), values)
        return torch.stack([one.sum() for one in (chosen, rejected, rightness(chosen - rejected))])


def smoothed_logistic(difference: "Tensor", smoothing: float) -> "Tensor":
    """-log sigmoid of a difference in favour of the chosen answer, where a share `smoothing` of the labels is wrong."""
    from torch.nn.functional import logsigmoid

    return -(1.0 - smoothing) * logsigmoid(difference) - smoothing * logsigmoid(-difference)


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

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class; without a reference."""
        return values["beta"] * pairs.chosen, values["beta"] * pairs.rejected


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


class Reward(PairObjective):
    """Raise the score of the chosen answer above that of the rejected one (Bradley and Terry 1952).

    A reward model (Ouyang et al. 2022, arXiv 2203.02155): a score of an answer, learnt from pairs.
    """

    name = "reward"
    judges = "scores"
    off = {"train.loss_chunk": None, "evaluate.generate_rows": 0}  # It has no logits, and writes no text.

    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """See the base class."""
        from torch.nn.functional import logsigmoid

        return -logsigmoid(pairs.chosen - pairs.rejected)

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """See the base class: the scores."""
        return pairs.chosen, pairs.rejected
