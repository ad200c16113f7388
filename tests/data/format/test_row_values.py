"""Lists of turns that a table holds as text are read as lists, or refused: never trained as text."""

import json
from typing import Any

import numpy as np
import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, Example, SourceFormat, detect_format
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.row_values import parse_text
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind
from tests.data.common import ANSWER, USER

BAD = {"role": "assistant", "content": 'It\'s "B"\n\t\\d é 🙂'}
HUMAN, GPT = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None, "strict": True}}}}

# By name: the kind, the row, and its columns that a CSV file has as text.
ROWS: dict[str, tuple[RowKind, dict[str, Any]]] = {
    "messages": (RowKind.ANSWER, {"messages": [USER, BAD], "tools": [TOOL]}),
    "sharegpt": (RowKind.ANSWER, {"conversations": [HUMAN, GPT]}),
    "conversation": (RowKind.ANSWER, {"conversation": [{"human": "Q", "assistant": "A"}]}),
    "prompt and completion": (RowKind.ANSWER, {"prompt": [USER], "completion": [BAD]}),
    "kto": (KINDS["labelled"], {"prompt": [USER], "completion": [BAD], "label": True}),
    "kto messages": (KINDS["labelled"], {"messages": [USER, BAD], "label": False}),
    "pair": (KINDS["pair"], {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]}),
    "pair without prompt": (KINDS["pair"], {"chosen": [USER, ANSWER], "rejected": [USER, BAD]}),
    "pair and text": (KINDS["pair"], {"prompt": "Q", "chosen": [USER, ANSWER], "rejected": [USER, BAD]}),
    "ultrafeedback": (
        KINDS["pair"],
        {"prompt": "Q", "messages": [USER, ANSWER], "chosen": [USER, ANSWER], "rejected": [USER, BAD]},
    ),
    "single messages": (KINDS["pair"], {"messages": [USER], "chosen": ANSWER, "rejected": BAD}),
    "sharegpt pair": (
        KINDS["pair"],
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "B"}},
    ),
    "alpaca pair": (KINDS["pair"], {"instruction": "Q", "chosen": [ANSWER], "rejected": [BAD]}),
    "ms-swift pair": (KINDS["pair"], {"messages": [USER, ANSWER], "rejected_response": [BAD]}),
}


def as_text(value: Any, write: Any) -> Any:
    return write(value) if isinstance(value, list | dict) else value


def numpy_text(value: Any) -> str:
    """Rows of a Parquet file have arrays in pandas, and `to_csv` writes their str."""
    return str(np.array(value, dtype=object)) if isinstance(value, list) else f"{value}..."


def numpy_repr(value: Any) -> str:
    return repr(np.array(value, dtype=object)) if isinstance(value, list) else f"{value}..."


def read(row: dict[str, Any], kind: RowKind, **columns: str) -> Example:
    name, _ = detect_format(row, columns, kind)
    return parse_row(row, SourceFormat(format=name, columns=columns, kind=kind))


@pytest.mark.parametrize(
    "write",
    [json.dumps, repr, lambda value: f" {json.dumps(value, indent=1)}\n", lambda value: json.dumps(json.dumps(value))],
    ids=["json", "python", "indented", "twice"],
)
@pytest.mark.parametrize("name", ROWS)
def test_turns_as_text_are_read_as_the_turns(name: str, write: Any):
    """A CSV file trained `[{"role": "user", ...` as the prompt, and brackets as the answer."""
    kind, row = ROWS[name]
    text = {key: as_text(value, write) for key, value in row.items()}
    assert text != row and read(text, kind) == read(row, kind)


@pytest.mark.parametrize("write", [numpy_text, numpy_repr])
@pytest.mark.parametrize("name", [name for name in ROWS if name != "conversation"])
def test_turns_in_a_text_of_numpy_are_refused(name: str, write: Any):
    kind, row = ROWS[name]
    long = {key: [*value, *value] if isinstance(value, list) else value for key, value in row.items()}
    text = {key: as_text(value, write) for key, value in long.items()}
    with pytest.raises(RowFault) as fault:
        read(text, kind)
    assert "neither JSON nor Python" in str(fault.value) and "\n" not in str(fault.value)


def test_mapped_columns_and_roles_hold_for_text_too():
    row = {"dialog": json.dumps([{"role": "Kunde", "content": "Q"}, {"role": "bot", "content": "A"}])}
    source = SourceFormat(format="messages", columns={"messages": "dialog"}, roles={"kunde": "user"})
    example = parse_row(row, source)
    assert isinstance(example, Conversation) and example.messages == [USER, ANSWER]


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Q", "output": json.dumps([USER, ANSWER])},
        {"instruction": str([USER]), "output": "A"},
        {"query": "Q", "response": json.dumps(ANSWER)},
        {"text": json.dumps([USER, ANSWER])},
    ],
)
def test_turns_in_a_column_of_text_are_refused_with_their_key(row):
    with pytest.raises(RowFault, match="is a list of turns.*data.columns as a key of turns"):
        read(row, RowKind.ANSWER)


@pytest.mark.parametrize(
    "row", [{"prompt": "Q", "completion": json.dumps([ANSWER])}, {"prompt": [USER], "completion": "A"}]
)
def test_text_beside_turns_is_refused(row):
    with pytest.raises(RowFault, match="must both be text or both be lists"):
        read(row, RowKind.ANSWER)


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "Director", "name": "Ann"}]',
        '{"role": "admin", "content": "all", "rights": 3}',
        '[{"city": "Rome"}]',
        "[{'city': 'Rome'}]",
        '{"role": "user"} is a message without content.',
        '[{"role": "user", "content": "x"}] is how a list of messages begins',
        "[1, 2]",
        "{x: 1}",
        "[INST] Q [/INST]",
        "[{",
    ],
)
def test_other_json_and_prose_stay_text(text: str):
    """Rows that extract JSON from text."""
    row = {"prompt": "Q", "completion": text}
    assert read(row, RowKind.ANSWER).completion == text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [{"a": [1, -2.5, 1e300, True, False, None]}],
        ["'", '"', "'\"", "\\", "\\n", "\n\r\t", "\x00\x7f\x85\u2028", "é", "\U0001f642", "\ud800"],
        {"k": {"k": "{'k': 1}"}},
    ],
)
def test_python_text_is_read_exactly(value: Any):
    assert parse_text(repr(value), "it") == value
    assert parse_text(json.dumps(value), "it") == value


@pytest.mark.parametrize(
    "text",
    [
        "['a' 'b']",
        "(1, 2)",
        "[b'a']",
        "[nan]",
        "[array([1])]",
        "[1 2]",
        "{1, 2}",
        "['a\nb']",
        "[01]",
        "['\\d']",
        "['\\ud83']",
        "__import__('os')",
        "[-1, +2]",
        "[f'{1}']",
        "['a",
        "[" * 300 + "]" * 300,
        "[True, Trueish]",
    ],
)
def test_what_is_neither_json_nor_a_plain_repr_is_refused(text: str):
    """Text of numpy: its str of two texts reads as one text in Python."""
    with pytest.raises(RowFault):
        parse_text(text, "it")


@pytest.mark.parametrize("write", [json.dumps, repr])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_content_parts_as_text_are_refused(write: Any, role: str):
    """They were trained as brackets. A tool may return such text, and an answer may begin with a bracket."""
    parts = write([{"type": "text", "text": "Q"}])
    with pytest.raises(RowFault, match="has a list of content parts as text"):
        read({"messages": [USER, {"role": role, "content": parts}, ANSWER]}, RowKind.ANSWER)
    others = [{"role": "tool", "content": parts}, {**USER, "content": "[INST]"}, {**USER, "content": "[]"}]
    example = read({"messages": [*others, {**ANSWER, "content": '[{"type": "city"}]'}]}, RowKind.ANSWER)
    assert isinstance(example, Conversation) and example.messages[0]["content"] == parts
