"""The images of data/tokens: their files, named by the hash of their content, and their pixels."""

import hashlib
import warnings
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from lean_finetune.config.field_types import MAX_PIXELS
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.core.regular_files import NotRegular, read_regular

IMAGES = "images"
"""The directory of the images in data/tokens."""
IMAGE_HASHES = "images"
"""Column of the shards: the sha256 of each image of a row."""
IMAGE_SIZES, PATCHES, FRAMES = "image_sizes", "patches", "frames"
"""Columns of the index: height and width in pixels of each image of a row, one after the other; patches of all; the
largest height and width of its processed images, if those of a batch are padded to the largest, else nothing."""
LIMITS = ("image_max_pixels", "image_min_pixels")
"""Metadata of the index: the limits with which images are resized, as in section `data`."""


def image_file(root: Path, digest: bytes) -> Path:
    """The file of an image below `root`."""
    name = digest.hex()
    return root / name[:2] / name


def regular_content(path: Path, most: int = -1) -> bytes | None:
    """The content of a file, up to `most` bytes of it; None if it is no regular file. Raises OSError."""
    try:
        return read_regular(path, most)
    except NotRegular:
        return None


class ImageFiles:
    """The images of published tokens."""

    def __init__(self, tokens: Path):
        """`tokens` is the directory data/tokens."""
        self._root = tokens / IMAGES

    def open(self, digest: bytes) -> Image.Image:
        """An image in RGB. Raises UserError if its file is missing, damaged or no regular one."""
        path = image_file(self._root, digest)
        try:
            data = regular_content(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {self._remedy}") from None
        if data is None:
            raise UserError(f"{path}: is no regular file; {self._remedy}")
        if hashlib.sha256(data).digest() != digest:
            raise UserError(f"{path}: its content is another one than its name says; {self._remedy}")
        return decode_image(data, path.name)

    @cached_property
    def _remedy(self) -> str:
        return f"delete {self._root.parent} and run `dvc repro`"


# The pixels of an image, as every model gets them: upright, in RGB, with white where it is transparent.

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are decoded. Pillow has more: EPS runs Ghostscript, and libtiff prints its faults past Python."""
BAND_PIXELS = 1 << 20
"""Pixels that are blended at a time, so that blending needs little more memory."""
WHITE = (255, 255, 255, 255)

# Of damaged EXIF data, which `has_damaged_exif` finds: two lines on the terminal for each such image.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
# Pillow only warns from MAX_PIXELS to twice as many, and prints it.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


def decode_image(data: bytes, name: str) -> Image.Image:
    """The first frame of an image in mode RGB; `name` is for faults.

    The orientation of its EXIF data is applied. Transparent pixels are blended with white, as transformers and Qwen's
    code do. Channels of 16 bits keep the upper 8. The result is pixels alone, without the comments,
    EXIF data, profiles and texts of the file, so that what saves it again, such as a thumbnail, has none of them.

    Raises RowFault if the content is no image of FORMATS, is damaged or truncated, or has more than MAX_PIXELS,
    which its header tells before anything is decoded. Decoding so many takes 720 MB, which is less than the rows of a
    block may take: Pillow has 4 bytes a pixel, and turning needs a copy.
    """
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise RowFault(_too_large(name))
            ImageOps.exif_transpose(image, in_place=True)
            pixels = _to_rgb(image)
            pixels.info = {}
            return pixels
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RowFault(_too_large(name)) from None
    except UnidentifiedImageError:
        raise RowFault(f"image {name} {_start(data)}; convert it to one of {', '.join(FORMATS)}") from None
    except RowFault:
        raise
    except MemoryError:
        raise RowFault(f"image {name} needs more memory than decoding it may take; make it smaller") from None
    # Each decoder has its own exceptions for hostile bytes: OSError, SyntaxError, ValueError, struct.error, and others.
    except Exception as error:
        raise RowFault(f"image {name} is damaged or truncated ({error}); write or download it again") from error


def has_damaged_exif(data: bytes) -> bool:
    """Whether the EXIF data of an image cannot be read in full: its orientation may be lost."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                image.getexif()
        except Exception:  # As many kinds as in `decode_image`, which refuses what it cannot decode.
            return True
    return bool(found)


def _too_large(name: str) -> str:
    return f"image {name} has more than {MAX_PIXELS:,} pixels, so it is not decoded; make it smaller"


def _start(data: bytes) -> str:
    """What content that no decoder knows is."""
    if not data:
        return "is empty"
    return f"is damaged, or of no format that is decoded (it starts with {data[:16]!r})"


def _to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image in mode RGB."""
    if image.mode.startswith("I;16"):
        # Pillow keeps the upper 8 bits of 16-bit colour; of 16-bit grey, it would clip.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    return _on_white(image) if image.has_transparency_data else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """An image with transparency in mode RGB, blended with white to the same values as transformers' code gives."""
    width, height = image.size
    opaque, rows = Image.new("RGB", image.size), max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height))).convert("RGBA")
        opaque.paste(Image.alpha_composite(Image.new("RGBA", band.size, WHITE), band).convert("RGB"), (0, top))
    return opaque
