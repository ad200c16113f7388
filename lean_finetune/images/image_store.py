"""Store the images of rows: each is read from its row or from a file beside it, and kept once by its content."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from lean_finetune.core.atomic_files import sync
from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.given_images import GivenImage
from lean_finetune.images.image_family import Size
from lean_finetune.images.image_files import decode_image, has_damaged_exif, image_file, regular_content
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.pinning.image_pins import MAX_IMAGE_BYTES


class StoredImage(NamedTuple):
    """An image in a store."""

    digest: bytes
    """sha256 of its content."""
    size: Size
    name: str
    """How messages call it."""
    has_damaged_exif: bool = False
    """Its orientation may be lost."""


class ImageStore:
    """Reads the images of rows, and keeps the content of each once."""

    def __init__(self, root: Path | None, processor: ImageProcessor):
        """Keep the files below `root`, or none of them; `processor` must accept each image."""
        self._root, self.processor = root, processor
        self._sizes: dict[bytes, Size] = {}
        self._damaged: set[bytes] = set()

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
            if has_damaged_exif(data):
                self._damaged.add(digest)
        return StoredImage(digest, self._sizes[digest], name, digest in self._damaged)

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


# The content of a row's image.


def read_image(given: GivenImage, directory: Path | None) -> bytes:
    """The content of an image; `directory` is that of its row's file (`rows_directory`).

    Raises RowFault as `image_path`, or if the file is missing, not readable, not a regular one, or has more than
    MAX_IMAGE_BYTES.
    """
    if given.data is not None:
        data = given.data
    else:
        path = image_path(given, directory)
        try:
            found = regular_content(path, MAX_IMAGE_BYTES + 1)
        except OSError as error:
            raise RowFault(
                f"image {path} cannot be read ({error.strerror}); correct its path, or put it there"
            ) from None
        if found is None:
            raise RowFault(f"image {given.path} is no regular file; copy it into one")
        data = found
    if len(data) > MAX_IMAGE_BYTES:
        raise RowFault(f"image {image_name(given)} has more than {MAX_IMAGE_BYTES >> 20} MiB; make it smaller")
    return data


def image_path(given: GivenImage, directory: Path | None) -> Path:
    """The file of an image that its row names by path.

    Raises RowFault if a relative path leaves `directory`, by `..` or by a link, and for any path if there is none. An
    absolute one is the choice of whoever wrote the rows on this machine.
    """
    assert given.path is not None, "an image has a path, or its content"
    if "\0" in given.path or not _is_file_name(given.path):
        raise RowFault(f"image {given.path!r} has a NUL or a lone surrogate in its path; correct it")
    if given.path.startswith("~"):
        raise RowFault(f"image {given.path}: ~ is not expanded; write the full path")
    if directory is None:
        raise RowFault(
            f"image {given.path} is named by a row on the hub, where only images within rows are read; download "
            "the data set, and name its files"
        )
    if os.path.isabs(given.path):
        return Path(given.path)
    # realpath, unlike resolve, accepts loops of links; opening the file then reports them.
    inside = os.path.realpath(directory)
    if not os.path.realpath(os.path.join(inside, given.path)).startswith(os.path.join(inside, "")):
        raise RowFault(
            f"image {given.path} is outside of {directory}, the directory of its row's file; write its absolute "
            "path, or copy it there"
        )
    return directory / given.path


def _is_file_name(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def image_name(given: GivenImage) -> str:
    """How messages call an image."""
    return given.path or "in the row"
