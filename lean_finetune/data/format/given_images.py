"""Images as rows give them, of which other modules of formats know only that they are no text."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

IMAGE = "\ufdd6"
"""The character in a message's text where an image stands: a noncharacter, which Unicode reserves for internal use."""
IMAGE_COLUMNS = ("images", "image")
"""Columns of a row's images. data.columns can name another one for the first."""
IMAGE_PARTS = ("image", "image_url", "input_image")
"""Types of content parts with an image."""
OTHER_PARTS = (
    *(start + kind for start in ("", "input_") for kind in ("image", "audio", "video", "file")),
    *("image_url", "audio_url", "video_url"),
)
"""Types of all content parts that are no text."""


@dataclass(frozen=True, kw_only=True)
class GivenImage:
    """An image as its row gives it: by its path, or as its content. Nothing was read or decoded."""

    path: str | None
    """Absolute, or relative to the directory of the row's file. Beside `data` it is only a name."""
    data: bytes | None

    def key(self) -> str:
        """The hash of the content, or else the path."""
        return self.path or "" if self.data is None else f"sha256:{hashlib.sha256(self.data).hexdigest()}"


@dataclass(frozen=True, kw_only=True)
class ImageContent:
    """A content part with an image, or with the place of one; `row_images` reads it."""

    where: str
    """The message, for faults."""
    part: dict[str, Any]


def keys_of(images: Sequence[GivenImage]) -> dict[str, list[str]]:
    """What of a row's images belongs to the key of its prompt."""
    return {"images": [image.key() for image in images]}


def with_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the contents that have images as lists of parts, as templates take them."""
    if not any([IMAGE in message["content"] for message in messages]):  # A list comprehension: every row comes here.
        return messages
    return [
        {**message, "content": content_parts(message["content"])} if IMAGE in message["content"] else message
        for message in messages
    ]


def content_parts(text: str) -> list[dict[str, str]]:
    """A text with places of images as parts: one of text if it has none."""
    first, *others = text.split(IMAGE)
    parts: list[dict[str, str]] = [{"type": "text", "text": first}]
    for other in others:
        parts += [{"type": "image"}, {"type": "text", "text": other}]
    return [part for part in parts if part.get("text") != ""] if others else parts
