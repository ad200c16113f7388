"""Marks in published rows of the turns that are trained: keys of a turn, and a column with a number for each turn."""

import re
from typing import Any

from cuda_memory.units import counted
from lean_finetune.data.format.example import Message, RowFault
from lean_finetune.data.format.row_values import is_given, list_or_nothing, show

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
