"""Columns of a question and its answer that no format has, under the names that data sets usually give them."""

from collections.abc import Mapping
from typing import Any

INSTRUCTION, INPUT = "instruction", "input"
QUESTIONS = (INSTRUCTION, "question", "query", "prompt", INPUT)
ANSWERS = ("answer", "response", "output", "completion")


def usual_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns of Alpaca's keys for a row of one question and one answer; empty for any other row.

    With two questions or two answers it is open which one is meant. Alpaca's `input` is a part of its question.

    Args:
        row: whose names no format has.
        columns: data.columns, whose columns are taken.
    """
    free = [key for key, value in row.items() if isinstance(value, str) and key not in columns.values()]
    questions, answers = ([key for key in names if key in free] for names in (QUESTIONS, ANSWERS))
    if questions == [INSTRUCTION, INPUT]:
        questions.remove(INPUT)
    if len(questions) != 1 or len(answers) != 1 or {"instruction", "output"} & columns.keys():
        return {}
    return {"instruction": questions[0], "output": answers[0]}


def suggested_columns(row: Mapping[str, Any]) -> str:
    """The data.columns to write for a row that no format suits: its likeliest question and answer."""
    texts = [key for key, value in row.items() if isinstance(value, str)]
    answer = [*(key for key in texts if key in ANSWERS), *texts[1:], "ANSWER"][0]
    others = [key for key in texts if key != answer]
    question = [*(key for key in others if key in QUESTIONS), *others, "QUESTION"][0]
    return f"data.columns={{instruction: {question}, output: {answer}}}"


def suggested_pair_columns(row: Mapping[str, Any]) -> str:
    """The data.columns to write for a pair that no format suits, as far as its names show them."""
    question = next((key for key in QUESTIONS if isinstance(row.get(key), str)), "QUESTION")
    chosen, rejected = (
        next((key for key, value in row.items() if name in key and isinstance(value, str | list)), name.upper())
        for name in ("chosen", "rejected")
    )
    return f"data.columns={{instruction: {question}, chosen: {chosen}, rejected: {rejected}}}"
