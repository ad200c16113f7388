"""Columns that a row's format does not read. A column that changes the row's meaning is refused, others are listed."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from lean_finetune.data.format.example import RowFault
from lean_finetune.data.format.format_base import PREFERENCE_KEYS, SourceFormat, preference_remedy
from lean_finetune.data.format.row_values import is_given, show
from lean_finetune.data.format.turn_marks import LOSS_MASK, looks_like_loss_mask, row_mark

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# False: the answer is a bad example (TRL's and LLaMA-Factory's names for KTO). A number under `label` is a class.
KTO_LABELS = ("label", "kto_tag")
KTO_TAG_NUMBERS = {"0": "false", "0.0": "false", "1": "true", "1.0": "true"}
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
# Whether the row is trained. A list, with a number for each turn, may have any name that `looks_like_loss_mask`.
ROW_MARKS = ("mask", "masked", "loss_mask", "loss", "train", "training", "trainable")
# Columns that other formats or other tools read as part of the question, and the remedy.
QUESTION_COLUMNS = {
    "system_prompt": "name it as data.columns={system: system_prompt}",
    "system_message": "name it as data.columns={system: system_message}",
    "history": "put its turns into the conversation, or read the row as data.format=alpaca",
    "context": "name it as data.columns={input: context}",
    "chat_template_kwargs": "remove it, and set its values in a chat template file named by data.chat_template",
}
MEANINGFUL = frozenset((*MEDIA, *PREFERENCE_KEYS, *KTO_LABELS, *ROW_WEIGHTS, *ROW_MARKS, *QUESTION_COLUMNS))
"""Columns that change what a row means, unless its format reads them."""

IGNORE = "name it in data.ignore_columns to leave it unread"


def unread_columns(row: Mapping[str, Any], source: SourceFormat) -> list[str]:
    """The columns with a value that the format does not read.

    Raises RowFault if one of them changes what the row means.
    """
    read = source.columns_read
    if row.keys() <= read:
        return []
    unread = [key for key, value in row.items() if key not in read and is_given(value)]
    for key in unread:
        if looks_like_loss_mask(key, row[key]):
            remedy = f"name it as data.columns={{{LOSS_MASK}: {key}}} where 1 means trained"
            if LOSS_MASK not in source.row_format.keys:
                remedy = f"write the row as data.format=messages, which has {LOSS_MASK!r}"
            rule = "may say for each turn whether it is trained, and is not read"
            raise RowFault(f"{key!r} {rule}; {remedy}, or {IGNORE}")
    return [key for key in unread if key not in MEANINGFUL or not _agrees(key, row, source)]


def _agrees(key: str, row: Mapping[str, Any], source: SourceFormat) -> bool:
    """Return whether a column requests what training does by default, such as weight 1; False for unknown columns."""
    value = row[key]
    if key in MEDIA:
        raise RowFault(f"{media_fault(key)}; remove the row, or {IGNORE}")
    if key in PREFERENCE_KEYS:
        if any(column in PREFERENCE_KEYS for column in source.columns.values()):
            return False
        raise RowFault(f"{key!r} makes the row a preference pair; {preference_remedy(row)}, or {IGNORE}")
    if key in ROW_WEIGHTS:
        if _number(value) not in (None, 1.0):
            raise RowFault(
                f"{key!r} is {show(value)}, but a row is trained with weight 1 or not at all; remove the row, give its "
                f"source a weight (data.source), or {IGNORE}"
            )
        return _number(value) is not None
    if key in ROW_MARKS:
        return _is_trained(key, value)
    row_format = source.row_format
    if not row_format.has_answer:
        return False
    if key in KTO_LABELS:
        label = str(value).strip().lower()
        if key == "kto_tag":
            label = KTO_TAG_NUMBERS.get(label, label)
        if label == "false":
            raise RowFault(
                f"{key!r} is false: the answer is one to avoid; remove the row (data.on_bad_row=skip leaves all such "
                f"rows out), or {IGNORE}"
            )
        return label == "true"
    if key == "context":
        other = row_format.context_key
        if other is None or is_given(row.get(source.column(other))):
            return False
    raise RowFault(f"{key!r} is part of the question, and is not read; {QUESTION_COLUMNS[key]}, or {IGNORE}")


def _is_trained(key: str, value: Any) -> bool:
    """Whether a mark of a complete row requests training; False where the value is no mark.

    Raises RowFault if the row shall not be trained, or the mark's meaning is unknown.
    """
    if (mark := row_mark(value)) is None:
        return False
    if key == "mask":
        raise RowFault(f"{key!r} is {show(value)}, which may mean trained or not trained; remove the row, or {IGNORE}")
    if mark == (key == "masked"):
        raise RowFault(f"{key!r} is {show(value)}: the row is marked as not trained; remove it, or {IGNORE}")
    return True


def media_fault(key: str) -> str:
    """The fault of a row with images, video or audio."""
    return f"{key!r} holds images, video or audio; only text can be trained"


def refuse_media(turn: Mapping[str, Any], where: str) -> None:
    """Refuse a message with images, video or audio. Raises RowFault, naming the key."""
    for key in MEDIA:
        if is_given(turn.get(key)):
            raise RowFault(f"{where}: {media_fault(key)}; remove the row")


def _number(value: Any) -> float | None:
    """A number, also given as text as in a CSV file; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None
    except OverflowError:  # An integer of hundreds of digits.
        return math.inf


def without(row: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """The row without these columns."""
    return {key: value for key, value in row.items() if key not in columns} if columns else row
