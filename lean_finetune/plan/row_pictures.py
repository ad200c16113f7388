"""The pictures of training rows: their sizes, and the patches that a vision tower makes of them."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from lean_finetune.data.pictures.index_columns import PATCHES, PICTURE_SIZES

PICTURE_TYPES = {PICTURE_SIZES: (pa.list_(pa.int32()),), PATCHES: (pa.int32(),)}

Sizes = tuple[tuple[int, int], ...]
"""(height, width) in pixels of each picture of a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPictures:
    """The pictures of every row of one split."""

    sizes: np.ndarray
    """int32, shape (pictures, 2): height and width of all pictures, in the order of rows."""
    bounds: np.ndarray
    """int64, shape (rows + 1,): row r has pictures bounds[r] to bounds[r + 1]."""
    patches: np.ndarray
    """int32, shape (rows,): patches of all pictures of a row; 0 for a row of text."""
    max_pixels: int | None
    """data.image_max_pixels of the tokens."""
    min_pixels: int | None
    """data.image_min_pixels of the tokens."""

    def of(self, row: int) -> Sizes:
        """The sizes of a row's pictures."""
        first, last = self.bounds.item(row), self.bounds.item(row + 1)
        return tuple((height, width) for height, width in self.sizes[first:last].tolist())

    def of_rows(self, rows: np.ndarray) -> tuple[Sizes, ...]:
        """The sizes of the pictures of each of several rows; empty if none has one."""
        sizes = tuple(map(self.of, rows.tolist()))
        return sizes if any(sizes) else ()

    @property
    def worst(self) -> Sizes:
        """The sizes of the pictures of the row with most patches."""
        return self.of(int(self.patches.argmax()))
