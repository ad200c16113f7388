"""Compute the metrics of each model, and the lines of generations.jsonl."""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.evaluate.base_and_tuned import EvaluationRows, ModelOutputs
from lean_finetune.model.merge.merge_adapters import MERGED

RESULTS = ("tuned_loss", "tuned_exact_match_percent", "base_loss", "base_exact_match_percent")
"""Figures in metrics/evaluate.json, by which runs are compared, in the order of columns of `dvc exp show`."""
LENGTH_EDGES = (64, 128, 256, 512)
"""Upper limits of the length buckets, in tokens of a row; the last bucket has none."""
LARGEST_EXPONENT = math.log(sys.float_info.max)
"""Above this, `exp` overflows."""
ANSWER_MARKER = re.compile(r"^(?:Answer: |答案：)", re.MULTILINE)
"""Start of the line with the final answer after worked steps."""


def generation_lines(
    evaluated: EvaluationRows, answers: Mapping[str, ModelOutputs], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Return a record per prompt: its text with control tokens, expected and generated answers, whether correct."""
    lines = []
    for number, prompt in enumerate(evaluated.prompts):
        expected = tokenizer.decode(prompt.answer_ids, skip_special_tokens=True)
        line: dict[str, Any] = {
            "family": prompt.family,
            "prompt": tokenizer.decode(prompt.ids, skip_special_tokens=False),
            "expected": expected,
        }
        for name in answers:
            line[name] = tokenizer.decode(answers[name].answers[number], skip_special_tokens=True)
            line[f"{name}_correct"] = is_exact_match(expected, line[name])
        lines.append(line)
    return lines


def evaluate_metrics(
    evaluated: EvaluationRows, answers: Mapping[str, ModelOutputs], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return loss (nats per trained token) and perplexity in total and by row length; exact match also by family."""
    rows = evaluated.rows
    tokens = rows.supervised[evaluated.loss_rows]
    lengths = rows.lengths[evaluated.loss_rows]
    buckets = {f"up_to_{high}": (low < lengths) & (lengths <= high) for low, high in pairwise((0, *LENGTH_EDGES))}
    buckets[f"over_{LENGTH_EDGES[-1]}"] = lengths > LENGTH_EDGES[-1]
    families: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        families.setdefault(line["family"], []).append(line)
    return {
        "evaluated_rows": len(tokens),
        "evaluated_tokens": int(tokens.sum()),
        "generated_rows": len(lines),
        "unanswerable_rows": evaluated.unanswerable_rows,
        **_losses(answers, tokens, np.ones(len(tokens), dtype=bool)),
        **_merge_loss(answers, tokens),
        **_exact_match(lines, answers),
        "by_length": {
            name: {"rows": int(chosen.sum()), **_losses(answers, tokens, chosen)}
            for name, chosen in buckets.items()
            if chosen.any()
        },
        "by_family": {
            family: {"rows": len(own), **_exact_match(own, answers)} for family, own in sorted(families.items())
        },
    }


def _losses(answers: Mapping[str, ModelOutputs], tokens: np.ndarray, chosen: np.ndarray) -> dict[str, float | None]:
    """Return mean loss per trained token of the chosen rows, and its exponential, for each model.

    None stands for a perplexity too large for a float, and for the loss of no rows.
    """
    found: dict[str, float | None] = {}
    for name in answers:
        loss = float(answers[name].row_losses[chosen].sum() / tokens[chosen].sum()) if chosen.any() else None
        found[f"{name}_loss"] = None if loss is None else round(loss, 6)
        found[f"{name}_perplexity"] = None if loss is None or loss >= LARGEST_EXPONENT else round(math.exp(loss), 6)
    return found


def _merge_loss(answers: Mapping[str, ModelOutputs], tokens: np.ndarray) -> dict[str, float]:
    """Return the change of the loss per trained token by merging; empty without a merged model."""
    if MERGED not in answers:
        return {}
    change = answers[MERGED].row_losses.sum() - answers["tuned"].row_losses.sum()
    return {"merged_minus_tuned_loss": round(float(change / tokens.sum()), 9)}


def _exact_match(lines: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float | None]:
    """Return the percentage of correct answers of each model; None if nothing was generated."""
    found: dict[str, float | None] = {}
    for name in names:
        correct = sum(line[f"{name}_correct"] for line in lines)
        found[f"{name}_exact_match_percent"] = round(100 * correct / len(lines), 3) if lines else None
    return found


def final_answer(text: str) -> str | None:
    """Return the text after the last answer marker at the start of a line; None without one."""
    before, *answers = ANSWER_MARKER.split(text.strip())
    return answers[-1].strip() if answers else None


def is_exact_match(expected: str, generated: str) -> bool:
    """Whether the final answers are equal or, if none is expected, the stripped texts are."""
    answer = final_answer(expected)
    if answer is None:
        return generated.strip() == expected.strip()
    return final_answer(generated) == answer
