"""What the report says about held-out preference pairs."""

from collections.abc import Iterator, Mapping
from typing import Any

from cuda_memory.page.html import Table
from cuda_memory.units import counted
from lean_finetune.islands.objectives.registry import KINDS, OBJECTIVES
from lean_finetune.objectives.row_kind import KindWords, RowKind
from lean_finetune.report.formats import figure, percent
from lean_finetune.report.report_inputs import Inputs, shortened

REWARD_COLUMNS = ("step", "reward_accuracy", "heldout_reward_accuracy", "reward_margin", "heldout_reward_margin")
"""Curves of preference pairs."""
PAIR_CHARACTERS = 300
"""Most characters of a text of a pair."""


def words_of(inputs: Inputs) -> KindWords:
    """How the compared answers that were evaluated are called; those of the usual kind if none were."""
    kinds = (kind.words for kind in KINDS.values())
    return next((words for words in kinds if words.evaluated(inputs.evaluate)), RowKind.ANSWER.words)


def has_pairs(inputs: Inputs) -> bool:
    """Whether answers that an objective compares were evaluated."""
    return words_of(inputs).evaluated(inputs.evaluate) > 0


def shares_in_order(inputs: Inputs) -> str:
    """The share of pairs in the right order, before and after training."""
    return " → ".join(percent(inputs.evaluate[f"{model}_reward_accuracy"]) for model in ("base", "tuned"))


def pairs_table(inputs: Inputs) -> Table:
    """Order, rewards and log-probabilities of the held-out pairs, before and after training."""
    evaluate, words = inputs.evaluate, words_of(inputs)
    better, worse = words.better, words.worse
    rows = {
        words.right: ("reward_accuracy", percent),
        "mean margin between the rewards": ("reward_margin", figure),
        f"mean reward of the {better} answers": ("reward_chosen", figure),
        f"mean reward of the {worse} answers": ("reward_rejected", figure),
        f"mean log-probability of the {better} answers": ("logp_chosen", figure),
        f"mean log-probability of the {worse} answers": ("logp_rejected", figure),
    }
    cells = [
        (title, *(shown(evaluate[f"{model}_{name}"]) for model in ("base", "tuned")))
        for title, (name, shown) in rows.items()
    ]
    count = counted(words.evaluated(evaluate), f"held-out {words.one}")
    return Table((count, "before", "after"), cells)


def pairs_note(inputs: Inputs, parameters: Mapping[str, Any]) -> str:
    """What the figures of the pairs mean."""
    evaluate, objective = inputs.evaluate, OBJECTIVES[parameters["train.objective"]]
    words = words_of(inputs)
    lengths = " and ".join(figure(evaluate[f"{side}_tokens"]) for side in ("chosen", "rejected"))
    text = f"Rewards are those of train.objective={parameters['train.objective']}. "
    text += f"{words.better.capitalize()} and {words.worse} answers have {lengths} trained tokens on average. "
    if objective.has_reference:
        text += "Rewards are changes from the model before training, whose own are all 0; equal rewards count half. "
    if evaluate["tuned_logp_chosen"] is None:
        return text.rstrip()  # A reward model.
    return text + "Log-probabilities are natural logarithms, summed over the tokens of an answer."


def changed_pairs_tables(inputs: Inputs) -> list[tuple[str, Table]]:
    """Title and table of the listed pairs that became right, and of those that became wrong, if there are any."""
    header = ("prompt", "chosen", "rejected", "reward of chosen", "reward of rejected", "margin")
    found = []
    for became, title in (
        (True, "In the right order after training, but not before"),
        (False, "In the wrong order after training, but not before"),
    ):
        rows = [
            (
                *(shortened(line[name].strip("\n"), PAIR_CHARACTERS) for name in ("prompt", "chosen", "rejected")),
                *(_before_after(line, f"reward_{side}") for side in ("chosen", "rejected")),
                " → ".join(
                    figure(line[f"{model}_reward_chosen"] - line[f"{model}_reward_rejected"])
                    for model in ("base", "tuned")
                ),
            )
            for line in inputs.pairs
            if line["became_right"] is became
        ]
        if rows:
            found.append((title, Table(header, rows)))
    return found


def _before_after(line: Mapping[str, Any], name: str) -> str:
    return " → ".join(figure(line[f"{model}_{name}"]) for model in ("base", "tuned"))


def reward_records(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Yield `REWARD_COLUMNS` of each step; nothing for rows that are no pairs."""
    if REWARD_COLUMNS[1] in inputs.curves[0]:
        for record in inputs.curves:
            yield {name: record.get(name, "") for name in REWARD_COLUMNS}
