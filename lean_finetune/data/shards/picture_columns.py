"""Columns of rows with pictures: hashes in the shards; sizes and patches in the index."""

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from lean_finetune.data.pictures.families import Size
from lean_finetune.data.pictures.index_columns import LIMITS, PATCHES, PICTURE_HASHES, PICTURE_SIZES
from lean_finetune.data.pictures.picture_store import StoredPicture

HASHES = pa.field(PICTURE_HASHES, pa.list_(pa.binary(32)), nullable=False)
INDEX_FIELDS = (
    pa.field(PICTURE_SIZES, pa.list_(pa.int32()), nullable=False),
    pa.field(PATCHES, pa.int32(), nullable=False),
)

RowPicturesOf = Sequence[Sequence[StoredPicture]]
"""The pictures of each row."""


def hashes(pictures: RowPicturesOf) -> pa.Array:
    """The column of hashes."""
    return pa.array([[one.digest for one in row] for row in pictures], HASHES.type)


def index_columns(pictures: RowPicturesOf, patches_of: Callable[[Size], int] | None) -> tuple[pa.Array, ...]:
    """The columns of the index; `patches_of` counts the patches of a picture, None where no row has one."""
    sizes = [[edge for one in row for edge in one.size] for row in pictures]
    patches = [sum(patches_of(one.size) for one in row) if patches_of is not None else 0 for row in pictures]
    return pa.array(sizes, INDEX_FIELDS[0].type), pa.array(patches, INDEX_FIELDS[1].type)


def limits_metadata(max_pixels: int | None, min_pixels: int | None) -> dict[str, str]:
    """The metadata of the index: the limits of pixels."""
    return {
        name: "" if limit is None else str(limit) for name, limit in zip(LIMITS, (max_pixels, min_pixels), strict=True)
    }


def with_pictures(index: pa.Schema, limits: Mapping[str, str]) -> pa.Schema:
    """The schema of an index of rows with pictures, resized within `limits` (see `limits_metadata`)."""
    return pa.schema([*index, *INDEX_FIELDS], metadata={**(index.metadata or {}), **limits})
