"""Small copies of a row's images, inside the page."""

import base64
from collections.abc import Sequence
from io import BytesIO

from PIL import Image

from cuda_memory.page.html import Html, html, joined
from lean_finetune.data.images.image_files import ImageFiles

EDGE_PIXELS = 200
"""Longest edge of a thumbnail."""
MOST = 4
"""Most thumbnails of a row: with ten rows they take less than 2 MB."""
QUALITY = 75


def thumbnails(files: ImageFiles, hashes: Sequence[bytes]) -> Html:
    """The first `MOST` images of a row, and how many more it has; empty for a row of text.

    Raises UserError if an image's file is missing or damaged.
    """
    if not hashes:
        return Html("")
    shown = [_thumbnail(files.open(one)) for one in hashes[:MOST]]
    more = [html("<span>and {} more</span>", len(hashes) - MOST)] if len(hashes) > MOST else []
    return html('<p class="images">{}</p>', joined([*shown, *more], "\n"))


def _thumbnail(image: Image.Image) -> Html:
    """An image of at most `EDGE_PIXELS`, with its own size in words."""
    size = f"{image.width} x {image.height} pixels"
    small = image.copy()
    small.thumbnail((EDGE_PIXELS, EDGE_PIXELS))
    content = BytesIO()
    small.save(content, "JPEG", quality=QUALITY)
    data = base64.b64encode(content.getvalue()).decode()
    return html('<img src="data:image/jpeg;base64,{}" alt="{}" title="{}">', data, size, size)
