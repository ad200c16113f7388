"""Pictures of a row: what the row says about each, and where they stand in its messages. No file is opened."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

from cuda_memory.units import counted
from lean_finetune.data.format.format_base import (
    PICTURE,
    PICTURE_COLUMNS,
    Conversation,
    Example,
    GivenPicture,
    Message,
    RowFault,
    SourceFormat,
    is_given,
    list_or_nothing,
    parts_of,
    show,
)
from lean_finetune.data.format.messages import not_text
from lean_finetune.data.format.unread_columns import IGNORE, media_fault
from lean_finetune.objectives.objective import RowKind

TAG = "<image>"
"""Text of a message where a picture of the row's column stands (LLaMA-Factory, ms-swift)."""
_PLACE = re.compile(f"{TAG}|{PICTURE}")
_VALUE_KEYS = ("image", "image_url", "bytes", "base64", "url", "path")
"""Keys of an object that hold its picture."""
_OTHER_KEYS = ("type", "detail", "mime_type")
"""Keys that change nothing here: a hosted model's choice of resolution, and the format, which the content shows too."""
_DATA_URI, _FILE_URI = "data:", "file:"
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_PATH_CHARACTERS = 4096


def with_pictures(example: Example, row: Mapping[str, Any], source: SourceFormat) -> Example:
    """The example with its pictures, and a `PICTURE` in its messages for each.

    Raises RowFault if the model takes no pictures and the row has some, or if its places and pictures differ in number.
    """
    if not source.pictures:
        _refuse_pictures(example, row, source)
        return example
    if isinstance(example, Conversation) and source.kind is RowKind.ANSWER:
        return placed(example, column_pictures(row))
    if any(one.picture_parts for one in parts_of(example) if isinstance(one, Conversation)) or column_pictures(row):
        if source.kind is RowKind.ANSWER:
            raise RowFault(
                "a row of plain text cannot have pictures; write it as a conversation, such as data.format=messages"
            )
        raise RowFault(
            f"train.objective trains {source.kind.text}, which cannot have images; set train.objective=sft, "
            "or remove the row"
        )
    return example


def _refuse_pictures(example: Example, row: Mapping[str, Any], source: SourceFormat) -> None:
    """Refuse the pictures of a row for a model of text. `unread_columns` judges columns that data.columns leaves."""
    for one in parts_of(example):
        for given in one.picture_parts if isinstance(one, Conversation) else ():
            raise RowFault(f"{given.where} {not_text(given.part)}; only text can be trained")
    key = PICTURE_COLUMNS[0]
    if key in source.columns and is_given(row.get(key)):
        raise RowFault(f"{media_fault(source.column(key))}; remove the row, or {IGNORE}")


def placed(example: Conversation, column: list[GivenPicture]) -> Conversation:
    """The conversation with the pictures of its parts and of its column in their places.

    A part with a picture has its own. Other places take those of the column in order. Without any place, the column's
    stand in front of the first question, as in ms-swift.
    """
    parts = example.picture_parts
    if _marks({"messages": example.messages, "tools": example.tools}) > len(parts):
        raise RowFault("the row has the character U+FDD6, which marks pictures here; remove it")
    messages = example.messages
    # Counting each is several times as fast as searching both.
    places = len(parts) + sum(message["content"].count(TAG) for message in messages)
    if not places:
        return replace(example, messages=in_front(messages, len(column)), pictures=tuple(column)) if column else example
    own = [_part_picture(one.part, one.where) for one in parts]
    wanted = places - sum(picture is not None for picture in own)
    if wanted != len(column):
        text_alone = (
            f"; where {TAG} is text, name {PICTURE_COLUMNS[0]!r} in data.ignore_columns: no row then has pictures"
        )
        remedy = "" if parts or column else text_alone
        raise RowFault(
            f"the row has {counted(wanted, 'place')} for pictures ({TAG}, or a content part without one) and "
            f"{counted(len(column), 'picture')} in {PICTURE_COLUMNS[0]!r}; give one picture for each place{remedy}"
        )
    pictures: list[GivenPicture] = []
    of_parts, of_column = iter(own), iter(column)

    def take(place: re.Match[str]) -> str:
        picture = next(of_parts) if place[0] == PICTURE else None
        pictures.append(next(of_column) if picture is None else picture)
        return PICTURE

    placed: list[Message] = []
    for number, message in enumerate(messages, start=1):
        text = _PLACE.sub(take, message["content"])
        if message["role"] == "assistant" and PICTURE in text:
            raise RowFault(
                f"message {number} is an answer with a picture ({TAG}, or a content part); the model writes text "
                "only: move the picture into the question, or remove the row"
            )
        placed.append({**message, "content": text})
    return replace(example, messages=placed, pictures=tuple(pictures), picture_parts=())


def in_front(messages: list[Message], pictures: int) -> list[Message]:
    """The messages with places for all pictures in front of the first question."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowFault(f"the row has pictures, no {TAG} in its text, and no question to put them in front of; add one")
    question = {**messages[first], "content": PICTURE * pictures + messages[first]["content"]}
    return [*messages[:first], question, *messages[first + 1 :]]


def _marks(value: Any) -> int:
    """How often `PICTURE` is in the strings and keys of a JSON value."""
    if isinstance(value, str):
        return value.count(PICTURE)
    if isinstance(value, dict):
        return sum(_marks(key) + _marks(item) for key, item in value.items())
    return sum(map(_marks, value)) if isinstance(value, list) else 0


# What a value says about its picture.


def column_pictures(row: Mapping[str, Any]) -> list[GivenPicture]:
    """The pictures of a row's columns, by the names of PICTURE_COLUMNS. Raises RowFault if one of them is unusable."""
    given = [key for key in PICTURE_COLUMNS if is_given(row.get(key))]
    if len(given) > 1:
        raise RowFault(f"{' and '.join(map(repr, given))} both have pictures; keep one of them")
    found: list[GivenPicture] = []
    for key in given:
        value = row[key]
        if isinstance(value, str) and value.lstrip().startswith("["):  # JSON text, as in a CSV file.
            value = list_or_nothing(value) or value
        if isinstance(value, list):
            found += [given_picture(one, f"{key!r} {number}") for number, one in enumerate(value, start=1)]
        else:
            found.append(given_picture(value, repr(key)))
    return found


def given_picture(value: Any, where: str) -> GivenPicture:
    """The picture of a path, a data: URI, bytes, or an object with one of them, such as {bytes, path}.

    Raises RowFault, naming `where`, if it is something else, or on the network.
    """
    if isinstance(value, dict):
        picture = _part_picture(value, where)
        if picture is not None:
            return picture
    elif isinstance(value, bytes):
        return GivenPicture(path=None, data=value)
    elif isinstance(value, str) and value:
        return _of_text(value, where)
    raise RowFault(f"{where} must be a picture's path or bytes, got {show(value)}; change it")


def _part_picture(part: Mapping[str, Any], where: str) -> GivenPicture | None:
    """The picture of an object; None if it has none. Raises RowFault if it has several, or an unknown key."""
    values = {key: value for key, value in part.items() if is_given(value)}
    if unknown := [key for key in values if key not in (*_VALUE_KEYS, *_OTHER_KEYS)]:
        raise RowFault(f"{where} has {unknown[0]!r} in a picture, which is not read; remove it")
    given = [key for key in _VALUE_KEYS if key in values]
    if given == ["bytes", "path"]:  # As `datasets` writes a picture: the path is only the name that it had.
        picture = _of_key("bytes", values["bytes"], where)
        return replace(picture, path=values["path"] if isinstance(values["path"], str) else None)
    if len(given) > 1:
        raise RowFault(f"{where} has {' and '.join(map(repr, given))} in a picture; keep one of them")
    return _of_key(given[0], values[given[0]], where) if given else None


def _of_key(key: str, value: Any, where: str) -> GivenPicture:
    """The picture of a value under one of _VALUE_KEYS."""
    if key == "bytes" and not isinstance(value, bytes):
        raise RowFault(f"{where}: 'bytes' of a picture must be bytes, got {show(value)}; write 'base64' or 'path'")
    if key in ("base64", "path", "url") and not isinstance(value, str):
        raise RowFault(f"{where}: {key!r} of a picture must be text, got {show(value)}; change it")
    if key == "base64" and not value.startswith(_DATA_URI):
        return GivenPicture(path=None, data=_decoded(value, where))
    return given_picture(value, where)


def _of_text(text: str, where: str) -> GivenPicture:
    """The picture of a path or a URI."""
    if text[: len(_DATA_URI)].lower() == _DATA_URI:
        head, comma, content = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RowFault(f"{where} must be a data: URI with base64, got {show(text)}; change it")
        return GivenPicture(path=None, data=_decoded(content, where))
    if text[: len(_FILE_URI)].lower() == _FILE_URI:
        text = _path_of_uri(text, where)
    elif _URL.match(text):
        raise RowFault(f"{where} is a URL, and pictures are not fetched: {show(text)}; download it and name the file")
    if len(text) > _PATH_CHARACTERS:
        raise RowFault(
            f"{where} is too long for a path ({len(text):,} characters); write base64 as data:image/png;base64,..."
        )
    return GivenPicture(path=text, data=None)


def _path_of_uri(uri: str, where: str) -> str:
    """The absolute path of a file: URI of this machine."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # A bracket without its pair, as of an IPv6 address.
        parts = None
    if parts is None or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise RowFault(f"{where} must name a file of this machine as file:///path, got {show(uri)}; change it")
    return unquote(parts.path)


def _decoded(text: str, where: str) -> bytes:
    """The bytes of base64, with or without line breaks."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowFault(f"{where} is not base64 ({error}); write the picture again") from None
