"""Values inside a row: read with care, and shown short in a fault."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from lean_finetune.data.format.example import RowFault

SHOWN_CHARACTERS = 80


def show(value: Any) -> str:
    """A value for a message, cut to stay readable."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def text_of(row: Mapping[str, Any], key: str) -> str:
    """A text value.

    Raises:
        RowFault: it is something else.
    """
    value = row[key]
    if not isinstance(value, str):
        raise RowFault(f"{key!r} must be text, got {show(value)}; change it")
    return value


def text_or_nothing(row: Mapping[str, Any], key: str) -> str:
    """A text value; an absent or null one is empty.

    Raises:
        RowFault: it is something else.
    """
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowFault(f"{key!r} must be text, got {show(value)}; change it")
    return value


def list_of(row: Mapping[str, Any], key: str) -> list[Any]:
    """A list value, or a text that holds one as JSON (as in a CSV file); an absent, null or blank one is empty.

    Raises:
        RowFault: it is something else.
    """
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json_of(value, key) if value.strip() else None
        except RowFault:
            raise RowFault(f"{key!r} must be a list, or JSON text of one, got {show(value)}; change it") from None
    if value is not None and not isinstance(value, list):
        raise RowFault(f"{key!r} must be a list, got {show(value)}; change it")
    return value or []


def json_of(text: str, where: str) -> Any:
    """The value of JSON text inside a row.

    Raises:
        RowFault: it is not JSON.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:  # the standard parser takes NaN and escapes of lone surrogates, which the guard replaces
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        raise RowFault(f"{where} must be JSON, got {show(text)}; mend it") from None


def without_nulls(value: Any) -> Any:
    """A JSON value without the keys that are null: column formats fill absent keys with null, so null means absent.

    So a row gives the same tokens from JSON Lines and from Parquet.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
