"""The loss of an optimizer step: one object for each step, which takes one micro-batch at a time.

Shapes: R rows of a micro-batch (of pairs: chosen, rejected, chosen, …), N trained tokens.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from lean_finetune.config.schema import Train
from lean_finetune.islands.objectives.registry import OWN_FIGURES
from lean_finetune.objectives.objective import AnswerObjective, Judged, Objective, RowSums, StepTotals
from lean_finetune.rows.answers import Answers, answers_of
from lean_finetune.rows.batch_part import weights_of
from lean_finetune.step.batches import Batch
from lean_finetune.step.head_loss import TokenRule
from lean_finetune.step.loss import cross_entropy, head_scores, token_losses
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.token_rows import TokenRows

FIGURES = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", *OWN_FIGURES)
"""Figures of a step: the mean rewards of the better and of the worse answers, their difference, the share of rows that
the model judges right, and those that single objectives have."""

Evaluate = Callable[[Batch, Callable[[nn.Module, Batch], None]], None]
"""Calls a function with the model and a batch, without gradients."""


@dataclass(frozen=True, kw_only=True)
class StepGoal:
    """The objective, and the rows of an optimizer step over all processes."""

    objective: Objective
    values: Mapping[str, float]
    """Of the objective's parameters."""
    totals: StepTotals
    supervised_tokens: int = 1
    """Tokens of the step that are predicted and trained: the loss of tokens is divided by them."""
    weight_scale: float = 1.0
    """Factor of the weights of its rows (see `Attachment.loss_scale`)."""

    @classmethod
    def of(cls, train: Train, tokens: TokenRows, rows: np.ndarray, supervised_tokens: int = 1) -> "StepGoal":
        """That of `rows`, the trained rows of tokens of a step."""
        better = train.goal.kind.is_better(rows, tokens.column(train.goal.kind.label_column))
        totals = StepTotals(
            count=len(rows) // train.goal.kind.unit,
            better=int(better.sum()),
            worse=int((~better).sum()),
            better_tokens=int(tokens.supervised[rows[better]].sum()),
        )
        values = train.preference_values
        return cls(
            objective=train.goal,
            values=values,
            totals=totals,
            supervised_tokens=supervised_tokens,
            weight_scale=math.prod(one.loss_scale(rows, tokens.supervised) for one in tokens.attached),
        )

    @classmethod
    def of_any_rows(cls, train: Train, supervised_tokens: int = 1) -> "StepGoal":
        """With arbitrary totals, to trace memory."""
        totals = StepTotals(count=1, better=1, worse=1, better_tokens=1)
        values = train.goal.defaults
        return cls(objective=train.goal, values=values, totals=totals, supervised_tokens=supervised_tokens)

    def begin(self, chunk: int | None, loss_scale: float = 1.0) -> "TokenLoss":
        """The loss of the step, before its first micro-batch; arguments as of `TokenLoss` and `LossScaler`."""
        return LOSSES[self.objective.judges](self, chunk, loss_scale)


class TokenLoss:
    """The cross-entropy of trained tokens by the weights of their rows, and what every loss of a step has."""

    def __init__(self, chunk: int | None, divisor: float = 1.0, weight_scale: float = 1.0):
        """Without micro-batches yet.

        Args:
            chunk: only trained positions reach the head, `chunk` of them at a time: at most chunk × V logits exist.
                With None the logits of all B × T positions exist at once.
            divisor: trained tokens of the *whole* step, divided by the loss scale (see `summed_head_loss`): so any
                division of a step into micro-batches gives the same gradients.
            weight_scale: as of `StepGoal`.
        """
        self.chunk, self.divisor, self.weight_scale = chunk, divisor, weight_scale

    def before(self, batches: Iterable[Batch], evaluate: Evaluate, parallel: ParallelModel) -> None:
        """Take the step's rows of tokens that are not trained, before all others; most kinds of rows have none."""

    def loss(self, lm: PreTrainedModel, hidden_BTD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The part of the step's loss that a micro-batch has, an fp32 scalar, from the decoder's output."""
        return cross_entropy(lm, hidden_BTD, batch, self.chunk, self.divisor, self.rule(batch))

    def rule(self, batch: Batch) -> TokenRule | None:
        """Return how the loss of a micro-batch follows from the losses of its tokens; None for their mean."""
        weights_N = weights_of(batch.parts)
        if weights_N is None:
            return None
        weights_N = weights_N * (self.weight_scale / self.divisor)
        return lambda losses_N: ((losses_N * weights_N).sum(), weights_N)

    def mean(self, summed: float, tokens: float) -> float:
        """The loss of rows from the sum of `loss` over micro-batches of so many trained tokens, with a divisor of 1."""
        return summed / tokens

    def figures(self, parallel: ParallelModel) -> tuple[torch.Tensor, ...]:
        """`FIGURES` of the step, over all processes, one fp32 tensor with all; none where answers are not compared."""
        return ()


class AnswerLoss(TokenLoss):
    """The loss of an objective that compares answers, by the sums of the log-probabilities of their tokens."""

    def __init__(self, goal: StepGoal, chunk: int | None, loss_scale: float = 1.0):
        """See the base class."""
        super().__init__(chunk, goal.supervised_tokens / loss_scale)
        assert isinstance(goal.objective, AnswerObjective)
        self.objective, self.values, self.totals, self.loss_scale = goal.objective, goal.values, goal.totals, loss_scale
        self.sums: list[torch.Tensor] = []
        """What the objective judged of each micro-batch, fp32 (3,)."""
        self.untrained: list[torch.Tensor] = []
        """Of each micro-batch of rows that are not trained, the sum of the objective's figure, fp32 scalars."""

    def before(self, batches: Iterable[Batch], evaluate: Evaluate, parallel: ParallelModel) -> None:
        """See the base class. In evaluation mode: nothing is recomputed, so layers need no checkpoints."""
        if self.objective.kind.passes == 1:
            return
        parallel.model.eval()
        for batch in batches:
            evaluate(batch, self._add_untrained)
            del batch
        parallel.model.train()
        mean = parallel.sum_over_ranks(torch.stack(self.untrained).sum()) / self.totals.count
        self.totals = replace(self.totals, untrained=self.objective.of_step(mean))

    def _add_untrained(self, model: nn.Module, batch: Batch) -> None:
        """Take a micro-batch of rows that are not trained."""
        losses_N = token_losses(model, batch, self.chunk or batch.input_ids_BT.numel())
        answers = answers_of(batch.parts)
        if not answers.counts:  # Padding for a process without work.
            self.untrained.append(losses_N.sum())
            return
        self.untrained.append(self.objective.of_untrained(row_sums(summed_logps(losses_N, answers), answers)).sum())

    def rule(self, batch: Batch) -> TokenRule:
        """See the base class: the loss of a micro-batch, and its derivatives by the cross-entropy of each token."""
        answers = answers_of(batch.parts)

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
        rows = row_sums(logps_R, answers)
        loss = self.objective.step_loss(rows, self.totals, self.values) * self.loss_scale
        with torch.no_grad():
            self.sums.append(self.objective.judged(rows, self.totals, self.values))
        return loss

    def mean(self, summed: float, tokens: float) -> float:
        """See the base class: each row's part is divided by their number already."""
        return summed

    def figures(self, parallel: ParallelModel) -> tuple[torch.Tensor, ...]:
        """See the base class; NaN where there is no such answer."""
        better, worse, right = parallel.sum_over_ranks(torch.stack(self.sums).sum(0)).unbind()
        totals = self.totals
        chosen, rejected = (
            total / count if count else torch.full_like(total, torch.nan)
            for total, count in ((better, totals.better), (worse, totals.worse))
        )
        own = (totals.untrained if name == self.objective.figure_name else None for name in OWN_FIGURES)
        own_or_nan = (torch.full_like(chosen, torch.nan) if value is None else value for value in own)
        return (torch.stack([chosen, rejected, chosen - rejected, right / totals.count, *own_or_nan]),)


class ScoreLoss(AnswerLoss):
    """The loss of a reward model, by the scores of answers."""

    def loss(self, lm: PreTrainedModel, hidden_BTD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """See the base class."""
        answers = answers_of(batch.parts)
        # A row ends with a trained token, and the token before it predicts that.
        last_R = batch.supervised_index_N[answers.tokens_R.cumsum(0).long() - 1] + 1
        scores_R = head_scores(lm, hidden_BTD.flatten(0, 1).index_select(0, last_R))
        return self.of_rows(scores_R, answers)


def _token_loss(goal: StepGoal, chunk: int | None, loss_scale: float) -> TokenLoss:
    return TokenLoss(chunk, goal.supervised_tokens / loss_scale, goal.weight_scale)


LOSSES: Mapping[Judged, Callable[[StepGoal, int | None, float], TokenLoss]] = {
    "tokens": _token_loss,
    "answers": AnswerLoss,
    "scores": ScoreLoss,
}
"""By what an objective judges."""


def row_sums(logps_R: torch.Tensor, answers: Answers) -> RowSums:
    """What the objective gets of rows, from their log-probabilities or scores."""
    return RowSums(logps=logps_R, tokens=answers.tokens_R, reference=answers.reference_R, better=answers.better_R)


def summed_logps(losses_N: torch.Tensor, answers: Answers) -> torch.Tensor:
    """The log-probability of each row's answer (R,), from the cross-entropy of its tokens."""
    return torch.stack([-row.sum() for row in losses_N.split(answers.counts)])


def known_figures(figures: Iterable[torch.Tensor]) -> dict[str, float]:
    """The figures that a step has, by name, from `TokenLoss.figures`; reading them waits for the device."""
    found = (zip(FIGURES, values.tolist(), strict=True) for values in figures)
    return {name: value for pairs in found for name, value in pairs if value == value}
