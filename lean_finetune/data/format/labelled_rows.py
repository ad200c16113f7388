"""Labelled rows: an answer in any format, and whether it is desirable."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import (
    PROMPT_ROLES,
    Conversation,
    Example,
    Labelled,
    PlainText,
    RowFormat,
)
from lean_finetune.data.format.row_values import show
from lean_finetune.objectives.row_kind import RowKind

_WORDS = {"true": True, "1": True, "false": False, "0": False}
"""Labels in tables of text, such as CSV files."""


def labelled(row: Mapping[str, Any], example: Example, row_format: RowFormat, kind: RowKind) -> Labelled:
    """The example of a row with its label.

    Raises RowFault if the label is none, or the row does not have a prompt and end with an answer that it can rate.
    """
    assert isinstance(example, Conversation | PlainText)
    desirable = _label(row, kind.labels)
    if isinstance(example, Conversation) and not row_format.divides_prompt:
        example = _last_answer(example)
    _refuse_without_prompt(example)
    return Labelled(answer=example, desirable=desirable)


def _label(row: Mapping[str, Any], columns: Sequence[str]) -> bool:
    """The row's label."""
    given = {key: row[key] for key in columns if row.get(key) is not None}
    if not given:
        names = " nor ".join(map(repr, columns))
        raise RowFault(f"the row has neither {names}; say whether its answer is good, or remove the row")
    found = {key: _truth(value) for key, value in given.items()}
    for key, truth in found.items():
        if truth is None:
            raise RowFault(f"{key!r} must be true or false, got {show(given[key])}; change it")
    if len(set(found.values())) > 1:
        raise RowFault(f"{' and '.join(map(repr, found))} differ; keep one of them")
    return bool(found.popitem()[1])


def _truth(value: Any) -> bool | None:
    """Whether a label means desirable; 0 and 1 too, as ms-swift reads them. None for anything else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int) and value in (0, 1) else None


def _refuse_without_prompt(example: Conversation | PlainText) -> None:
    """Refuse an answer to nothing: its label says how good it is as an answer to its prompt."""
    if isinstance(example, PlainText):
        asks = bool(example.prompt.strip())
    else:
        asks = any(message["role"] in PROMPT_ROLES for message in example.messages[: max(example.turns(), default=0)])
    if not asks:
        raise RowFault("a labelled row needs a prompt in front of its answer; add it, or remove the row")


def _last_answer(example: Conversation) -> Conversation:
    """The conversation with its last turn alone trained: the label rates that one."""
    last = len(example.messages) - 1
    if example.messages[last]["role"] != "assistant":
        raise RowFault("a labelled row must end with the assistant's answer, which its label rates; change it")
    earlier = (number for number in example.turns() if number != last)
    return replace(example, context=example.context | frozenset(earlier))
