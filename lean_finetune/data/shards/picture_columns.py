"""Columns of rows with pictures: hashes in the shards; sizes and patches in the index."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from lean_finetune.data.pictures.families import Size
from lean_finetune.data.pictures.index_columns import FRAMES, LIMITS, PATCHES, PICTURE_HASHES, PICTURE_SIZES
from lean_finetune.data.pictures.picture_store import StoredPicture

HASHES = pa.field(PICTURE_HASHES, pa.list_(pa.binary(32)), nullable=False)
INDEX_FIELDS = (
    pa.field(PICTURE_SIZES, pa.list_(pa.int32()), nullable=False),
    pa.field(PATCHES, pa.int32(), nullable=False),
    pa.field(FRAMES, pa.list_(pa.int32()), nullable=False),
)

RowPicturesOf = Sequence[Sequence[StoredPicture]]
"""The pictures of each row."""


def hashes(pictures: RowPicturesOf) -> pa.Array:
    """The column of hashes."""
    return pa.array([[one.digest for one in row] for row in pictures], HASHES.type)


class Processor(Protocol):
    """What the columns need of a `PictureProcessor`."""

    def patches(self, size: Size) -> int:
        """Patches of a picture."""
        ...

    def frame(self, size: Size) -> Size | None:
        """The size of a processed picture that is padded to the largest of a batch; None for others."""
        ...


def index_columns(pictures: RowPicturesOf, processor: Processor | None) -> tuple[pa.Array, ...]:
    """The columns of the index; `processor` is None where no row has a picture."""
    sizes = [[edge for one in row for edge in one.size] for row in pictures]
    patches: list[int] = [0] * len(pictures)
    frames: list[list[int]] = [[]] * len(pictures)
    if processor is not None:
        patches = [sum(processor.patches(one.size) for one in row) for row in pictures]
        frames = [_largest([processor.frame(one.size) for one in row]) for row in pictures]
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


def with_pictures(index: pa.Schema, limits: Mapping[str, str]) -> pa.Schema:
    """The schema of an index of rows with pictures, resized within `limits` (see `limits_metadata`)."""
    return pa.schema([*index, *INDEX_FIELDS], metadata={**(index.metadata or {}), **limits})
