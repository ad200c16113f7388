"""The images of tokens: one file each, named by the hash of its content."""

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lean_finetune.core.atomic_files import sync
from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import GivenImage, RowFault
from lean_finetune.data.images.decode_image import decode_image
from lean_finetune.data.images.families import Size
from lean_finetune.data.images.image_files import image_name, read_image
from lean_finetune.data.images.processor import ImageProcessor

IMAGES = "images"
"""The directory of the images in data/tokens."""


class StoredImage(NamedTuple):
    """An image in a store."""

    digest: bytes
    """sha256 of its content."""
    size: Size
    name: str
    """How messages call it."""


class ImageStore:
    """Reads the images of rows, and keeps the content of each once."""

    def __init__(self, root: Path | None, processor: ImageProcessor):
        """Keep the files below `root`, or none of them; `processor` must accept each image."""
        self._root, self.processor = root, processor
        self._sizes: dict[bytes, Size] = {}

    def add(self, given: GivenImage, directory: Path | None) -> StoredImage:
        """Store an image; `directory` is that of its row's file, None where the file is on the hub.

        Raises RowFault if it cannot be read or decoded, or the processor refuses it.
        """
        data = read_image(given, directory)
        digest, name = hashlib.sha256(data).digest(), image_name(given)
        if digest not in self._sizes:
            image = decode_image(data, name)
            size = Size(image.height, image.width)
            try:
                self.processor.expansion(size)
            except RowFault as fault:
                raise RowFault(f"image {name}: {fault}") from None
            if self._root is not None:
                self._write(self._root, digest, data)
            self._sizes[digest] = size
        return StoredImage(digest, self._sizes[digest], name)

    @staticmethod
    def _write(root: Path, digest: bytes, data: bytes) -> None:
        """Write an image's file in one step, unless it is there."""
        path = image_file(root, digest)
        if path.is_file() and path.stat().st_size == len(data):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(data)
        sync(aside)
        aside.replace(path)


def image_file(root: Path, digest: bytes) -> Path:
    """The file of an image below `root`."""
    name = digest.hex()
    return root / name[:2] / name


class ImageFiles:
    """The images of published tokens."""

    def __init__(self, tokens: Path):
        """`tokens` is the directory data/tokens."""
        self._root = tokens / IMAGES

    def open(self, digest: bytes) -> Image.Image:
        """An image in RGB. Raises UserError if its file is missing or damaged."""
        path = image_file(self._root, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {self._remedy}") from None
        if hashlib.sha256(data).digest() != digest:
            raise UserError(f"{path}: its content is another one than its name says; {self._remedy}")
        return decode_image(data, path.name)

    @cached_property
    def _remedy(self) -> str:
        return f"delete {self._root.parent} and run `dvc repro`"
