"""From losses and answers to the figures of both models and the lines of generations.jsonl."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.evaluate.base_and_tuned import Answers, Questions
from lean_finetune.evaluate.exact_match import is_exact_match
from lean_finetune.model.merge_adapters import MERGED

RESULTS = ("base_exact_match_percent", "base_loss", "tuned_exact_match_percent", "tuned_loss")
"""The figures in metrics/evaluate.json, by which runs are compared."""
LENGTH_EDGES = (64, 128, 256, 512)
"""Upper edges of the length buckets, in tokens of a row; the last bucket is open."""

LARGEST_EXPONENT = math.log(sys.float_info.max)
"""Above this, `exp` is more than a float can hold."""


def generation_lines(
    questions: Questions, answers: Mapping[str, Answers], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """One record per prompt: its text with control tokens, the expected and the generated answers, their verdicts."""
    lines = []
    for number, prompt in enumerate(questions.prompts):
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
    questions: Questions, answers: Mapping[str, Answers], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Loss (nats per trained token) and perplexity, overall and by row length; exact match overall and by family."""
    rows = questions.rows
    tokens = rows.supervised[questions.loss_rows]
    lengths = rows.lengths[questions.loss_rows]
    families = sorted({line["family"] for line in lines})
    return {
        "evaluated_rows": len(tokens),
        "evaluated_tokens": int(tokens.sum()),
        "generated_rows": len(lines),
        "unanswerable_rows": questions.unanswerable_rows,
        **_losses(answers, tokens, np.ones(len(tokens), dtype=bool)),
        **_merge_loss(answers, tokens),
        **_exact_match(lines, answers),
        "by_length": {
            name: {"rows": int(chosen.sum()), **_losses(answers, tokens, chosen)}
            for name, chosen in _length_buckets(lengths)
            if chosen.any()
        },
        "by_family": {
            family: {"rows": len(own), **_exact_match(own, answers)}
            for family in families
            if (own := [line for line in lines if line["family"] == family])
        },
    }


def _length_buckets(lengths: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Name and members (bool per row) of each length bucket."""
    edges = [0, *LENGTH_EDGES, math.inf]
    names = [*(f"up_to_{edge}" for edge in LENGTH_EDGES), f"over_{LENGTH_EDGES[-1]}"]
    return [
        (name, (low < lengths) & (lengths <= high))
        for name, low, high in zip(names, edges[:-1], edges[1:], strict=True)
    ]


def _losses(answers: Mapping[str, Answers], tokens: np.ndarray, chosen: np.ndarray) -> dict[str, float | None]:
    """Mean loss per trained token of the chosen rows, and its exponential, for each model.

    None stands for a perplexity too large for a float, which JSON could not hold either, and for the losses of no rows.
    """
    found: dict[str, float | None] = {}
    for name in answers:
        if not chosen.any():
            found |= {f"{name}_loss": None, f"{name}_perplexity": None}
            continue
        loss = float(answers[name].row_losses[chosen].sum() / tokens[chosen].sum())
        found[f"{name}_loss"] = round(loss, 6)
        found[f"{name}_perplexity"] = round(math.exp(loss), 6) if loss < LARGEST_EXPONENT else None
    return found


def _merge_loss(answers: Mapping[str, Answers], tokens: np.ndarray) -> dict[str, float]:
    """How much merging moved the loss per trained token; nothing where no merged model was asked."""
    if MERGED not in answers:
        return {}
    moved = answers[MERGED].row_losses.sum() - answers["tuned"].row_losses.sum()
    return {"merged_minus_tuned_loss": round(float(moved / tokens.sum()), 9)}


def _exact_match(lines: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float | None]:
    """Percent of answers that are right, for each model; None where nothing was generated."""
    found: dict[str, float | None] = {}
    for name in names:
        right = sum(line[f"{name}_correct"] for line in lines)
        found[f"{name}_exact_match_percent"] = round(100 * right / len(lines), 3) if lines else None
    return found
