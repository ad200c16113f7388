"""Tags and columns by which rows name images, video, audio and boxes, beside `<image>` and the column `images`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cuda_memory.units import counted
from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.given_images import GivenImage
from lean_finetune.data.format.row_values import list_or_nothing

TAG = "<image>"
"""Text of a message where an image of the row's column stands (LLaMA-Factory, ms-swift)."""
PATH_TAG = re.compile("<img>([^<>]+)</img>")
"""A tag around the path of its image (Qwen-VL, ms-swift)."""

_STARTS, _ENDS = r"<\|(?:vision_start|begin_of_image|IMAGE_START)\|>", r"<\|(?:vision_end|end_of_image|IMAGE_END)\|>"
_TOKEN = r"<\|(?:image(?:_pad)?|IMAGE_PLACEHOLDER)\|>"
# Tags of other tools, and what chat templates write for an image. The number says which of the row's images it is.
_OTHER_TAG = re.compile(
    r"<\|?(?:image|img)[ _-]?(?P<number>\d{1,4})\|?>|<(?:Image|IMAGE|IMG|image_placeholder|img_placeholder)>"
    r"|(?:<Img>)?<ImageHere>(?:</Img>)?"
    rf"|\[IMG\]|(?P<token>{_STARTS}(?:{_TOKEN})*{_ENDS}|{_TOKEN}|<start_of_image>|<image_soft_token>|<IMG_CONTEXT>)"
)
_WRAPPED_TAG = re.compile(f"(?:<im_start>|<[Ii]mg>|{_STARTS}){TAG}(?:<im_end>|</[Ii]mg>|{_ENDS})")
"""`TAG` between tokens that a chat template writes around an image."""
_BARE_TAG = "<img>"
"""Also an element of HTML: only beside images it may be one."""
# What ms-swift replaces by video, audio, and boxes of the column `objects`.
_FILLED_TAG = re.compile(r"<(?P<name>video|audio|bbox|ref-object)>|<\|?(?:video|audio)[ _-]?\d{1,4}\|?>")


class Tagged(NamedTuple):
    """Texts with `TAG` in place of other tags, and the images for those places."""

    texts: list[str]
    images: list[GivenImage]


def where_text(tag: str) -> str:
    """How to train a tag as text, for faults."""
    return f"where {tag} is text, name 'images' in data.ignore_columns: no row then has images"


def refuse_filled_tags(text: str, where: str) -> None:
    """Raise RowFault for a tag of something else than an image. HTML closes its elements `video` and `audio`."""
    for tag in _FILLED_TAG.finditer(text) if "<" in text else ():
        if tag["name"] is None or f"</{tag['name']}>" not in text:
            raise RowFault(
                f"{where} has {tag[0]}, which other tools replace by video, audio or a box; only text and images can "
                f"be trained: write boxes in the model's own form, or remove the row; {where_text(tag[0])}"
            )


def unwrapped(text: str) -> str:
    """The text without the tokens around each `TAG`."""
    return _WRAPPED_TAG.sub(TAG, text) if f"{TAG}<" in text else text


def first_tag(text: str) -> str | None:
    """The first tag that names an image; None without one."""
    if TAG in text:
        return TAG
    tag = PATH_TAG.search(text) or next((tag for tag in _other_tags(text) if not tag["token"]), None)
    return None if tag is None else tag[0]


def with_places(texts: Sequence[str], images: Sequence[GivenImage], *, has_own: bool) -> Tagged:
    """The texts with `TAG` for other tags, and the images of the row's column in the order of these places.

    `has_own`: whether the row has `TAG` or another place of an image too. A template's own token is text then, and in
    a row without images, as every control token of a row. Raises RowFault where it is not clear which image stands
    where.
    """
    by_token = bool(images) and not has_own
    tags = [tag for text in texts for tag in _other_tags(text) if by_token or not tag["token"]]
    if not tags:
        if images and not has_own and any(_BARE_TAG in text for text in texts):
            raise RowFault(
                f"the row has images, and {_BARE_TAG} in its text, which may be the place of one; write {TAG} where "
                "each stands"
            )
        return Tagged(list(texts), list(images))
    if not images:
        raise RowFault(
            f"the row has {tags[0][0]}, a place for an image, and no image in 'images'; add it, or map its column with "
            f"data.columns={{images: NAME}}; {where_text(tags[0][0])}"
        )
    ordered = None if has_own else _in_order(tags, list(images))
    if ordered is None:
        raise RowFault(
            f"it is not clear which image stands where: the row has {tags[0][0]}"
            f"{' beside other places' if has_own else ''}, and {counted(len(images), 'image')} in 'images'; write "
            f"{TAG} where each stands"
        )
    return Tagged([_OTHER_TAG.sub(TAG, text) if _other_tags(text) else text for text in texts], ordered)


def _other_tags(text: str) -> list[re.Match[str]]:
    """The tags of other tools in a text. A forum's [IMG] encloses an address."""
    may_have = "<" in text or "[IMG]" in text  # Much faster than the search for each tag.
    return list(_OTHER_TAG.finditer(text)) if may_have and "[/IMG]" not in text else []


def _in_order(tags: Sequence[re.Match[str]], images: list[GivenImage]) -> list[GivenImage] | None:
    """The images in the order of their tags: by their numbers, from 0 or 1, or all alike; None if it is not clear."""
    numbers = [int(tag["number"]) for tag in tags if tag["number"]]
    if not numbers:
        return images if len(tags) == len(images) and len({tag[0] for tag in tags}) == 1 else None
    first = min(numbers)
    if first > 1 or sorted(numbers) != list(range(first, first + len(images))) or len(numbers) != len(tags):
        return None
    return [images[number - first] for number in numbers]


# Columns that hold images, video or audio by other names.

_MEDIA_NAME = re.compile(
    r"(?:images?|imgs?|pictures?|photos?|videos?|audios?)(?:_?(?:path|file|filename|file_name|url|uri|bytes|base64|b64|"
    r"data|content)s?)?_?\d*",
    re.IGNORECASE,
)
_IMAGE_TEXT = re.compile(
    r"(?:data:image/|file:).*|[^\n<>]{1,4096}\.(?:png|jpe?g|webp|gif|bmp|tiff?)(?:\?[^\s]*)?", re.IGNORECASE | re.DOTALL
)


def names_media(key: str, value: Any) -> bool:
    """Whether a column has images, video or audio, by its name and because its value is no number."""
    return _MEDIA_NAME.fullmatch(key) is not None and not _is_number(value)


def is_image(value: Any) -> bool:
    """Whether a value is an image: bytes, an object with bytes, a path or URI of an image, or a list of these."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            value = list_or_nothing(value)
        else:
            return _IMAGE_TEXT.fullmatch(value) is not None
    if isinstance(value, list):
        return bool(value) and all(map(is_image, value))
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or is_image(value.get("path"))
    return isinstance(value, bytes)


def _is_number(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, bool | int | float) or (isinstance(one, str) and one.isdigit()) for one in values)
