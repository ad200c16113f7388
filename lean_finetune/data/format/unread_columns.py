"""Columns that a row's shape does not read: refused where they change what the row means, else named to the user."""

from collections.abc import Collection, Mapping
from typing import Any

from lean_finetune.data.format.example import RowFault
from lean_finetune.data.format.format_detection import PREFERENCE, columns_read, preference_remedy
from lean_finetune.data.format.row_values import show
from lean_finetune.data.format.token_settings import SourceShape

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# False: the answer is a bad example (TRL's and LLaMA-Factory's names for KTO). A number under `label` is a class.
VERDICTS = ("label", "kto_tag")
NUMBERS = {"0": "false", "0.0": "false", "1": "true", "1.0": "true"}
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
# What another shape reads, or other tools do, and this row's shape does not: the key to map it to, and the shape.
ELSEWHERE = {
    "system_prompt": "name it as data.columns={system: system_prompt}",
    "system_message": "name it as data.columns={system: system_message}",
    "history": "put its turns into the conversation, or read the row as data.format=alpaca",
    "context": "name it as data.columns={input: context}",
    "chat_template_kwargs": "remove it, and write what it sets into a template of your own (data.chat_template)",
}
MEANINGFUL = frozenset((*MEDIA, *PREFERENCE, *VERDICTS, *ROW_WEIGHTS, *ELSEWHERE))
"""Columns that change what a row means, unless its shape reads them."""

IGNORE = "name it in data.ignore_columns to leave it unread"
_BLANK_TEXTS = ("", "[]", "null")


def is_given(value: Any) -> bool:
    """Whether a value says anything: null, empty lists and blank text do not."""
    if isinstance(value, str):
        return value.strip() not in _BLANK_TEXTS
    return value is not None and value != [] and value != {}


def unread_columns(row: Mapping[str, Any], shape: SourceShape) -> list[str]:
    """The columns with a value that the shape does not read and that need not be refused.

    Raises:
        RowFault: one of them changes what the row means.
    """
    read = columns_read(shape)
    if row.keys() <= read:
        return []
    unread = [key for key, value in row.items() if key not in read and is_given(value)]
    return [key for key in unread if key not in MEANINGFUL or not _is_followed(key, row, shape)]


def _is_followed(key: str, row: Mapping[str, Any], shape: SourceShape) -> bool:
    """Whether the row can be trained as the column says; False where it says nothing of this shape.

    Raises:
        RowFault: it cannot.
    """
    value = row[key]
    if key in MEDIA:
        raise RowFault(f"{media_fault(key)}; remove the row, or {IGNORE}")
    if key in PREFERENCE:
        if any(column in PREFERENCE for column in shape.columns.values()):
            return False
        raise RowFault(f"{key!r} makes the row a preference pair; {preference_remedy(row)}, or {IGNORE}")
    if key in ROW_WEIGHTS:
        if _number(value) not in (None, 1.0):
            raise RowFault(
                f"{key!r} is {show(value)}, and a row is trained as it is or not at all; remove the row, give its "
                f"source a weight (data.source), or {IGNORE}"
            )
        return _number(value) is not None
    if shape.format == "text":  # Its text holds all that is trained; such columns are what it was made of.
        return False
    if key in VERDICTS:
        verdict = str(value).strip().lower()
        if key == "kto_tag":
            verdict = NUMBERS.get(verdict, verdict)
        if verdict == "false":
            raise RowFault(
                f"{key!r} is false: the answer is one to avoid; remove the row (data.on_bad_row=skip leaves all such "
                f"rows out), or {IGNORE}"
            )
        return verdict == "true"
    if key == "context" and (shape.format != "alpaca" or is_given(row.get(shape.columns.get("input", "input")))):
        return False
    raise RowFault(f"{key!r} belongs to what the answer answers, and is not read; {ELSEWHERE[key]}, or {IGNORE}")


def media_fault(key: str) -> str:
    """What is wrong with a row that also shows or plays something."""
    return f"{key!r} holds what only a model that sees or hears can read; text alone can be trained"


def refuse_media(turn: Mapping[str, Any], where: str) -> None:
    """Refuse a turn with pictures, sound or film beside its text.

    Raises:
        RowFault: naming the key.
    """
    for key in MEDIA:
        if is_given(turn.get(key)):
            raise RowFault(f"{where}: {media_fault(key)}; remove the row")


def _number(value: Any) -> float | None:
    """A number, also as text of a CSV file; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def without(row: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """The row without these columns."""
    return {key: value for key, value in row.items() if key not in columns} if columns else row
