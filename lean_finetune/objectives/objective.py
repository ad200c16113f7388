"""What all objectives share, and those of preferences: the sums that a loss is made of, and the interface."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from lean_finetune.objectives.row_kind import RowKind

if TYPE_CHECKING:  # The schema of params.yaml reads the registry, and must not import torch.
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowSums:
    """The answers of R rows of a micro-batch; all (R,)."""

    logps: "Tensor"
    """Log-probability of the answer, a sum over its trained tokens, or its score, fp32."""
    tokens: "Tensor"
    """Number of trained tokens, fp32."""
    reference: "Tensor"
    """`logps` under the reference model; 0 for objectives without one."""
    better: "Tensor | None"
    """Whether the answer is to become more likely, by its label, bool; None for kinds of rows without labels."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Figures of an optimizer step's rows, over all micro-batches and processes."""

    count: int
    """Rows of the data."""
    better: int
    """Answers that are to become more likely."""
    worse: int
    """The others."""
    better_tokens: int
    """Trained tokens of the better answers."""
    untrained: "Tensor | None" = None
    """`AnswerObjective.of_step`, a detached fp32 scalar; None where all rows of tokens are trained."""


Judged = Literal["tokens", "answers", "scores"]
"""What a loss is made of: the cross-entropy of tokens, log-probabilities of answers, or scores of a reward model."""


@dataclass(frozen=True, kw_only=True)
class LossParameter:
    """A number in section train.preference; blank there, it has the objective's usual value."""

    text: str
    """What it does."""
    least: float | None = None
    above: float | None = None
    """It is larger than this."""
    below: float | None = None
    """It is smaller than this."""


class Objective:
    """What is learnt.

    To add one, write a subclass in an island, and name it in `lean_finetune/islands/objectives/registry.py`.
    """

    name: ClassVar[str]
    """Value of train.objective."""
    kind: ClassVar[RowKind] = RowKind.ANSWER
    """What rows it learns from."""
    judges: ClassVar[Judged] = "tokens"
    """What its loss is made of."""
    has_reference: ClassVar[bool] = False
    """Whether the loss needs log-probabilities under the model before training."""
    defaults: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """The parameters of train.preference that it reads, with their values where params.yaml leaves them blank."""
    parameters: ClassVar[Mapping[str, LossParameter]] = MappingProxyType({})
    """What it adds to the keys of train.preference. Objectives may share one."""
    off: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """Parameters of logits and of generated text, with the values that they must have where there are none."""
    lr_share: ClassVar[float] = 1.0
    """Usual learning rate, as a share of the one of supervised fine-tuning."""
    figure_name: ClassVar[str] = ""
    """Of `AnswerObjective.of_step` in the curves; blank without it."""

    @property
    def compares(self) -> bool:
        """Whether it learns preferences: which answers are better."""
        return self.kind.compared

    @property
    def scored(self) -> bool:
        """Whether it trains a reward model: a head of one output, which scores an answer at its last token."""
        return self.judges == "scores"


class Sft(Objective):
    """Supervised fine-tuning: the cross-entropy of trained tokens."""

    name = "sft"


class AnswerObjective(Objective, ABC):
    """A loss of preferences.

    A row, or pair of rows, has a loss of its own, given figures of the whole step. So any division of a step into
    micro-batches gives the same gradients.
    """

    judges: ClassVar[Judged] = "answers"
    lr_share: ClassVar[float] = 1 / 40
    """5e-6 for adapters and 5e-7 for all weights at 7 B, as in the recipes of Zephyr (Tunstall et al. 2023, arXiv
    2310.16944) and Tülu 3 (Lambert et al. 2024)."""

    def of_untrained(self, rows: RowSums) -> "Tensor":
        """A figure of each row of tokens that is not trained, fp32 (R,).

        Called where `RowKind.passes` is above 1, before the first `step_loss`, without gradients.
        """
        raise NotImplementedError(f"objective {self.name} trains all rows of tokens")

    def of_step(self, mean: "Tensor") -> "Tensor":
        """What the loss needs of the whole step, from the mean of `of_untrained` over its rows of the data."""
        return mean

    @abstractmethod
    def step_loss(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """The part of the step's loss that a micro-batch's rows have, an fp32 scalar with gradients by `rows.logps`.

        `values` are those of `defaults`' keys.
        """

    @abstractmethod
    def judged(self, rows: RowSums, step: StepTotals, values: Mapping[str, float]) -> "Tensor":
        """Figures of a micro-batch's rows, fp32 (3,).

        The sums of the rewards of its better and of its worse answers, and the number of pairs, or of other rows,
        that the model judges right; those that it does not distinguish count half.
        """


BETA = LossParameter(
    text="Strength of the preference loss: the inverse of the distance to the reference, or the scale of a difference.",
    above=0.0,
)
"""A parameter of all objectives with a reference or a scale."""


def rightness(difference: "Tensor") -> "Tensor":
    """1 where a difference is in favour of the better answer, 0 where it is against it, and 0.5 where it is 0."""
    return difference.sign() * 0.5 + 0.5
