"""Images of rows in report.html."""

import base64
import hashlib
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from PIL.ExifTags import Base

from lean_finetune.images.image_files import FORMATS, IMAGES, ImageFiles, image_file
from lean_finetune.images.thumbnails import EDGE_PIXELS, MOST_THUMBNAILS, thumbnails
from stages.report import main
from tests.report.conftest import GENERATION, write_inputs
from tests.workspace import error, invoke

SECRET = b"taken at home, 52.5163 N"


def stored(tokens: Path, image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The hash of an image that is stored beside tokens."""
    content = BytesIO()
    image.save(content, form, **options)
    digest = hashlib.sha256(content.getvalue()).digest()
    path = image_file(tokens / IMAGES, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.getvalue())
    return digest


def shown(page: str) -> list[Image.Image]:
    """The thumbnails in a page."""
    found = re.findall(r'<img src="data:image/jpeg;base64,([^"]*)"', page)
    return [Image.open(BytesIO(base64.b64decode(data))) for data in found]


def with_texts(form: str) -> dict[str, Any]:
    """Options that put `SECRET` into every place that a format has for text, into the comment 65,000 bytes of it."""
    long, exif, texts = (SECRET * 2800)[:65_000], Image.Exif(), PngImagePlugin.PngInfo()
    exif[Base.ImageDescription] = SECRET.decode()
    for key, compressed in (("Comment", False), ("Author", True)):
        texts.add_text(key, long.decode(), zip=compressed)
        texts.add_itxt(key, long.decode(), zip=compressed)
    everywhere: dict[str, Any] = {"exif": exif, "icc_profile": SECRET, "xmp": SECRET}
    return {
        "JPEG": {**everywhere, "comment": long},
        "PNG": {"exif": exif, "icc_profile": SECRET, "pnginfo": texts},
        "WEBP": everywhere,
        "GIF": {"comment": long},
        "BMP": {"dpi": (321, 321)},
    }[form]


@pytest.mark.parametrize("form", FORMATS)
def test_a_thumbnail_has_pixels_alone(tmp_path: Path, form: str):
    """The report ended in a traceback after all training for a long comment, and a short one was in report.html."""
    digest = stored(tmp_path, Image.new("RGB", (40, 30), (255, 0, 0)), form, **with_texts(form))
    assert SECRET in image_file(tmp_path / IMAGES, digest).read_bytes() or form == "BMP"
    assert ImageFiles(tmp_path).open(digest).info == {}
    html = thumbnails(tmp_path, [digest])
    [thumbnail] = shown(html)
    [content] = re.findall(r"base64,([^\"]*)", html)
    assert thumbnail.size == (40, 30) and thumbnail.info.keys() <= {"jfif", "jfif_version", "jfif_unit", "jfif_density"}
    assert SECRET[:9] not in base64.b64decode(content) and thumbnail.info["jfif_density"] == (1, 1)


def test_answers_about_images_show_them(place: Path):
    """A page that names an image without showing it, or shows it in full size."""
    wide = stored(place / "data/tokens", Image.new("RGB", (800, 200), (255, 0, 0)))
    small = stored(place / "data/tokens", Image.new("RGB", (28, 56), (0, 0, 255)))
    write_inputs(place, [{**GENERATION, "images": [wide.hex(), small.hex()]}, {**GENERATION, "family": "text"}])
    assert invoke(main).exit_code == 0
    page = (place / "data/report/report.html").read_text()
    first, second = shown(page)
    assert (first.size, second.size) == ((EDGE_PIXELS, EDGE_PIXELS // 4), (28, 56))
    assert first.getpixel((9, 9))[0] > 240 > 20 > first.getpixel((9, 9))[2] and second.getpixel((9, 9))[2] > 240  # type: ignore[index]
    assert 'alt="800 x 200 pixels"' in page and page.count('class="images"') == 1
    image_file(place / "data/tokens" / IMAGES, small).unlink()
    assert "cannot be read" in error(invoke(main))


def test_the_largest_samples_are_below_two_megabytes(tmp_path: Path):
    """A report that a mail server refuses: noise is what compresses least."""
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    hashes = [stored(tmp_path, Image.fromarray(noise))] * 7
    html = thumbnails(tmp_path, hashes)
    assert len(shown(html)) == MOST_THUMBNAILS and "and 3 more" in html
    assert 10 * len(html) < 2e6
