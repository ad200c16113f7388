"""Held-out labelled answers: what the objective rewards, before and after training."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lean_finetune.objectives.objective import AnswerObjective, RowSums, StepTotals
from lean_finetune.preferences.pair_figures import BASE, RESULTS
from lean_finetune.rows.held_out_answers import HeldoutAnswers, Losses


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldoutLabels(HeldoutAnswers):
    """Held-out answers with labels, and the objective that rewards them. The better answers are the desirable ones."""

    results = RESULTS
    objective: AnswerObjective

    def metrics(self, losses: Losses) -> dict[str, Any]:
        """See the base class."""
        return label_metrics(self, losses)

    @property
    def others(self) -> list[int]:
        """See the base class: undesirable and mismatched answers."""
        return [*self.worse.tolist(), *(self.labelled + 1).tolist()]

    @property
    def labelled(self) -> np.ndarray:
        """Row numbers of all labelled answers, the desirable ones first; a row's mismatch follows it."""
        return np.concatenate([self.better, self.worse])

    def figures(self, losses: np.ndarray, other_losses: np.ndarray, *, is_reference: bool) -> dict[str, float | None]:
        """Figures of one model, from the summed cross-entropy of the desirable answers and of `others`.

        The reference is the model before training, and rewarded by its own log-probabilities: see `pair_scores`.
        """
        better, worse, reference = len(self.better), len(self.worse), self.reference
        numbers = np.concatenate([self.labelled, self.labelled + 1])
        found = -np.concatenate([losses, other_losses])
        logps = reference[numbers].astype(np.float64) if is_reference else found
        answers, ratios = np.arange(len(numbers)) < better + worse, logps - reference[numbers]
        sums = RowSums(
            logps=torch.from_numpy(logps[answers]),
            tokens=torch.from_numpy(self.rows.supervised[self.labelled].astype(np.float64)),
            reference=torch.from_numpy(reference[self.labelled].astype(np.float64)),
            better=torch.arange(better + worse) < better,
        )
        totals = StepTotals(
            count=better + worse,
            better=better,
            worse=worse,
            better_tokens=int(self.rows.supervised[self.better].sum()),
            untrained=self.objective.of_step(torch.tensor(float(ratios[~answers].mean()), dtype=torch.float64)),
        )
        better_sum, worse_sum, right = self.objective.judged(sums, totals, self.values).tolist()
        chosen = better_sum / better if better else None
        rejected = worse_sum / worse if worse else None
        return {
            "reward_accuracy": right / (better + worse),
            "reward_margin": None if chosen is None or rejected is None else chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "logp_chosen": _mean(found[:better]),
            "logp_rejected": _mean(found[better : better + worse]),
        }


def label_metrics(labels: HeldoutLabels, losses: Losses) -> dict[str, Any]:
    """The figures of pairs for labelled answers: chosen are the desirable ones, and right those that are judged right.

    `losses` are those of the desirable answers and of `HeldoutLabels.others`, by model.
    """
    counts = {"evaluated_desirable": len(labels.better), "evaluated_undesirable": len(labels.worse)}
    if not sum(counts.values()):
        return {**counts, **dict.fromkeys(RESULTS)}
    found = {
        f"{name}_{figure}": value
        for name, of_model in losses.items()
        for figure, value in labels.figures(*of_model, is_reference=name == BASE).items()
    }
    tokens = labels.rows.supervised
    lengths = {"chosen_tokens": _mean(tokens[labels.better]), "rejected_tokens": _mean(tokens[labels.worse])}
    return {**counts, **{name: None if value is None else round(value, 6) for name, value in (found | lengths).items()}}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
