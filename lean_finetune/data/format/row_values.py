"""Typed access to the values of a row, and their short form for messages."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from lean_finetune.data.format.example import RowFault

SHOWN_CHARACTERS = 80
_BLANK_TEXTS = ("", "[]", "null")


def show(value: Any) -> str:
    """A value as JSON, shortened for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def is_given(value: Any) -> bool:
    """Whether a value is more than null, blank text or an empty list or object."""
    if isinstance(value, str):
        return value.strip() not in _BLANK_TEXTS
    return value is not None and value != [] and value != {}


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


def parse_json(text: str, where: str) -> Any:
    """The value of JSON text inside a row. Raises RowFault if it is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:  # The standard parser accepts NaN and lone surrogates, which ControlTokenGuard replaces.
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        raise RowFault(f"{where} must be JSON, got {show(text)}; change it") from None


def without_nulls(value: Any) -> Any:
    """A JSON value without keys that are null.

    Parquet and Arrow fill absent keys with null. Without them a row gives the same tokens in every file format.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
