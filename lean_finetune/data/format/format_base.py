"""What all row formats share: examples, and the interface of a format."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import orjson

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.given_images import IMAGE, IMAGE_COLUMNS, GivenImage, ImageContent, keys_of
from lean_finetune.data.format.row_values import show, with_turns
from lean_finetune.data.format.usual_columns import suggested_columns, suggested_pair_columns, usual_columns
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_ROLES = ("user", "tool")
"""Roles that an assistant's turn answers."""

Message = dict[str, Any]


class EmptyAnswer(RowFault):
    """A trained turn is empty, so the model would learn only to end it."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row for the chat template. Every assistant turn that is not in `context` is trained."""

    messages: list[Message]
    """Each with a known `role` and text in `content`, with an `IMAGE` where something else than text stands."""
    tools: list[Any] | None
    context: frozenset[int] = frozenset()
    """Indices in `messages` of assistant turns that are shown but not trained (weight 0, or part of a prompt)."""
    others: tuple[GivenImage, ...] = ()
    """What is no text, in the order of its places in all messages."""
    other_parts: tuple[ImageContent, ...] = ()
    """The content parts that `parse_row` turns into `others`; empty in what it returns."""

    def trained_turns(self) -> list[int]:
        """Indices in `messages` of the turns that are trained."""
        return [n for n in self.turns() if n not in self.context]

    def turns(self) -> list[int]:
        """Indices in `messages` of the assistant's turns."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt_key(self) -> bytes:
        """Everything before the first answer to a question: conversations that begin alike have equal keys.

        A greeting before the first question belongs to the key. Without any question the key is the whole row. What
        these messages have beside text belongs to it too.
        """
        roles = [message["role"] for message in self.messages]
        question = next((n for n, role in enumerate(roles) if role in PROMPT_ROLES), len(roles))
        first = next((n for n in self.turns() if n > question), None)
        key = {"messages": self.messages[:first], "tools": self.tools}
        if self.others:
            shown = sum(message["content"].count(IMAGE) for message in self.messages[:first])
            key |= keys_of(self.others[:shown])
        return canonical(key)

    def has_empty_answer(self) -> bool:
        """Whether a trained turn has neither text, nor tool calls, nor another value that a template may show."""
        return any(_is_empty(self.messages[n]) for n in self.trained_turns())


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A row without a chat template: `completion` and the end-of-sequence token are trained."""

    prompt: str
    completion: str

    def prompt_key(self) -> bytes:
        """The prompt, or the text where there is none."""
        return canonical({"prompt": self.prompt} if self.prompt else {"text": self.completion})

    def has_empty_answer(self) -> bool:
        """Whether there is no text to train."""
        return not self.completion.strip()


class Compared(ABC):
    """Answers that an objective compares: one row of a source, whose rows of tokens stay together."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Conversation | PlainText, ...]:
        """What it is tokenized as, at least one; all have the same prompt."""

    def prompt_key(self) -> bytes:
        """The key of the prompt."""
        return self.parts[0].prompt_key()

    def has_empty_answer(self) -> bool:
        """Whether one of the answers is empty."""
        return any(part.has_empty_answer() for part in self.parts)

    def check_last_turns(self) -> None:  # noqa: B027  # The usual one has one answer.
        """Refuse answers of which the last turns alone are trained, if other turns before these differ."""


Example = Conversation | PlainText | Compared


def parts_of(example: Example) -> tuple[Conversation | PlainText, ...]:
    """What a row is tokenized as."""
    return example.parts if isinstance(example, Compared) else (example,)


def is_heldout(example: Example, fraction: float, seed: int) -> bool:
    """Whether the hash of `seed` and the prompt key falls into the held-out fraction.

    Rows with equal prompts are on the same side, and adding rows moves no other row.
    """
    digest = hashlib.blake2b(example.prompt_key(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def canonical(value: Any) -> bytes:
    """A JSON value as bytes that do not depend on the order of keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # orjson refuses lone surrogates, integers past 64 bits, and what Parquet has and JSON lacks (bytes, decimals).
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _is_empty(message: Message) -> bool:
    content = message["content"]
    if content and not content.isspace():
        return False
    return not any(value for key, value in message.items() if key not in ("role", "name", "content"))


# Base class of row formats, the registry of formats, and the detection of a row's format.

AUTO = "auto"
LABELS = tuple(name for kind in KINDS.values() for name in kind.labels)
"""Columns that rate an answer."""
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
    question_key: ClassVar[str | None] = None
    """Key whose text is the whole question where it has a value: a column `input` may then be a part of it."""
    kind: ClassVar[RowKind] = RowKind.ANSWER
    """What a row is. One with a label has a format of answers (`RATINGS`)."""
    divides_prompt: ClassVar[bool] = False
    """Whether its keys divide the prompt from the answer. Else the answer that a label rates is the last turn."""

    @abstractmethod
    def parse(self, row: Mapping[str, Any]) -> Example:
        """The example of a row that has the required keys.

        Raises RowFault if a value has the wrong type, or there is nothing to train on.
        """

    def suits(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
        """Whether detection may choose the format for a row with the required keys; `columns` maps keys to columns."""
        return True

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


Rate = Callable[[Mapping[str, Any], Conversation | PlainText, RowFormat], Compared]
"""Of a row, its answer and the format of that to the answer with its label. Raises RowFault without one."""
RATINGS: dict[str, Rate] = {}
"""By name of a kind of rows with labels."""


def rates(kind: RowKind) -> Callable[[Rate], Rate]:
    """Decorator of a function: make it known as that of a kind of rows."""

    def register_rate(rate: Rate) -> Rate:
        RATINGS[kind.name] = rate
        return rate

    return register_rate


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
    kind: RowKind = RowKind.ANSWER
    """What its rows are for the objective."""
    takes_others: bool = False
    """Whether the model takes more than text. If not, rows with more are refused."""
    scored: bool = False
    """Whether the objective trains a reward model."""
    carried: tuple[str, ...] = ()
    """Keys of what its rows carry besides text, in `columns` (`RowColumns.keys`)."""

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
        others = IMAGE_COLUMNS if self.takes_others else ()
        return frozenset(map(self.column, (*self.row_format.keys, *self.kind.labels, *others, *self.carried)))


def formats_of(kind: RowKind) -> dict[str, RowFormat]:
    """The formats of a kind of rows by name."""
    if kind.labels:
        return {name: one for name, one in formats_of(RowKind.ANSWER).items() if one.has_answer}
    return {name: row_format for name, row_format in FORMATS.items() if row_format.kind == kind}


def detect_format(
    row: Mapping[str, Any],
    columns: Mapping[str, str],
    kind: RowKind = RowKind.ANSWER,
    carried: Collection[str] = (),
) -> tuple[str, str]:
    """The first format whose required keys the row has, and the reason; `columns` maps keys to columns.

    `carried` are keys of what rows carry besides text.

    The format is one of rows of this kind. A format whose keys all have values comes before
    one with nulls: in Parquet and Arrow every row has every column. Raises RowFault if the row has no known format.
    Raises UserError if `columns` has a key that no format has, or that the detected format does not have.
    """
    suitable, row = formats_of(kind), with_turns(row)
    check_columns(columns, AUTO, kind, carried)
    is_pair = kind.unit == 1 and any(key in row for key in PREFERENCE_KEYS)
    if kind.labels and not is_pair and not any(columns.get(key, key) in row for key in kind.labels):
        wanted = " or ".join(map(repr, kind.labels))
        raise RowFault(
            f"train.objective={kind.objective} needs {wanted}, true or false; the row has {show(list(row))}; add it, "
            "name its column in data.columns, or set train.objective=sft"
        )
    if found := _suiting(_filled(row), columns, kind) or _suiting(row, columns, kind):
        check_columns(columns, found.name, kind, carried)
        names = [columns.get(key, key) for key in found.required]
        return found.name, f"the first row has {' and '.join(names)}"
    if is_pair:
        raise RowFault(f"a preference pair ({show(list(row))}); {preference_remedy(row)}")
    if kind.unit > 1 and any(all(key in row for key in one.required) for one in formats_of(RowKind.ANSWER).values()):
        rating = (one.objective for one in KINDS.values() if one.labels)
        others = "".join(f", or {objective} if a label rates the answer" for objective in rating)
        raise RowFault(
            f"a row of one answer ({show(list(row))}), and train.objective trains preference pairs; set "
            f"train.objective=sft{others}"
        )
    listed = "; ".join(f"{name}: {', '.join(row_format.required)}" for name, row_format in suitable.items())
    suggested = suggested_pair_columns(row) if kind.unit > 1 else suggested_columns(row)
    raise RowFault(
        f"data.format auto knows no format with the keys {show(list(row))}; name them, as in {suggested}, or rename "
        f"them, as one of ({listed})"
    )


def complete_columns(
    row: Mapping[str, Any], columns: Mapping[str, str], kind: RowKind = RowKind.ANSWER
) -> Mapping[str, str]:
    """data.columns with those of a question and an answer under usual names, where no format has the row's names."""
    row = with_turns(row)
    is_pair = kind.unit > 1 or any(key in row for key in PREFERENCE_KEYS)
    if is_pair or _suiting(_filled(row), columns, kind):
        return columns
    return {**columns, **usual_columns(row, columns)}


def _suiting(row: Mapping[str, Any], columns: Mapping[str, str], kind: RowKind) -> RowFormat | None:
    """The first format whose required keys the row has; None without one."""
    for row_format in formats_of(kind).values():
        names = [columns.get(key, key) for key in row_format.required]
        if all(name in row for name in names) and row_format.suits(row, columns):
            return row_format
    return None


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def preference_remedy(row: Mapping[str, Any]) -> str:
    """How to train on a preference pair, or on its better answer."""
    return f"set train.objective=dpo, or another objective of pairs; {_remedy_of_better(row)}"


def _remedy_of_better(row: Mapping[str, Any]) -> str:
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


def check_columns(
    columns: Iterable[str], name: str, kind: RowKind = RowKind.ANSWER, carried: Collection[str] = ()
) -> None:
    """Refuse keys of data.columns that format `name` does not have, or no format for `auto`: they have no effect.

    `carried` are keys of what rows carry besides text.

    Raises UserError, naming the key and the keys of the format.
    """
    known = frozenset().union(*(one.keys for one in FORMATS.values())) if name == AUTO else FORMATS[name].keys
    known |= {*kind.labels, *carried}
    if not kind.compared:
        known |= {IMAGE_COLUMNS[0]}
    if unknown := [key for key in columns if key not in known]:
        raise UserError(
            f"data.columns: rows of data.format {name} have no key {show(unknown[0])}; the keys to give a column for "
            f"are {', '.join(sorted(known))}"
        )


def check_kind(name: str, kind: RowKind) -> None:
    """Raise UserError for a format of other rows than the objective trains."""
    suitable = formats_of(kind)
    if name in suitable:
        return
    raise UserError(
        f"data.format: train.objective trains {kind.text}; got {name}; use {' or '.join(suitable)}, or "
        f"train.objective={FORMATS[name].kind.objective}"
    )
