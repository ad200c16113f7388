"""Base class of row formats, the registry of formats, and the detection of a row's format."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from lean_finetune.core.errors import UserError
from lean_finetune.data.format.example import Conversation, PlainText, RowFault
from lean_finetune.data.format.row_values import show

AUTO = "auto"
PREFERENCE_KEYS = (
    *("chosen", "rejected", "rejected_response", "chosen_messages", "rejected_messages"),
    *("preferred_output", "non_preferred_output"),
)
"""Columns of a better and a worse answer to one question."""


class RowFormat(ABC):
    """A format of rows, such as Alpaca's: its keys, and how a row becomes an example.

    To add a format, write a subclass in row_formats.py, decorate it with `register`, and add its name to
    `config.field_types.Format`.
    """

    name: ClassVar[str]
    """Value of data.format."""
    required: ClassVar[tuple[str, ...]]
    """Keys that every row has. `data.format: auto` recognises the format by them."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Keys that a row may have."""
    has_answer: ClassVar[bool] = True
    """Whether a row has an answer, which a column such as `label` can rate. False: its text is all there is."""
    context_key: ClassVar[str | None] = None
    """Key that the column `context` belongs to when this key has no value."""

    @abstractmethod
    def parse(self, row: Mapping[str, Any]) -> Conversation | PlainText:
        """The example of a row that has the required keys.

        Raises RowFault if a value has the wrong type, or there is nothing to train on.
        """

    @cached_property
    def keys(self) -> frozenset[str]:
        """All keys of the format, which data.columns can map to columns."""
        return frozenset((*self.required, *self.optional))

    def rename_columns(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
        """The row with its columns under the format's keys; `columns` maps a key to a column.

        Raises RowFault if the row lacks a mapped column or a required key.
        """
        if columns:
            for key, column in columns.items():
                if column not in row:
                    raise RowFault(
                        f"the row has no column {show(column)}, which data.columns names for {key!r}; it has "
                        f"{show(list(row))}; change data.columns or add it"
                    )
            # A mapped column is not also read under its own name.
            mapped = set(columns.values())
            others = {key: value for key, value in row.items() if key not in mapped}
            row = others | {key: row[column] for key, column in columns.items()}
        for key in self.required:
            if key not in row:
                raise RowFault(
                    f"a row of data.format {self.name} needs {key!r}; this one has {show(list(row))}; add it, or name "
                    "its column in data.columns"
                )
        return row


FORMATS: dict[str, RowFormat] = {}
"""Formats by name, in the order in which `detect_format` tries them."""


def register(row_format: type[RowFormat]) -> type[RowFormat]:
    """Class decorator: make a format known under its name."""
    FORMATS[row_format.name] = row_format()
    return row_format


@dataclass(frozen=True, kw_only=True)
class SourceFormat:
    """How the rows of one source are read."""

    format: str
    """Name of a registered format, never `auto`."""
    columns: Mapping[str, str]
    """Column of the source by key of the format; empty where the names are the same."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Known role by another name that the source has for it."""
    is_heldout: bool = False
    """Whether all its rows are held out."""

    @property
    def row_format(self) -> RowFormat:
        """The registered format."""
        return FORMATS[self.format]

    def column(self, key: str) -> str:
        """The source's name of a key."""
        return self.columns.get(key, key)

    @cached_property
    def columns_read(self) -> frozenset[str]:
        """All columns that the format reads, by the source's names."""
        return frozenset(map(self.column, self.row_format.keys))


def detect_format(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, str]:
    """The first format whose required keys the row has, and the reason; `columns` maps keys to columns.

    A format whose keys all have values comes before one with nulls: in Parquet and Arrow every row has every column.
    Raises RowFault if the row has no known format. Raises UserError if `columns` has a key that no format has, or that
    the detected format does not have.
    """
    check_columns(columns, AUTO)
    filled = {key: value for key, value in row.items() if value is not None}
    for present in (filled, row):
        for name, row_format in FORMATS.items():
            names = [columns.get(key, key) for key in row_format.required]
            if all(name in present for name in names):
                check_columns(columns, name)
                return name, f"the first row has {' and '.join(names)}"
    if any(key in row for key in PREFERENCE_KEYS):
        raise RowFault(
            f"a preference pair ({show(list(row))}), of which one answer can be trained; {preference_remedy(row)}"
        )
    listed = "; ".join(f"{name}: {', '.join(row_format.required)}" for name, row_format in FORMATS.items())
    raise RowFault(
        f"data.format auto knows no format with the keys {show(list(row))}; name them in data.columns, or rename them, "
        f"as one of ({listed})"
    )


def preference_remedy(row: Mapping[str, Any]) -> str:
    """How to train on the better answer of a preference pair."""
    chosen = row.get("chosen")
    if isinstance(chosen, str):
        key = "completion" if "prompt" in row else "output" if "instruction" in row else "text"
    elif isinstance(chosen, list):
        key = "completion" if isinstance(row.get("prompt"), list) else "messages"
    elif isinstance(row.get("chosen_messages"), list):
        return "to train on its better answer set data.columns={messages: chosen_messages}"
    elif "chosen" in row or "preferred_output" in row:
        return "to train on its better answer, put that into the row's own turns"
    else:
        return "its other columns hold the better answer: name the worse ones in data.ignore_columns to train on that"
    return f"to train on its better answer set data.columns={{{key}: chosen}}"


def check_columns(columns: Iterable[str], name: str) -> None:
    """Refuse keys of data.columns that format `name` does not have, or no format for `auto`: they have no effect.

    Raises UserError, naming the key and the keys of the format.
    """
    known = frozenset().union(*(one.keys for one in FORMATS.values())) if name == AUTO else FORMATS[name].keys
    if unknown := [key for key in columns if key not in known]:
        raise UserError(
            f"data.columns: rows of data.format {name} have no key {show(unknown[0])}; the keys to give a column for "
            f"are {', '.join(sorted(known))}"
        )
