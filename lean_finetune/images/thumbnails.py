"""Small copies of a row's images, inside a page."""

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from cuda_memory.page.html import Html, html, joined
from lean_finetune.images.image_files import ImageFiles

EDGE_PIXELS = 200
"""Longest edge of a thumbnail."""
MOST_THUMBNAILS = 4
"""Most thumbnails of a row: with ten rows they take less than 2 MB."""
JPEG_QUALITY = 75


def thumbnails(tokens: Path, hashes: Sequence[bytes]) -> Html:
    """The first `MOST_THUMBNAILS` images of a row, and how many more it has; empty for a row of text.

    `tokens` is the directory with the images.

    Raises UserError if an image's file is missing or damaged.
    """
    if not hashes:
        return Html("")
    files = ImageFiles(tokens)
    shown = [_thumbnail(files.open(one)) for one in hashes[:MOST_THUMBNAILS]]
    more = [html("<span>and {} more</span>", len(hashes) - MOST_THUMBNAILS)] if len(hashes) > MOST_THUMBNAILS else []
    return html('<p class="images">{}</p>', joined([*shown, *more], "\n"))


def _thumbnail(image: Image.Image) -> Html:
    """An image of at most `EDGE_PIXELS`, with its own size in words."""
    size = f"{image.width} x {image.height} pixels"
    small = image.copy()
    small.thumbnail((EDGE_PIXELS, EDGE_PIXELS))
    content = BytesIO()
    small.save(content, "JPEG", quality=JPEG_QUALITY)
    data = base64.b64encode(content.getvalue()).decode()
    return html('<img src="data:image/jpeg;base64,{}" alt="{}" title="{}">', data, size, size)
