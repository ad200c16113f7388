"""The pictures of tokens: one file each, named by the hash of its content."""

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from lean_finetune.core.atomic_files import sync
from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import GivenPicture, RowFault
from lean_finetune.data.pictures.decode_picture import decode_picture
from lean_finetune.data.pictures.families import Size
from lean_finetune.data.pictures.picture_files import picture_name, read_picture
from lean_finetune.data.pictures.processor import PictureProcessor

PICTURES = "pictures"
"""The directory of the pictures in data/tokens."""


class StoredPicture(NamedTuple):
    """A picture in a store."""

    digest: bytes
    """sha256 of its content."""
    size: Size
    name: str
    """How messages call it."""


class PictureStore:
    """Reads the pictures of rows, and keeps the content of each once."""

    def __init__(self, root: Path | None, processor: PictureProcessor):
        """Keep the files below `root`, or none of them; `processor` must accept each picture."""
        self._root, self.processor = root, processor
        self._sizes: dict[bytes, Size] = {}

    def add(self, given: GivenPicture, directory: Path | None) -> StoredPicture:
        """Store a picture; `directory` is that of its row's file, None where the file is on the hub.

        Raises RowFault if it cannot be read or decoded, or the processor refuses it.
        """
        data = read_picture(given, directory)
        digest, name = hashlib.sha256(data).digest(), picture_name(given)
        if digest not in self._sizes:
            picture = decode_picture(data, name)
            size = Size(picture.height, picture.width)
            try:
                self.processor.expansion(size)
            except RowFault as fault:
                raise RowFault(f"picture {name}: {fault}") from None
            if self._root is not None:
                self._write(self._root, digest, data)
            self._sizes[digest] = size
        return StoredPicture(digest, self._sizes[digest], name)

    @staticmethod
    def _write(root: Path, digest: bytes, data: bytes) -> None:
        """Write a picture's file in one step, unless it is there."""
        path = picture_file(root, digest)
        if path.is_file() and path.stat().st_size == len(data):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(data)
        sync(aside)
        aside.replace(path)


def picture_file(root: Path, digest: bytes) -> Path:
    """The file of a picture below `root`."""
    name = digest.hex()
    return root / name[:2] / name


class PictureFiles:
    """The pictures of published tokens."""

    def __init__(self, tokens: Path):
        """`tokens` is the directory data/tokens."""
        self._root = tokens / PICTURES

    def open(self, digest: bytes) -> Image.Image:
        """A picture in RGB. Raises UserError if its file is missing or damaged."""
        path = picture_file(self._root, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {self._remedy}") from None
        if hashlib.sha256(data).digest() != digest:
            raise UserError(f"{path}: its content is another one than its name says; {self._remedy}")
        return decode_picture(data, path.name)

    @cached_property
    def _remedy(self) -> str:
        return f"delete {self._root.parent} and run `dvc repro`"
