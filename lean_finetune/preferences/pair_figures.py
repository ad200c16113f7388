"""Held-out preference pairs: what the objective rewards, before and after training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from lean_finetune.preferences.objectives.pair_objectives import PairObjective, PairSums
from lean_finetune.rows.held_out_answers import HeldoutAnswers, Losses

BASE = "base"
"""The model before training, in what is compared."""
FIGURES = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")
"""Of each model: the share of pairs in the right order, the mean margin between their rewards, mean rewards, and mean
log-probabilities of an answer, summed over its tokens."""
LOGPS = FIGURES[4:]
"""Those that a reward model does not have."""
RESULTS = (
    *(f"{model}_{name}" for name in FIGURES[:2] for model in ("tuned", BASE)),
    *(f"{model}_{name}" for model in ("tuned", BASE) for name in FIGURES[2:]),
    "chosen_tokens",
    "rejected_tokens",
)
"""Figures of pairs in metrics/evaluate.json, in the order of columns of `dvc exp show`."""
MOST_LISTED = 10
"""Pairs in pairs.jsonl whose order became right, and as many that became wrong."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldoutPairs(HeldoutAnswers):
    """Held-out pairs, P of them, and the objective that rewards them. The better answers are the chosen ones (P,)."""

    results = RESULTS
    objective: PairObjective

    @property
    def rejected(self) -> np.ndarray:
        """Row numbers of the rejected answers (P,)."""
        return self.better + 1

    @property
    def others(self) -> list[int]:
        """See the base class: the rejected answers."""
        return self.rejected.tolist()

    @property
    def scored(self) -> bool:
        """See the base class."""
        return self.objective.scored

    def metrics(self, losses: Losses) -> dict[str, Any]:
        """See the base class."""
        return pair_metrics(self, pair_scores(self, losses))

    def lines(self, losses: Losses, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """See the base class."""
        return changed_pairs(self, pair_scores(self, losses), tokenizer)

    def rewards(self, chosen_logps: np.ndarray, rejected_logps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rewards of both answers of each pair (P,), from the log-probabilities of their tokens, summed (P,)."""
        columns = {
            "chosen": chosen_logps,
            "rejected": rejected_logps,
            "chosen_tokens": self.rows.supervised[self.better],
            "rejected_tokens": self.rows.supervised[self.rejected],
            "chosen_reference": self.reference[self.better],
            "rejected_reference": self.reference[self.rejected],
        }
        sums = {name: torch.from_numpy(column.astype(np.float64)) for name, column in columns.items()}
        chosen, rejected = self.objective.rewards(PairSums(**sums), self.values)
        return chosen.numpy(), rejected.numpy()


@dataclass(frozen=True, kw_only=True, eq=False)
class PairScores:
    """Log-probabilities and rewards of one model; all float64 (P,)."""

    logp_chosen: np.ndarray
    logp_rejected: np.ndarray
    reward_chosen: np.ndarray
    reward_rejected: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """By how much the chosen answer's reward is higher."""
        return self.reward_chosen - self.reward_rejected

    def figures(self) -> dict[str, float]:
        """The means over the pairs, by the names in `FIGURES`. Equal rewards are half in the right order."""
        columns = {
            "reward_accuracy": (np.sign(self.margins) + 1.0) / 2.0,
            "reward_margin": self.margins,
            **{name: getattr(self, name) for name in FIGURES[2:]},
        }
        return {name: round(float(columns[name].mean()), 6) for name in FIGURES}


def pair_scores(pairs: HeldoutPairs, losses: Losses) -> dict[str, PairScores]:
    """The scores of each model, from the summed cross-entropy of chosen and rejected answers.

    The reference is the model before training. So its rewards are those of its own log-probabilities, exactly 0 in
    changes from the reference: other batches would round them to a random order.
    """
    found = {}
    for name, (chosen_losses, rejected_losses) in losses.items():
        logps = -chosen_losses, -rejected_losses
        rewarded = logps
        if name == BASE and pairs.objective.has_reference:
            rewarded = pairs.reference[pairs.better], pairs.reference[pairs.rejected]
        chosen, rejected = pairs.rewards(*rewarded)
        found[name] = PairScores(
            logp_chosen=logps[0], logp_rejected=logps[1], reward_chosen=chosen, reward_rejected=rejected
        )
    return found


def pair_metrics(pairs: HeldoutPairs, scores: Mapping[str, PairScores]) -> dict[str, Any]:
    """`FIGURES` of each model, the number of pairs and the mean tokens of both answers; nothing without pairs."""
    if not len(pairs.better):
        return {"evaluated_pairs": 0, **dict.fromkeys(RESULTS)}
    tokens = pairs.rows.supervised
    no_logps = {f"{name}_{figure}": None for name in scores for figure in LOGPS} if pairs.objective.scored else {}
    return {
        "evaluated_pairs": len(pairs.better),
        **{f"{name}_{figure}": value for name, one in scores.items() for figure, value in one.figures().items()},
        "chosen_tokens": round(float(tokens[pairs.better].mean()), 3),
        "rejected_tokens": round(float(tokens[pairs.rejected].mean()), 3),
        **no_logps,
    }


def changed_pairs(pairs: HeldoutPairs, scores: Mapping[str, PairScores], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The pairs that are in the right order after training and were not before, then those that no more are.

    In both lists, the largest change of the margin comes first; each has at most `MOST_LISTED`.
    """
    before, after = scores[BASE].margins, scores["tuned"].margins
    order = np.lexsort((pairs.better, -np.abs(after - before)))
    became_right, became_wrong = (before <= 0) & (after > 0), (before >= 0) & (after < 0)
    listed = [number for became in (became_right, became_wrong) for number in order[became[order]][:MOST_LISTED]]
    return [_line(pairs, scores, number, tokenizer) for number in map(int, listed)]


def _line(pairs: HeldoutPairs, scores: Mapping[str, PairScores], number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The record of a pair: its text, and both rewards of each model."""
    texts = dict(zip(("chosen", "rejected"), _texts(pairs, number, tokenizer), strict=True))
    rows, row = pairs.rows, int(pairs.better[number])
    prompt = rows.ids(row)[: int(rows.spans(row)[0][0])].tolist()
    return {
        "pair": row // 2,
        "became_right": bool(scores["tuned"].margins[number] > 0),
        "prompt": tokenizer.decode(prompt, skip_special_tokens=False),
        **texts,
        **{
            f"{name}_{side}": round(float(getattr(one, side)[number]), 6)
            for name, one in scores.items()
            for side in ("reward_chosen", "reward_rejected")
        },
    }


def _texts(pairs: HeldoutPairs, number: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Both answers of a pair, without control tokens."""
    for row in (int(pairs.better[number]), int(pairs.rejected[number])):
        spans: Sequence[Sequence[int]] = pairs.rows.spans(row).tolist()
        yield tokenizer.decode(pairs.rows.ids(row)[spans[0][0] : spans[-1][1]].tolist(), skip_special_tokens=True)
