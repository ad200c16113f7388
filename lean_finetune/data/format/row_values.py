"""Typed access to the values of a row, and their short form for messages."""

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from lean_finetune.data.format.example import RowFault
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

    Data sets write an absent image as {"bytes": null, "path": null}.
    """
    if isinstance(value, str):
        return value.strip() not in _BLANK_TEXTS
    if isinstance(value, list | dict):
        return any(map(is_given, value.values() if isinstance(value, dict) else value))
    return value is not None


def text_of(row: Mapping[str, Any], key: str) -> str:
    """A text value. Raises RowFault if it is not text."""
    value = row[key]
    if not isinstance(value, str):
        raise RowFault(f"{key!r} must be text, got {show(value)}; change it")
    return value


def text_or_nothing(row: Mapping[str, Any], key: str) -> str:
    """A text value; an absent or null one is empty. Raises RowFault if it is not text."""
    return "" if row.get(key) is None else text_of(row, key)


def list_of(row: Mapping[str, Any], key: str) -> list[Any]:
    """A list value, or its JSON text as in a CSV file. An absent, null or blank one is empty.

    Raises RowFault if it is something else.
    """
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = parse_json(value, key) if value.strip() else None
        except RowFault:
            raise RowFault(f"{key!r} must be a list, or JSON text of one, got {show(value)}; change it") from None
    if value is not None and not isinstance(value, list):
        raise RowFault(f"{key!r} must be a list, got {show(value)}; change it")
    return value or []


def list_or_nothing(text: str) -> list[Any]:
    """The list of JSON text; empty if it is something else."""
    try:
        value = parse_json(text, "")
    except RowFault:
        return []
    return value if isinstance(value, list) else []


def parse_json(text: str, where: str) -> Any:
    """The value of JSON text inside a row. Raises RowFault if it is not JSON, or nested too deep."""
    try:
        value = json.loads(text) if _MAYBE_LARGE.search(text) else orjson.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        try:  # The standard parser accepts NaN and lone surrogates, which ControlTokenGuard replaces.
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
