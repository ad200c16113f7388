"""The loss of preference pairs: from the cross-entropy of tokens to the objective, and the figures of a step.

Shapes: R rows of a micro-batch, two to a pair: chosen, rejected, chosen, …; P pairs, N trained tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from lean_finetune.config.schema import Train
from lean_finetune.objectives.objective import Objective, PairSums
from lean_finetune.step.batches import Answers, Batch
from lean_finetune.step.head_loss import TokenRule

FIGURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
"""Figures of a step: the mean rewards of the answers, their difference, and the share of pairs in the right order."""


@dataclass(frozen=True, kw_only=True)
class StepPairs:
    """The pairs of an optimizer step, over all processes."""

    objective: Objective
    values: Mapping[str, float]
    """Of the objective's parameters."""
    count: int
    chosen_tokens: int
    """Trained tokens of the chosen answers."""

    @classmethod
    def of(cls, train: Train, rows: np.ndarray, supervised: np.ndarray) -> "StepPairs | None":
        """The pairs of `rows`, two after each other; None for supervised fine-tuning.

        `supervised` are the trained tokens of every row of the data.
        """
        if train.pairs is None:
            return None
        chosen_tokens = int(supervised[rows[::2]].sum())
        values = train.preference_values
        return cls(objective=train.pairs, values=values, count=len(rows) // 2, chosen_tokens=chosen_tokens)


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """The loss of a step's pairs, one micro-batch at a time."""

    step: StepPairs
    loss_scale: float = 1.0
    sums: list[torch.Tensor] = field(default_factory=list)
    """Of each micro-batch, the sums of `FIGURES` over its pairs, fp32 (4,)."""

    def rule(self, batch: Batch) -> TokenRule:
        """The loss of a micro-batch, and its derivatives by the cross-entropy of each trained token."""
        answers = batch.answers
        assert answers is not None, "the batch has no pairs"

        def rule(losses_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not answers.counts:  # Padding for a process without work.
                self.sums.append(losses_N.new_zeros(len(FIGURES)))
                return losses_N.sum(), losses_N
            logps_R = torch.stack([-row.sum() for row in losses_N.split(answers.counts)]).requires_grad_()
            with torch.enable_grad():
                loss = self.of_rows(logps_R, answers)
            [slopes_R] = torch.autograd.grad(loss, logps_R)
            rows = zip(slopes_R.split(1), answers.counts, strict=True)
            return loss.detach(), torch.cat([slope.expand(count) for slope, count in rows]).neg_()

        return rule

    def of_rows(self, logps_R: torch.Tensor, answers: Answers) -> torch.Tensor:
        """The loss of a micro-batch from the log-probabilities of its rows; appends to `sums`."""
        objective, values = self.step.objective, self.step.values
        reference_R = answers.reference_R
        pairs = PairSums(
            chosen=logps_R[::2],
            rejected=logps_R[1::2],
            chosen_tokens=answers.tokens_R[::2],
            rejected_tokens=answers.tokens_R[1::2],
            chosen_reference=None if reference_R is None else reference_R[::2],
            rejected_reference=None if reference_R is None else reference_R[1::2],
        )
        loss = objective.losses(pairs, values).sum() * (self.loss_scale / self.step.count)
        if sft_weight := values.get("sft_weight", 0.0):
            loss = loss - pairs.chosen.sum() * (sft_weight * self.loss_scale / self.step.chosen_tokens)
        with torch.no_grad():
            chosen, rejected = objective.rewards(pairs, values)
            margin = chosen - rejected
            self.sums.append(torch.stack([one.sum() for one in (chosen, rejected, margin, (margin > 0).float())]))
        return loss

    def means(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The means of `FIGURES` over the step's pairs, of all processes, fp32 (4,)."""
        return sum_over_ranks(torch.stack(self.sums).sum(0)) / self.step.count
