"""Shapes of rows: the keys each has, how `auto` tells them apart, and columns under other names."""

from collections.abc import Mapping
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.data.format.example import RowFault
from lean_finetune.data.format.row_values import show
from lean_finetune.data.format.token_settings import SourceShape

AUTO = "auto"
# The keys by which `auto` knows a shape, in the order in which it looks.
SHAPE_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
OPTIONAL_KEYS = {
    "messages": ("system", "tools", "functions", "family"),
    "sharegpt": ("system", "tools", "functions", "family"),
    "alpaca": ("input", "system", "history", "tools", "functions", "family"),
    "prompt_completion": ("system", "tools", "functions", "family"),
    "text": ("family",),
}
# A better and a worse answer to one question.
PREFERENCE = (
    "chosen",
    "rejected",
    "rejected_response",
    "rejected_messages",
    "preferred_output",
    "non_preferred_output",
)
_KEYS = {shape: frozenset((*keys, *OPTIONAL_KEYS[shape])) for shape, keys in SHAPE_KEYS.items()}


def detect_format(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, str]:
    """The first shape whose keys the row has under their names in `columns`, and the reason.

    A key with a value goes before one that is null, as rows of column formats have every key.

    Raises:
        RowFault: the row has no known shape.
        UserError: `columns` has a key that no shape has, or that the shape found has not.
    """
    if columns:
        _check_keys(columns, frozenset().union(*_KEYS.values()), AUTO)
    filled = {key: value for key, value in row.items() if value is not None}
    for present in (filled, row):
        for shape, keys in SHAPE_KEYS.items():
            names = [columns.get(key, key) for key in keys]
            if all(name in present for name in names):
                check_columns(shape, columns)
                return shape, f"the first row has {' and '.join(names)}"
    listed = "; ".join(f"{shape}: {', '.join(keys)}" for shape, keys in SHAPE_KEYS.items())
    if any(key in row for key in PREFERENCE):
        raise RowFault(
            f"a preference pair ({show(list(row))}), of which one answer can be trained; {preference_remedy(row)}"
        )
    raise RowFault(
        f"data.format auto knows no shape with the keys {show(list(row))}; name them in data.columns, or rename them, "
        f"as one of ({listed})"
    )


def preference_remedy(row: Mapping[str, Any]) -> str:
    """How to train on the better side of a preference pair."""
    chosen = row.get("chosen")
    if isinstance(chosen, str):
        key = "completion" if "prompt" in row else "output" if "instruction" in row else "text"
    elif isinstance(chosen, list):
        key = "completion" if isinstance(row.get("prompt"), list) else "messages"
    elif "chosen" in row or "preferred_output" in row:
        return "to train on its better answer, put that into the row's own turns"
    else:
        return "its other columns hold the better answer: name the worse ones in data.ignore_columns to train on that"
    return f"to train on its better answer set data.columns={{{key}: chosen}}"


def check_columns(shape: str, columns: Mapping[str, str]) -> None:
    """Refuse a column map for keys that rows of the shape do not have: it could take no effect.

    Raises:
        UserError: naming the key and those that are known.
    """
    _check_keys(columns, _KEYS[shape], shape)


def columns_read(shape: SourceShape) -> frozenset[str]:
    """The columns that rows of the shape are read from, by the source's own names."""
    keys = _KEYS[shape.format]
    return frozenset(shape.columns.get(key, key) for key in keys) if shape.columns else keys


def _check_keys(columns: Mapping[str, str], known: frozenset[str], shape: str) -> None:
    unknown = [key for key in columns if key not in known]
    if unknown:
        raise UserError(
            f"data.columns: rows of data.format {shape} have no key {show(unknown[0])}; the keys to give a column for "
            f"are {', '.join(sorted(known))}"
        )


def named_keys(row: Mapping[str, Any], shape: SourceShape) -> Mapping[str, Any]:
    """The row with its columns under the shape's own names.

    Raises:
        RowFault: the row lacks a column of the map, or a key that the shape needs.
    """
    if shape.columns:
        for key, column in shape.columns.items():
            if column not in row:
                raise RowFault(
                    f"the row has no column {show(column)}, which data.columns names for {key!r}; it has "
                    f"{show(list(row))}; change data.columns or add it"
                )
        # A column under another name is not read under its own as well.
        taken = set(shape.columns.values())
        others = {key: value for key, value in row.items() if key not in taken}
        row = others | {key: row[column] for key, column in shape.columns.items()}
    for key in SHAPE_KEYS[shape.format]:
        if key not in row:
            raise RowFault(
                f"a row of data.format {shape.format} needs {key!r}; this one has {show(list(row))}; add it, or name "
                "its column in data.columns"
            )
    return row
