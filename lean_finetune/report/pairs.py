"""What the report says about held-out preference pairs."""

from collections.abc import Iterator, Mapping
from typing import Any

from cuda_memory.page.html import Table
from cuda_memory.units import counted
from lean_finetune.objectives.registry import OBJECTIVES
from lean_finetune.report.formats import figure, percent
from lean_finetune.report.report_inputs import Inputs, shortened

REWARD_COLUMNS = ("step", "reward_accuracy", "heldout_reward_accuracy", "reward_margin", "heldout_reward_margin")
"""Curves of preference pairs."""
PAIR_CHARACTERS = 300
"""Most characters of a text of a pair."""


def has_pairs(inputs: Inputs) -> bool:
    """Whether preference pairs, or labelled answers, were evaluated."""
    return bool(inputs.evaluate.get("evaluated_pairs")) or _labelled(inputs) > 0


def _labelled(inputs: Inputs) -> int:
    """Number of labelled answers that were evaluated."""
    return sum(inputs.evaluate.get(f"evaluated_{side}", 0) for side in ("desirable", "undesirable"))


def title(inputs: Inputs) -> str:
    """Title of the section."""
    return "Labelled answers" if _labelled(inputs) else "Preference pairs"


def order_name(inputs: Inputs) -> str:
    """What the accuracy is a share of."""
    return "answers judged right" if _labelled(inputs) else "pairs in the right order"


def better_name(inputs: Inputs) -> str:
    """What the better answers are called."""
    return "desirable" if _labelled(inputs) else "chosen"


def shares_in_order(inputs: Inputs) -> str:
    """The share of pairs in the right order, before and after training."""
    return " → ".join(percent(inputs.evaluate[f"{model}_reward_accuracy"]) for model in ("base", "tuned"))


def pairs_table(inputs: Inputs) -> Table:
    """Order, rewards and log-probabilities of the held-out pairs, before and after training."""
    evaluate, better, worse = inputs.evaluate, *_sides(inputs)
    rows = {
        order_name(inputs): ("reward_accuracy", percent),
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
    count, of = (labelled, "answer") if (labelled := _labelled(inputs)) else (evaluate["evaluated_pairs"], "pair")
    return Table((counted(count, f"held-out {of}"), "before", "after"), cells)


def _sides(inputs: Inputs) -> tuple[str, str]:
    return (better_name(inputs), "undesirable" if _labelled(inputs) else "rejected")


def pairs_note(inputs: Inputs, parameters: Mapping[str, Any]) -> str:
    """What the figures of the pairs mean."""
    evaluate, objective = inputs.evaluate, OBJECTIVES[parameters["train.objective"]]
    better, worse = _sides(inputs)
    lengths = " and ".join(figure(evaluate[f"{side}_tokens"]) for side in ("chosen", "rejected"))
    text = f"Rewards are those of train.objective={parameters['train.objective']}. "
    text += f"{better.capitalize()} and {worse} answers have {lengths} trained tokens on average. "
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
