"""What a row says beside its text: marks of turns that are not trained, and columns that nobody reads."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from cuda_memory.units import counted
from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import LABELS, PREFERENCE_KEYS, Message, SourceFormat, preference_remedy
from lean_finetune.data.format.given_images import IMAGE_COLUMNS
from lean_finetune.data.format.image_tags import is_image, names_media
from lean_finetune.data.format.row_values import is_given, is_tools, list_or_nothing, show
from lean_finetune.islands.objectives.registry import KINDS

LOSS_MASK = "loss_mask"
"""Column with 1 for each turn that is trained and 0 for every other."""
# 1 or true: the turn is trained (OpenAI, Axolotl, ms-swift, LLaMA-Factory). torchtune's `masked` is the opposite.
TRAINED_KEYS = ("weight", "loss_weight", "loss_scale", "train", "training", "trainable", "loss", LOSS_MASK)
MASKED_KEYS = ("masked",)
# Which characters of a turn are trained (Axolotl).
DETAIL_KEYS = ("train_detail", "training_detail", "reasoning_training_detail")
# Words in the names of other marks, such as `mask`: in some tools a mask of 1 is trained, in others it is not.
_MARK_WORDS = re.compile(
    r"(?:^|[^a-z])(?:masks?|masked|loss|losses|train|trained|training|trainable|weights?)(?:$|[^a-z])"
)
_WORD_STARTS = re.compile("(?<=[a-z])(?=[A-Z])")
_SWITCH_TEXT = "(?:[01](?:[.]0?)?|[Tt]rue|[Ff]alse)"
_SWITCHES = re.compile(rf"\s*\[\s*{_SWITCH_TEXT}(?:[\s,]+{_SWITCH_TEXT})*[\s,]*\]\s*")
# In tables of text, such as CSV files, marks are words.
_NO_WORDS, _YES_WORDS = ("0", "0.0", "false", "no"), ("1", "1.0", "true", "yes")


def pop_marks(message: Message, role: str, where: str) -> bool:
    """Remove the keys that say whether a message is trained; return whether it is an untrained assistant turn.

    Raises RowFault if they differ, request to train another role's turn, or their meaning is unknown.
    """
    for key in DETAIL_KEYS:
        if is_given(message.pop(key, None)):
            raise RowFault(
                f"{where}: {key} selects parts of a turn, but only complete turns can be trained; remove the row"
            )
    given = {key: message.pop(key) for key in (*TRAINED_KEYS, *MASKED_KEYS) if key in message}
    for key, value in message.items():
        if looks_like_mark(key, value):
            raise RowFault(
                f"{where}: {key}={show(value)} may mean that the turn is trained, or that it is not; rename the key "
                "'train' where true means trained, or remove it"
            )
    is_answer = role == "assistant"
    trained = set()
    for key, value in given.items():
        is_trained = _switch(value)
        if is_trained is not None and key in MASKED_KEYS:
            is_trained = not is_trained
        if is_trained is None or (is_trained and not is_answer):
            off = "1 or true" if key in MASKED_KEYS else "0 or false"
            rule = "0, 1, false or true" if is_answer else off
            raise RowFault(
                f"{where}: {key} must be {rule} in a message of role {role}, got {show(value)}; change or remove it"
            )
        trained.add(is_trained)
    if len(trained) > 1:
        raise RowFault(f"{where}: {' and '.join(given)} differ; keep one of them")
    return is_answer and False in trained


def untrained_by_mask(mask: list[Any], messages: list[Message], context: frozenset[int]) -> frozenset[int]:
    """The indices of assistant turns that are not trained, by a row's loss_mask and by marks of turns (`context`).

    Raises RowFault if the mask does not have 0 or 1 for each turn, or requests what its turn excludes.
    """
    if len(mask) != len(messages):
        raise RowFault(
            f"{LOSS_MASK!r} has {counted(len(mask), 'number')} for {counted(len(messages), 'turn')}; give one for each"
        )
    found = set(context)
    for number, (value, message) in enumerate(zip(mask, messages, strict=True)):
        is_trained, is_answer = _switch(value), message["role"] == "assistant"
        if is_trained is None or (is_trained and not is_answer):
            rule = "0 or 1" if is_answer else f"0 for a message of role {message['role']}"
            raise RowFault(f"{LOSS_MASK!r}: number {number + 1} must be {rule}, got {show(value)}; change it")
        if is_trained and number in context:
            raise RowFault(f"{LOSS_MASK!r} trains turn {number + 1}, which is marked as not trained; keep one of them")
        if is_answer and not is_trained:
            found.add(number)
    return frozenset(found)


def looks_like_mark(key: str, value: Any) -> bool:
    """Whether an unknown key of a turn may say whether the turn is trained, such as `mask`."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(map(_may_mark, values)) and _names_mark(key)


def looks_like_loss_mask(key: str, value: Any) -> bool:
    """Whether an unread column, also as JSON text, may say for each turn whether it is trained."""
    if isinstance(value, str) and value.lstrip().startswith("[") and _names_mark(key):
        if _SWITCHES.fullmatch(value):  # As JSON, Python or numpy writes it.
            return True
        value = list_or_nothing(value)
    return type(value) is list and bool(value) and all(_switch(one) is not None for one in value) and _names_mark(key)


def row_mark(value: Any) -> bool | None:
    """Whether a mark of a complete row means yes, also as a word; None where it is no mark."""
    if not isinstance(value, str):
        return _switch(value)
    word = value.strip().lower()
    return word in _YES_WORDS if word in (*_YES_WORDS, *_NO_WORDS) else None


def _may_mark(value: Any) -> bool:
    return isinstance(value, bool | int | float) or row_mark(value) is not None


def _names_mark(key: str) -> bool:
    return _MARK_WORDS.search(_WORD_STARTS.sub("_", key).lower()) is not None


def _switch(value: Any) -> bool | None:
    """Whether a value means yes: true, false, 1 or 0. None for any other."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


# Columns that a row's format does not read. A column that changes the row's meaning is refused, others are listed.

MEDIA = ("image", "images", "video", "videos", "audio", "audios")
NUMBER_LABELS = {"0": "false", "0.0": "false", "1": "true", "1.0": "true"}
ROW_WEIGHTS = ("weight", "loss_weight", "sample_weight")
# Whether the row is trained. A list, with a number for each turn, may have any name that `looks_like_loss_mask`.
ROW_MARKS = ("mask", "masked", "loss_mask", "loss", "train", "training", "trainable")
# Columns that other formats or other tools read as part of the question, and the remedy.
QUESTION_COLUMNS = {
    "system_prompt": "name it as data.columns={system: system_prompt}",
    "system_message": "name it as data.columns={system: system_message}",
    "history": "put its turns into the conversation, or read the row as data.format=alpaca",
    "context": "put it into the question",
    "input": "put it into the question",
    "chat_template_kwargs": "remove it, and set its values in a chat template file named by data.chat_template",
}
MEANINGFUL = frozenset((*MEDIA, *PREFERENCE_KEYS, *LABELS, *ROW_WEIGHTS, *ROW_MARKS, *QUESTION_COLUMNS, "margin"))
"""Columns that change what a row means, unless its format reads them. Others are found by their names and values."""
MARGIN = "margin"
"""Column by how much the chosen answer of a pair is better, which a loss of reward models may subtract (TRL)."""

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
        _refuse_other_media(key, row, source)
        if "tools" in source.row_format.keys and is_tools(row[key]) and not is_given(row.get(source.column("tools"))):
            raise RowFault(f"{key!r} has tools, and is not read; name it as data.columns={{tools: {key}}}, or {IGNORE}")
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
    if key == MARGIN:
        if source.scored and _number(value) != 0.0:
            raise RowFault(
                f"{key!r} is {show(value)}, and the loss of train.objective=reward has no margin of a pair; {IGNORE}"
            )
        return False
    if key in MEDIA:
        raise RowFault(f"{media_fault(key, source.takes_others)}; remove the row, or {IGNORE}")
    if key in PREFERENCE_KEYS:
        if any(column in PREFERENCE_KEYS for column in source.columns.values()):
            return False
        raise RowFault(f"{key!r} makes the row a preference pair; {preference_remedy(row)}, or {IGNORE}")
    if key in ROW_WEIGHTS:
        if _number(value) not in (None, 1.0):
            raise RowFault(
                f"{key!r} is {show(value)}, and is not read; {_remedy_of_weight(key, source)}, give the row's source a "
                f"weight (data.source), or {IGNORE}"
            )
        return _number(value) is not None
    if key in ROW_MARKS:
        return _is_trained(key, value)
    row_format = source.row_format
    if not row_format.has_answer:
        return False
    if kind := next((kind for kind in KINDS.values() if key in kind.labels), None):
        label = str(value).strip().lower()
        if key in kind.number_labels:
            label = NUMBER_LABELS.get(label, label)
        if label == "false":
            raise RowFault(
                f"{key!r} is false: the answer is one to avoid; set train.objective={kind.objective} to learn from it, "
                f"remove the row (data.on_bad_row=skip leaves all such rows out), or {IGNORE}"
            )
        return label == "true"
    if key == "input" and not is_given(row.get(source.column(row_format.question_key or ""))):
        return False
    raise RowFault(f"{key!r} is part of the question, and is not read; {_remedy(key, row, source)}, or {IGNORE}")


def _remedy_of_weight(key: str, source: SourceFormat) -> str:
    """How to read the weight of a row, or to do without."""
    if source.kind.compared:
        return f"train.objective trains {source.kind.text}, whose loss has no weights: remove it"
    return f"name it as data.columns={{weight: {key}}} to multiply the row's loss"


def _remedy(key: str, row: Mapping[str, Any], source: SourceFormat) -> str:
    """How to read a column of the question."""
    other = source.row_format.context_key
    if key == "context" and other is not None and not is_given(row.get(source.column(other))):
        return f"name it as data.columns={{{other}: context}}"
    return QUESTION_COLUMNS[key]


def _refuse_other_media(key: str, row: Mapping[str, Any], source: SourceFormat) -> None:
    """Refuse a column with images, video or audio by another name than those of MEDIA.

    For a model that takes images, any column with an image is one, unless the row has its images elsewhere.
    """
    if key in MEDIA or not (names_media(key, row[key]) or (source.takes_others and is_image(row[key]))):
        return
    if not source.takes_others:
        raise RowFault(f"{media_fault(key)}; remove the row, or {IGNORE}")
    if any(is_given(row.get(source.column(name))) for name in IMAGE_COLUMNS):
        return
    raise RowFault(
        f"{key!r} seems to hold an image, and is not read; name it as data.columns={{images: {key}}}, put the images "
        f"of several columns into one list 'images', or {IGNORE}"
    )


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


def media_fault(key: str, images: bool = False) -> str:
    """The fault of a row with images, video or audio; `images`: whether the model takes images."""
    return f"{key!r} holds images, video or audio; only text{' and images' if images else ''} can be trained"


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
