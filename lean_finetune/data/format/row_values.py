"""Values of a row: typed access, lists and turns that a table holds as text, and their short form for messages."""

import json
import re
from collections.abc import Container, Mapping
from typing import Any

import orjson

from lean_finetune.core.errors import RowFault
from lean_finetune.data.read.row_block import MAX_DEPTH

SHOWN_CHARACTERS = 80
_BLANK_TEXTS = ("", "[]", "null")
# orjson silently reads an integer past 64 bits as the nearest float.
_MAYBE_LARGE = re.compile("[0-9]{19}")


def show(value: Any) -> str:
    """A value as JSON, shortened for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def is_given(value: Any) -> bool:
    """Whether a value is more than null, blank text, or a list or object of such values.

    Data sets write an absent file as {"bytes": null, "path": null}.
    """
    if isinstance(value, str):
        return value.strip() not in _BLANK_TEXTS
    if isinstance(value, list | dict):
        return any(map(is_given, value.values() if isinstance(value, dict) else value))
    return value is not None


def text_of(row: Mapping[str, Any], key: str) -> str:
    """A text value. Raises RowFault if it is not text."""
    value = row[key]
    if isinstance(value, str):
        return value
    if is_turns(value):
        raise RowFault(
            f"{key!r} must be text, and is a list of turns: {show(value)}; name it in data.columns as a key of turns, "
            f"such as {{messages: {key}}}, or write the row as data.format=messages"
        )
    raise RowFault(f"{key!r} must be text, got {show(value)}; change it")


def text_or_nothing(row: Mapping[str, Any], key: str) -> str:
    """A text value; an absent or null one is empty. Raises RowFault if it is not text."""
    return "" if row.get(key) is None else text_of(row, key)


def list_of(row: Mapping[str, Any], key: str) -> list[Any]:
    """A list value, or its text as in a CSV file. An absent, null or blank one is empty.

    Raises RowFault if it is something else.
    """
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = parse_text(value, key) if value.strip() else None
        except RowFault:
            raise RowFault(f"{key!r} must be a list, or JSON text of one, got {show(value)}; change it") from None
    if value is not None and not isinstance(value, list):
        raise RowFault(f"{key!r} must be a list, got {show(value)}; change it")
    return value or []


def list_or_nothing(text: str) -> list[Any]:
    """The list of a text in a table; empty if it is something else."""
    try:
        value = parse_text(text, "")
    except RowFault:
        return []
    return value if isinstance(value, list) else []


def parse_json(text: str, where: str) -> Any:
    """The value of JSON text inside a row. Raises RowFault if it is not JSON, or nested too deep."""
    try:
        value = json.loads(text) if _MAYBE_LARGE.search(text) else orjson.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        try:  # The standard parser accepts NaN and lone surrogates, which `Guard` replaces.
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise RowFault(f"{where} must be JSON, got {show(text)}; change it") from None
    check_depth(value, where)
    return value


def check_depth(value: Any, where: str, room: int = MAX_DEPTH) -> None:
    """Raise RowFault if a JSON value is nested deeper than `room`."""
    if isinstance(value, dict | list):
        if not room:
            raise RowFault(f"{where} is nested too deep; make it flatter than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, where, room - 1)


# Python's text of lists and objects, which `DataFrame.to_csv` writes instead of JSON.

_ESCAPES = r"""\\(?:[\\'"nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})"""
_PYTHON_PIECE = re.compile(
    rf"""\s*(?:(?P<text>'[^'\\\n]*(?:{_ESCAPES}[^'\\\n]*)*'|"[^"\\\n]*(?:{_ESCAPES}[^"\\\n]*)*")"""
    r"""|(?P<word>True|False|None)\b|(?P<other>[\[\]{},:]|-?[0-9][0-9.eE+-]*))"""
)
_ESCAPE = re.compile(_ESCAPES)
_PLAIN_ESCAPES = {"\\\\": "\\", "\\'": "'", '\\"': '"', "\\n": "\n", "\\r": "\r", "\\t": "\t"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def parse_text(text: str, where: str) -> Any:
    """The value of text in a table: JSON, or Python's repr of lists, objects, texts, numbers, True, False and None.

    JSON text of such text is read as what it says. Raises RowFault if it is neither, such as numpy's repr, or nested
    too deep.
    """
    try:
        value = parse_json(text, where)
        is_text = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
        return parse_json(value, where) if is_text else value
    except RowFault:
        json_text = _json_of_python(text)
        if json_text is None:
            raise
        return parse_json(json_text, where)


def _json_of_python(text: str) -> str | None:
    """Python's repr as JSON text; None if it has something that JSON lacks. Texts side by side stay an error."""
    text, end = text.rstrip(), 0
    pieces: list[str] = []
    while end < len(text):
        piece = _PYTHON_PIECE.match(text, end)
        if piece is None:
            return None
        if (literal := piece["text"]) is not None:
            pieces.append(json.dumps(_ESCAPE.sub(_unescaped, literal[1:-1])))
        else:
            pieces.append(_PYTHON_WORDS.get(piece["word"]) or piece["other"])
        end = piece.end()
    return " ".join(pieces)


def _unescaped(escape: re.Match[str]) -> str:
    """The character of an escape in Python's repr of a text."""
    return _PLAIN_ESCAPES.get(escape[0]) or chr(int(escape[0][2:], 16))


def is_tools(value: Any) -> bool:
    """Whether a value, also as text, is a list of tools, as calls of functions name them."""
    if isinstance(value, str):
        value = list_or_nothing(value) if value.lstrip().startswith("[") else None
    return isinstance(value, list) and bool(value) and all(map(_is_tool, value))


def _is_tool(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    function = value.get("function")
    if isinstance(function, dict):
        return isinstance(function.get("name"), str)
    return isinstance(value.get("name"), str) and ("parameters" in value or "input_schema" in value)


# Turns that a table holds as text.

_LIST_OR_OBJECT = re.compile(r"""\s*"?\s*(?:\[\s*)?\{\s*\\?["']""")
"""The start of turns as text, or as JSON text of that text."""
_ROLE_KEY = re.compile(r"""["'](?:role|from)["']\s*:""")
_CONTENT_KEY = re.compile(r"""["'](?:content|value|tool_calls)["']\s*:""")
_TURN_KEYS = ("role", "from", "human")
"""A turn has one of these keys. To look for them is much faster than to parse JSON of something else."""
# As numpy and shortening printers write lists of turns too.
_TURNS_START = re.compile(
    r"""\s*(?:\w{1,16}\(\s*)?(?:\[\s*(?:\w{1,16}\(\s*)?(?:\[\s*)?)?\{\s*["'](?:role|from|content|value)["']\s*:"""
)
_TURNS_ENDS = ("]", "}", ")", "...")
_SINGLE_TURN_KEYS = {"role", "content", "from", "value", "name", "weight"}
"""Keys of an object that is one turn. An answer may be JSON of something else that has a role too."""


def is_turns(value: Any) -> bool:
    """Whether a value is a list of turns, in any form that `messages.parse_turns` reads, or a single turn."""
    if isinstance(value, dict):
        return _is_turn(value) and {key for key, item in value.items() if item is not None} <= _SINGLE_TURN_KEYS
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def with_turns(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with the turns of values that are text of turns, as in a CSV file."""
    found = {
        key: turns
        for key, value in row.items()
        if isinstance(value, str) and (turns := _turns_of_text(value)) is not None
    }
    return {**row, **found} if found else row


def refuse_unread_turns(row: Mapping[str, Any], keys: Container[str]) -> None:
    """Raise RowFault for a value under one of `keys` that is text of turns which cannot be read, such as numpy's."""
    for key, value in row.items():
        if key in keys and isinstance(value, str) and _seem_turns(value):
            raise RowFault(
                f"{key!r} seems to be a list of turns as text, and is neither JSON nor Python: {show(value)}; save the "
                "rows as Parquet or JSON lines (DataFrame.to_json(path, orient='records', lines=True)), or put text "
                "that shall be trained as it is into a turn of data.format=messages"
            )


def _turns_of_text(text: str) -> Any:
    """The turns, or the single turn, that a text says; None if it says something else."""
    if not _LIST_OR_OBJECT.match(text) or not any(key in text for key in _TURN_KEYS):
        return None
    try:
        value = parse_text(text, "")
    except RowFault:
        return None
    return value if is_turns(value) else None


def _seem_turns(text: str) -> bool:
    """Whether a text may be one of turns that cannot be read."""
    if not _TURNS_START.match(text) or not text.rstrip().endswith(_TURNS_ENDS):
        return False
    if not (_ROLE_KEY.search(text) and _CONTENT_KEY.search(text)):
        return False
    try:
        parse_text(text, "")
    except RowFault:
        return True
    return False


def _is_turn(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("role"), str):
        return any(key in value for key in ("content", "tool_calls", "function_call"))
    return (isinstance(value.get("from"), str) and "value" in value) or ("human" in value and "assistant" in value)
