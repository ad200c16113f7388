"""The loss of preferences: from the cross-entropy of tokens to the objective, and the figures of a step.

Shapes: R rows of a micro-batch (of pairs: chosen, rejected, chosen, …), N trained tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lean_finetune.config.schema import Train
from lean_finetune.objectives.objective import AnswerObjective, RowSums, StepTotals
from lean_finetune.step.batches import Answers, Batch
from lean_finetune.step.head_loss import TokenRule
from lean_finetune.step.token_rows import TokenRows

FIGURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl")
"""Figures of a step: the mean rewards of the chosen (or desirable) and of the rejected answers, their difference, the
share of pairs (or labelled answers) that the model judges right, and the divergence from the reference."""


@dataclass(frozen=True, kw_only=True)
class StepPreferences:
    """The objective, and the rows of an optimizer step over all processes."""

    objective: AnswerObjective
    values: Mapping[str, float]
    """Of the objective's parameters."""
    totals: StepTotals

    @classmethod
    def of(cls, train: Train, tokens: TokenRows, rows: np.ndarray) -> "StepPreferences | None":
        """Those of `rows`, which the plan has in a step; None for supervised fine-tuning."""
        objective = train.goal
        if not isinstance(objective, AnswerObjective):
            return None
        better = objective.kind.is_better(rows, tokens.desirable)
        totals = StepTotals(
            count=len(rows) // objective.kind.unit,
            better=int(better.sum()),
            worse=int((~better).sum()),
            better_tokens=int(tokens.supervised[rows[better]].sum()),
        )
        return cls(objective=objective, values=train.preference_values, totals=totals)

    @classmethod
    def of_any_rows(cls, train: Train) -> "StepPreferences | None":
        """Arbitrary values, to trace memory."""
        objective = train.goal
        if not isinstance(objective, AnswerObjective):
            return None
        totals = StepTotals(count=1, better=1, worse=1, better_tokens=1)
        return cls(objective=objective, values=objective.defaults, totals=totals)

    @property
    def has_mismatches(self) -> bool:
        """Whether mismatched answers pass through the model before the step's own."""
        return self.objective.kind.passes > 1


@dataclass(kw_only=True)
class PreferenceLoss:
    """The loss of a step's preferences, one micro-batch at a time; mismatched answers come first, if there are any."""

    step: StepPreferences
    loss_scale: float = 1.0
    sums: list[torch.Tensor] = field(default_factory=list)
    """What the objective judged of each micro-batch, fp32 (3,)."""
    mismatch_sums: list[torch.Tensor] = field(default_factory=list)
    """Of each micro-batch of mismatched answers, the sum of their log-ratios, fp32 scalars."""

    def rule(self, batch: Batch) -> TokenRule:
        """The loss of a micro-batch, and its derivatives by the cross-entropy of each trained token."""
        answers = batch.answers

        def rule(losses_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not answers.counts:  # Padding for a process without work.
                self.sums.append(losses_N.new_zeros(3))
                return losses_N.sum(), losses_N
            logps_R = summed_logps(losses_N, answers).requires_grad_()
            with torch.enable_grad():
                loss = self.of_rows(logps_R, answers)
            [slopes_R] = torch.autograd.grad(loss, logps_R)
            rows = zip(slopes_R.split(1), answers.counts, strict=True)
            return loss.detach(), torch.cat([slope.expand(count) for slope, count in rows]).neg_()

        return rule

    def of_rows(self, logps_R: torch.Tensor, answers: Answers) -> torch.Tensor:
        """The loss of a micro-batch from the log-probabilities of its rows; appends to `sums`."""
        objective, totals, values = self.step.objective, self.step.totals, self.step.values
        rows = RowSums(
            logps=logps_R, tokens=answers.tokens_R, reference=answers.reference_R, desirable=answers.desirable_R
        )
        loss = objective.step_loss(rows, totals, values) * self.loss_scale
        with torch.no_grad():
            self.sums.append(objective.judged(rows, totals, values))
        return loss

    def add_mismatches(self, losses_N: torch.Tensor, batch: Batch) -> None:
        """Take the cross-entropy of the trained tokens of a micro-batch of mismatched answers."""
        answers = batch.answers
        if not answers.counts:  # Padding for a process without work.
            self.mismatch_sums.append(losses_N.sum())
            return
        assert answers.reference_R is not None, "the objective needs a reference"
        self.mismatch_sums.append((summed_logps(losses_N, answers) - answers.reference_R).sum())

    def estimate(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Estimate the divergence from the reference by the step's mismatched answers, over all processes."""
        ratio = sum_over_ranks(torch.stack(self.mismatch_sums).sum()) / self.step.totals.count
        self.step = replace(self.step, totals=replace(self.step.totals, kl=ratio.clamp(min=0.0)))

    def means(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`FIGURES` of the step, over all processes, fp32 (5,); NaN where there is no such answer."""
        better, worse, right = sum_over_ranks(torch.stack(self.sums).sum(0)).unbind()
        totals = self.step.totals
        chosen, rejected = (
            total / count if count else torch.full_like(total, torch.nan)
            for total, count in ((better, totals.better), (worse, totals.worse))
        )
        kl = torch.full_like(chosen, torch.nan) if totals.kl is None else totals.kl
        return torch.stack([chosen, rejected, chosen - rejected, right / totals.count, kl])


def summed_logps(losses_N: torch.Tensor, answers: Answers) -> torch.Tensor:
    """The log-probability of each row's answer (R,), from the cross-entropy of its tokens."""
    return torch.stack([-row.sum() for row in losses_N.split(answers.counts)])


def known_figures(means: torch.Tensor) -> dict[str, float]:
    """The figures that a step has, by name, from `PreferenceLoss.means`; reading them waits for the device."""
    return {name: value for name, value in zip(FIGURES, means.tolist(), strict=True) if value == value}
