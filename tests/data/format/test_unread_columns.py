"""Columns that a format does not read: part of the question, or of the loss, and refused; or only listed."""

import json
import re
from typing import Any

import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, SourceFormat, detect_format
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.unread_columns import unread_columns
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.preferences import pair_formats  # noqa: F401 - registers its formats
from tests.data.common import ANSWER, USER

PLAIN = {"prompt": "Which?", "completion": "Yes."}
PAIR = {"prompt": "Which?", "chosen": "Yes.", "rejected": "No."}


def unread(row: dict[str, Any], kind: RowKind = RowKind.ANSWER, **values: Any) -> list[str]:
    return unread_columns(row, SourceFormat(format=detect_format(row, {}, kind)[0], columns={}, kind=kind, **values))


@pytest.mark.parametrize(
    "row, kind, remedy",
    [
        ({**PLAIN, "context": "A story."}, RowKind.ANSWER, "put it into the question"),
        ({**PLAIN, "input": "A story."}, RowKind.ANSWER, "put it into the question"),
        ({"query": "Q", "response": "A", "input": "A story."}, RowKind.ANSWER, "put it into the question"),
        ({"query": "Q", "response": "A", "context": "A story."}, RowKind.ANSWER, "put it into the question"),
        ({"messages": [USER, ANSWER], "context": "A story."}, RowKind.ANSWER, "put it into the question"),
        ({"instruction": "Q", "output": "A", "context": "C"}, RowKind.ANSWER, "data.columns={input: context}"),
        ({"instruction": "Q", "input": "I", "output": "A", "context": "C"}, RowKind.ANSWER, "put it into the question"),
        ({**PAIR, "context": "A story."}, KINDS["pair"], "put it into the question"),
        ({**PAIR, "input": "A story."}, KINDS["pair"], "put it into the question"),
        ({**PLAIN, "label": True, "context": "A story."}, KINDS["labelled"], "put it into the question"),
    ],
)
def test_a_part_of_the_question_is_refused_with_what_to_do(row: dict[str, Any], kind: RowKind, remedy: str):
    """A story that the answer is about was left out, and named in a note."""
    column = list(row)[-1]
    with pytest.raises(RowFault) as fault:
        unread(row, kind)
    assert str(fault.value).startswith(f"{column!r} is part of the question, and is not read; ")
    assert remedy in str(fault.value) and "data.ignore_columns" in str(fault.value)
    assert unread({**row, column: " "}, kind) == []


def test_an_input_beside_conversations_is_only_listed():
    """Published rows have the text that their messages were made of."""
    assert unread({"messages": [USER, ANSWER], "instruction": "Q", "input": "I"}) == ["instruction", "input"]
    assert unread({"chosen": "Yes.", "rejected": "No.", "input": "Which?"}, KINDS["pair"]) == ["input"]


@pytest.mark.parametrize("margin", [3.0, "0.5", -1, True, "high"])
def test_a_margin_is_refused_by_the_loss_that_could_subtract_it(margin: Any):
    """TRL's RewardTrainer does. Its other trainers do not read the column."""
    row = {**PAIR, "margin": margin}
    with pytest.raises(
        RowFault, match="'margin' is .*, and the loss of train.objective=reward has no margin of a pair; "
    ):
        unread(row, KINDS["pair"], scored=True)
    assert unread(row, KINDS["pair"]) == ["margin"]
    for nothing in (0, 0.0, "0", None, ""):
        assert unread({**PAIR, "margin": nothing}, KINDS["pair"], scored=True) in ([], ["margin"])


@pytest.mark.parametrize("mask", ["[0 1]", "[False, True]", "[False  True]", "[0. 1.]", "[0, 1]", "[false, true]"])
def test_a_mask_of_turns_as_text_is_refused_however_it_was_printed(mask: str):
    """Numpy prints lists without commas; such a mask was a text that nobody reads."""
    with pytest.raises(RowFault, match="'mask' may say for each turn whether it is trained, and is not read"):
        unread({"messages": [USER, ANSWER], "mask": mask})


TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}


@pytest.mark.parametrize("tools", [[TOOL], [{"type": "function", "function": TOOL}], json.dumps([TOOL]), str([TOOL])])
def test_tools_under_another_name_are_refused_with_their_mapping(tools: Any):
    """Calls of functions that the model was never shown."""
    row = {"messages": [USER, ANSWER], "available_tools": tools}
    with pytest.raises(RowFault, match=re.escape("'available_tools' has tools, and is not read; name it as data.colu")):
        unread(row)
    assert unread({**row, "tools": [TOOL]}) == ["available_tools"]
    assert unread({"messages": [USER, ANSWER], "people": [{"name": "Ann", "description": "d"}]}) == ["people"]


@pytest.mark.parametrize("column", [{"question": "Q"}, {"prompt": "Q"}, {"dialog": [USER]}])
def test_answers_whose_question_is_not_read_are_refused(column: dict[str, Any]):
    """The answer was trained without its question."""
    for start in ([], [{"role": "system", "content": "S"}]):
        row = {"messages": [*start, ANSWER], **column}
        with pytest.raises(RowFault, match=f"the row has no user's turn, and '{next(iter(column))}' is not read"):
            parse_row(row, SourceFormat(format="messages", columns={}))
    row = {"messages": [USER, ANSWER], **column}
    assert isinstance(parse_row(row, SourceFormat(format="messages", columns={})), Conversation)
    parse_row({"messages": [ANSWER], "id": "a"}, SourceFormat(format="messages", columns={}))


@pytest.mark.parametrize("role", ["prompter", "assistant", "User"])
def test_a_turn_of_a_conversation_is_no_plain_text(role: str):
    """Rows of OpenAssistant: questions were trained like answers."""
    with pytest.raises(RowFault, match="the row is one turn of a conversation"):
        parse_row({"text": "T", "role": role}, SourceFormat(format="text", columns={}))
    parse_row({"text": "T", "role": "editor"}, SourceFormat(format="text", columns={}))
