"""Images of a row: what the row says about each, and where they stand in its messages. No file is opened."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

from cuda_memory.units import counted
from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, Example, Message, PlainText, SourceFormat, parts_of
from lean_finetune.data.format.given_images import IMAGE, IMAGE_COLUMNS, GivenImage, ImageContent
from lean_finetune.data.format.image_tags import (
    PATH_TAG,
    TAG,
    first_tag,
    refuse_filled_tags,
    unwrapped,
    where_text,
    with_places,
)
from lean_finetune.data.format.messages import not_text
from lean_finetune.data.format.row_values import is_given, parse_text, show
from lean_finetune.data.format.unread_columns import IGNORE, media_fault

_PLACE = re.compile(f"{TAG}|{IMAGE}|{PATH_TAG.pattern}")
_VALUE_KEYS = ("image", "image_url", "bytes", "base64", "url", "path", "value")
"""Keys of an object that hold its image."""
_INDEX = "index"
"""Key of a part without an image of its own: which image of the column it shows, from 0."""
_OTHER_KEYS = ("type", "detail", "mime_type")
"""Keys that change nothing here: a hosted model's choice of resolution, and the format, which the content shows too."""
_DATA_URI, _FILE_URI = "data:", "file:"
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_PATH_CHARACTERS = 4096
_TEXT_IN_TABLE = re.compile(r"""\s*(?:\[\s*["'{]|\{|\[\s*\]\s*\Z)""")
"""The start of a list or an object as a CSV file holds it. A path may begin with a bracket."""


def with_images(example: Example, row: Mapping[str, Any], source: SourceFormat) -> Example:
    """The example with its images, and an `IMAGE` in its messages for each.

    Raises RowFault if the model takes no images and the row has some, or if its places and images differ in number.
    """
    if not source.takes_others:
        _refuse_images(example, row, source)
        return example
    if isinstance(example, Conversation) and not source.kind.compared:
        return placed(example, column_images(row))
    texts = [text for one in parts_of(example) for text in _texts(one)]
    tag = next(filter(None, map(first_tag, texts)), None)
    has_images = any(_parts(one) for one in parts_of(example)) or column_images(row)
    if tag or has_images:
        text_alone = f"; {where_text(tag)}" if tag and not has_images else ""
        if not source.kind.compared:
            raise RowFault(
                "a row of plain text cannot have images; write it as a conversation, such as data.format=messages"
                f"{text_alone}"
            )
        raise RowFault(
            f"train.objective trains {source.kind.text}, which cannot have images; set train.objective=sft, or remove "
            f"the row{text_alone}"
        )
    for text in texts:
        refuse_filled_tags(text, "the row")
    return example


def _parts(example: Conversation | PlainText) -> tuple[ImageContent, ...]:
    return example.other_parts if isinstance(example, Conversation) else ()


def _texts(example: Conversation | PlainText) -> list[str]:
    if isinstance(example, PlainText):
        return [example.prompt, example.completion]
    return [message["content"] for message in example.messages]


def _refuse_images(example: Example, row: Mapping[str, Any], source: SourceFormat) -> None:
    """Refuse the images of a row for a model of text. `unread_columns` judges columns that data.columns leaves."""
    for one in parts_of(example):
        for given in _parts(one):
            raise RowFault(f"{given.where} {not_text(given.part)}; only text can be trained")
    key = IMAGE_COLUMNS[0]
    if key in source.columns and is_given(row.get(key)):
        raise RowFault(f"{media_fault(source.column(key))}; remove the row, or {IGNORE}")


def placed(example: Conversation, column: list[GivenImage]) -> Conversation:
    """The conversation with the images of its parts and of its column in their places.

    A part with an image, and a tag around a path, have their own. Other places take those of the column in order.
    Without any place, the column's stand in front of the first question, as in ms-swift.
    """
    parts = example.other_parts
    if _marks({"messages": example.messages, "tools": example.tools}) > len(parts):
        raise RowFault("the row has the character U+FDD6, which marks images here; remove it")
    messages = example.messages
    for number, message in enumerate(messages, start=1):
        refuse_filled_tags(message["content"], f"message {number}")
    texts = [unwrapped(message["content"]) for message in messages]
    # Counting each is several times as fast as searching both.
    tags = sum(text.count(TAG) for text in texts)
    paths = sum(len(PATH_TAG.findall(text)) for text in texts if "<img>" in text)
    texts, column = with_places(texts, column, has_own=bool(parts or tags or paths))
    places = len(parts) + paths + sum(text.count(TAG) for text in texts)
    if not places:
        return replace(example, messages=in_front(messages, len(column)), others=tuple(column)) if column else example
    own = [_part_image(one.part, one.where) for one in parts]
    wanted = places - paths - sum(image is not None for image in own)
    if wanted != len(column):
        remedy = "" if parts or column else f"; {where_text(TAG)}"
        raise RowFault(
            f"the row has {counted(wanted, 'place')} for images ({TAG}, or a content part without one) and "
            f"{counted(len(column), 'image')} in {IMAGE_COLUMNS[0]!r}; give one image for each place{remedy}"
        )
    return _filled(example, texts, own, _by_index(example, own, column))


def _filled(
    example: Conversation, texts: list[str], own: list[GivenImage | None], column: list[GivenImage]
) -> Conversation:
    """The conversation with `texts`, in which each place has its image: its own, or the next one of the column."""
    images: list[GivenImage] = []
    of_parts, of_column = iter(own), iter(column)

    def take(place: re.Match[str]) -> str:
        image: GivenImage | None = None
        if place[1] is not None:
            image = _of_text(place[1].strip(), "<img>")
        elif place[0] == IMAGE:
            image = next(of_parts)
        images.append(next(of_column) if image is None else image)
        return IMAGE

    placed: list[Message] = []
    for number, (message, given) in enumerate(zip(example.messages, texts, strict=True), start=1):
        text = _PLACE.sub(take, given)
        if message["role"] == "assistant" and IMAGE in text:
            raise RowFault(
                f"message {number} is an answer with an image ({TAG}, another tag, or a content part); the model "
                "writes text only: move the image into the question, or remove the row"
            )
        placed.append({**message, "content": text})
    return replace(example, messages=placed, others=tuple(images), other_parts=())


def _by_index(example: Conversation, own: list[GivenImage | None], column: list[GivenImage]) -> list[GivenImage]:
    """The column's images in the order of their places, which content parts may give by number, from 0."""
    bare = [one for one, image in zip(example.other_parts, own, strict=True) if image is None]
    numbers = [one.part.get(_INDEX) for one in bare]
    if not any(number is not None for number in numbers):
        return column
    if len(bare) != len(column) or sorted(map(str, numbers)) != sorted(map(str, range(len(column)))):
        raise RowFault(
            f"{bare[0].where}: {_INDEX!r} of content parts must name each image of {IMAGE_COLUMNS[0]!r} once, from 0; "
            f"got {show(numbers)} for {counted(len(column), 'image')}; change it"
        )
    return [column[int(number)] for number in numbers if number is not None]


def in_front(messages: list[Message], images: int) -> list[Message]:
    """The messages with places for all images in front of the first question."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowFault(f"the row has images, no {TAG} in its text, and no question to put them in front of; add one")
    question = {**messages[first], "content": IMAGE * images + messages[first]["content"]}
    return [*messages[:first], question, *messages[first + 1 :]]


def _marks(value: Any) -> int:
    """How often `IMAGE` is in the strings and keys of a JSON value."""
    if isinstance(value, str):
        return value.count(IMAGE)
    if isinstance(value, dict):
        return sum(_marks(key) + _marks(item) for key, item in value.items())
    return sum(map(_marks, value)) if isinstance(value, list) else 0


# What a value says about its image.


def column_images(row: Mapping[str, Any]) -> list[GivenImage]:
    """The images of a row's columns, by the names of IMAGE_COLUMNS. Raises RowFault if one of them is unusable."""
    given = [key for key in IMAGE_COLUMNS if is_given(row.get(key))]
    if len(given) > 1:
        raise RowFault(f"{' and '.join(map(repr, given))} both have images; keep one of them")
    found: list[GivenImage] = []
    for key in given:
        value = row[key]
        if isinstance(value, str) and _TEXT_IN_TABLE.match(value):
            value = _value_of(value, repr(key))
        if isinstance(value, list):
            found += [given_image(one, f"{key!r} {number}") for number, one in enumerate(value, start=1)]
        else:
            found.append(given_image(value, repr(key)))
    return found


def _value_of(text: str, where: str) -> Any:
    """The list or object that a table has as text. Raises RowFault for bytes and numpy's text, which keep no images."""
    try:
        return parse_text(text, where)
    except RowFault:
        raise RowFault(
            f"{where} is text of a list or an object that cannot be read: {show(text)}; save the rows as Parquet, "
            "which keeps bytes, or name the files of images as JSON"
        ) from None


def given_image(value: Any, where: str) -> GivenImage:
    """The image of a path, a data: URI, bytes, or an object with one of them, such as {bytes, path}.

    Raises RowFault, naming `where`, if it is something else, or on the network.
    """
    if isinstance(value, dict):
        image = _part_image(value, where)
        if image is not None:
            return image
    elif isinstance(value, bytes):
        return GivenImage(path=None, data=value)
    elif isinstance(value, str) and value:
        return _of_text(value, where)
    raise RowFault(f"{where} must be an image's path or bytes, got {show(value)}; change it")


def _part_image(part: Mapping[str, Any], where: str) -> GivenImage | None:
    """The image of an object; None if it has none. Raises RowFault if it has several, or an unknown key."""
    values = {key: value for key, value in part.items() if is_given(value)}
    given = [key for key in _VALUE_KEYS if key in values]
    known = (*_VALUE_KEYS, *_OTHER_KEYS) if given else (*_OTHER_KEYS, _INDEX)
    if unknown := [key for key in values if key not in known]:
        raise RowFault(f"{where} has {unknown[0]!r} in an image, which is not read; remove it")
    if given == ["bytes", "path"]:  # As `datasets` writes an image: the path is only the name that it had.
        image = _of_key("bytes", values["bytes"], where)
        return replace(image, path=values["path"] if isinstance(values["path"], str) else None)
    if len(given) > 1:
        raise RowFault(f"{where} has {' and '.join(map(repr, given))} in an image; keep one of them")
    return _of_key(given[0], values[given[0]], where) if given else None


def _of_key(key: str, value: Any, where: str) -> GivenImage:
    """The image of a value under one of _VALUE_KEYS."""
    if key == "bytes" and not isinstance(value, bytes):
        raise RowFault(f"{where}: 'bytes' of an image must be bytes, got {show(value)}; write 'base64' or 'path'")
    if key in ("base64", "path", "url") and not isinstance(value, str):
        raise RowFault(f"{where}: {key!r} of an image must be text, got {show(value)}; change it")
    if key == "base64" and not value.startswith(_DATA_URI):
        return GivenImage(path=None, data=_decoded(value, where))
    return given_image(value, where)


def _of_text(text: str, where: str) -> GivenImage:
    """The image of a path or a URI."""
    if text[: len(_DATA_URI)].lower() == _DATA_URI:
        head, comma, content = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RowFault(f"{where} must be a data: URI with base64, got {show(text)}; change it")
        return GivenImage(path=None, data=_decoded(content, where))
    if text[: len(_FILE_URI)].lower() == _FILE_URI:
        text = _path_of_uri(text, where)
    elif _URL.match(text):
        raise RowFault(f"{where} is a URL, and images are not fetched: {show(text)}; download it and name the file")
    if len(text) > _PATH_CHARACTERS:
        raise RowFault(
            f"{where} is too long for a path ({len(text):,} characters); write base64 as data:image/png;base64,..."
        )
    return GivenImage(path=text, data=None)


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
        raise RowFault(f"{where} is not base64 ({error}); write the image again") from None
