"""Columns of rows with images: hashes in the shards; sizes and patches in the index."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from lean_finetune.data.images.image_family import Size
from lean_finetune.data.images.image_files import FRAMES, IMAGE_HASHES, IMAGE_SIZES, LIMITS, PATCHES
from lean_finetune.data.images.image_store import StoredImage

HASHES = pa.field(IMAGE_HASHES, pa.list_(pa.binary(32)), nullable=False)
INDEX_FIELDS = (
    pa.field(IMAGE_SIZES, pa.list_(pa.int32()), nullable=False),
    pa.field(PATCHES, pa.int32(), nullable=False),
    pa.field(FRAMES, pa.list_(pa.int32()), nullable=False),
)

RowImagesOf = Sequence[Sequence[StoredImage]]
"""The images of each row."""


def hashes(images: RowImagesOf) -> pa.Array:
    """The column of hashes."""
    return pa.array([[one.digest for one in row] for row in images], HASHES.type)


class Processor(Protocol):
    """What the columns need of an `ImageProcessor`."""

    def patches(self, size: Size) -> int:
        """Patches of an image."""
        ...

    def frame(self, size: Size) -> Size | None:
        """The size of a processed image that is padded to the largest of a batch; None for others."""
        ...


def index_columns(images: RowImagesOf, processor: Processor | None) -> tuple[pa.Array, ...]:
    """The columns of the index; `processor` is None where no row has an image."""
    sizes = [[edge for one in row for edge in one.size] for row in images]
    patches: list[int] = [0] * len(images)
    frames: list[list[int]] = [[]] * len(images)
    if processor is not None:
        patches = [sum(processor.patches(one.size) for one in row) for row in images]
        frames = [_largest([processor.frame(one.size) for one in row]) for row in images]
    columns = zip((sizes, patches, frames), INDEX_FIELDS, strict=True)
    return tuple(pa.array(values, field.type) for values, field in columns)


def _largest(frames: Sequence[Size | None]) -> list[int]:
    """The largest height and the largest width; nothing without sizes."""
    return list(map(max, zip(*(frame for frame in frames if frame is not None), strict=True)))


def limits_metadata(max_pixels: int | None, min_pixels: int | None) -> dict[str, str]:
    """The metadata of the index: the limits of pixels."""
    return {
        name: "" if limit is None else str(limit) for name, limit in zip(LIMITS, (max_pixels, min_pixels), strict=True)
    }


def with_images(index: pa.Schema, limits: Mapping[str, str]) -> pa.Schema:
    """The schema of an index of rows with images, resized within `limits` (see `limits_metadata`)."""
    return pa.schema([*index, *INDEX_FIELDS], metadata={**(index.metadata or {}), **limits})
