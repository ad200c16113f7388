"""What all objectives of preference tuning share: the sums that a loss is made of, and the interface."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # The schema of params.yaml reads the registry, and must not import torch.
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairSums:
    """Log-probabilities of the answers of P pairs, each summed over the answer's trained tokens; all fp32 (P,)."""

    chosen: "Tensor"
    rejected: "Tensor"
    chosen_tokens: "Tensor"
    """Number of trained tokens."""
    rejected_tokens: "Tensor"
    chosen_reference: "Tensor | None"
    """Sums under the reference model; None for objectives without one."""
    rejected_reference: "Tensor | None"

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
        assert self.chosen_reference is not None, "the objective needs a reference"
        return self.chosen - self.chosen_reference

    @cached_property
    def rejected_ratio(self) -> "Tensor":
        """Log-probability of the rejected answer less that under the reference."""
        assert self.rejected_reference is not None, "the objective needs a reference"
        return self.rejected - self.rejected_reference


class Objective(ABC):
    """A loss of preference pairs.

    To add one, write a subclass in a module of its own, and name it in `registry.OBJECTIVES`. The sums are those of
    complete pairs, and each pair has a loss of its own, so that any division of a step into micro-batches gives the
    same gradients.
    """

    name: ClassVar[str]
    """Value of train.objective."""
    has_reference: ClassVar[bool]
    """Whether the loss needs log-probabilities under the model before training."""
    defaults: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """The parameters of train.preference that it reads, with their values where params.yaml leaves them blank.

    sft_weight is read for every objective that has it here: the weight of the cross-entropy of the chosen answers.
    """

    @abstractmethod
    def losses(self, pairs: PairSums, values: Mapping[str, float]) -> "Tensor":
        """The loss of each pair, fp32 (P,), without the term of sft_weight; `values` are those of `defaults`' keys."""

    def rewards(self, pairs: PairSums, values: Mapping[str, float]) -> tuple["Tensor", "Tensor"]:
        """Rewards of the chosen and of the rejected answers, fp32 (P,): what the figures call reward and margin."""
        beta = values["beta"]
        if self.has_reference:
            return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        return beta * pairs.chosen, beta * pairs.rejected


def smoothed_logistic(difference: "Tensor", smoothing: float) -> "Tensor":
    """-log sigmoid of a difference in favour of the chosen answer, where a share `smoothing` of the labels is wrong."""
    from torch.nn.functional import logsigmoid

    return -(1.0 - smoothing) * logsigmoid(difference) - smoothing * logsigmoid(-difference)
