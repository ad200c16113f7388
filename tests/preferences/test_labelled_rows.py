"""Rows of one answer with a label: the forms of other tools, and what is refused."""

from typing import Any

import pytest

import lean_finetune.islands.columns  # noqa: F401 - registers the formats of rows
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.format_base import (
    Conversation,
    PlainText,
    SourceFormat,
    check_kind,
    detect_format,
)
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.unread_columns import unread_columns
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.preferences.labels import Labelled

LABELLED = KINDS["labelled"]
QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TURNS = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


def parsed(row: dict[str, Any], **columns: str) -> Labelled:
    """The example of a row whose format is detected, and of which every column is read."""
    name, _ = detect_format(row, columns, LABELLED)
    source = SourceFormat(format=name, columns=columns, kind=LABELLED)
    assert unread_columns(row, source) == []
    example = parse_row(row, source)
    assert isinstance(example, Labelled)
    return example


FORMS: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": [QUESTION], "completion": [ANSWER], "label": True},
    "ms-swift": {"messages": [QUESTION, ANSWER], "label": True},
    "a table": {"instruction": "2+2?", "output": "4", "label": "True"},
    "LLaMA-Factory, alpaca": {"instruction": "2+2?", "input": "", "output": "4", "kto_tag": True},
    "LLaMA-Factory, sharegpt": {"conversations": TURNS, "label": True},
    "LLaMA-Factory, openai": {"messages": [QUESTION, ANSWER], "kto_tag": True},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_answer(row):
    example = parsed(row)
    assert isinstance(example.answer, Conversation) and example.desirable
    assert example.answer.messages == [QUESTION, ANSWER] and example.answer.trained_turns() == [1]


def test_the_label_rates_the_last_answer_alone():
    """Earlier answers in the same row would be moved away from, too."""
    row = {"messages": [QUESTION, ANSWER, {"role": "user", "content": "Sure?"}, ANSWER], "label": False}
    example = parsed(row)
    assert isinstance(example.answer, Conversation) and not example.desirable
    assert example.answer.trained_turns() == [3]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ANSWER]},
        {"messages": [{"role": "system", "content": "S"}, ANSWER]},
        {"prompt": [], "completion": [ANSWER]},
        {"prompt": " ", "completion": "4"},
    ],
)
def test_an_answer_to_nothing_is_refused(row):
    with pytest.raises(RowFault, match="a labelled row needs a prompt in front of its answer"):
        parsed(row | {"label": True})


def test_plain_texts_and_columns_of_another_name():
    example = parsed({"prompt": "2+2=", "completion": "4", "good": 0}, label="good")
    assert example == Labelled(answer=PlainText(prompt="2+2=", completion="4"), desirable=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": 0.5}, "'label' must be true or false, got 0.5; change it"),
        ({"label": "good"}, "'label' must be true or false, got \"good\"; change it"),
        ({"label": None}, "the row has neither 'label' nor 'kto_tag'; say whether"),
        ({"label": True, "kto_tag": False}, "'label' and 'kto_tag' differ; keep one of them"),
        ({"messages": [QUESTION]}, "a labelled row must end with the assistant's answer"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "every assistant turn is marked as not trained"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(changes, message):
    row = {"messages": [QUESTION, ANSWER], "label": True, **changes}
    with pytest.raises(RowFault, match=f"^{message}"):
        parse_row(row, SourceFormat(format="messages", columns={}, kind=LABELLED))


def test_rows_of_another_kind_are_refused_with_the_objective_to_set():
    with pytest.raises(RowFault, match="^train.objective=kto needs 'label' or 'kto_tag', true or false; the row has"):
        detect_format({"messages": [QUESTION, ANSWER]}, {}, LABELLED)
    with pytest.raises(RowFault, match="^a preference pair .*set train.objective=dpo"):
        detect_format({"prompt": "Q", "chosen": "A", "rejected": "B"}, {}, LABELLED)
    with pytest.raises(UserError, match="trains rows of one answer with a label; got preference; .*objective=dpo$"):
        check_kind("preference", LABELLED)
    with pytest.raises(UserError, match="got text; use messages or .*, or train.objective=sft$"):
        check_kind("text", LABELLED)
    bad = {"messages": [QUESTION, ANSWER], "label": False}
    with pytest.raises(RowFault, match="^'label' is false: .*; set train.objective=kto to learn from it"):
        unread_columns(bad, SourceFormat(format="messages", columns={}))
