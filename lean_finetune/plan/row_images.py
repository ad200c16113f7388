"""The images of training rows: their sizes, and the patches that a vision tower makes of them."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from lean_finetune.data.images.image_files import FRAMES, IMAGE_SIZES, PATCHES

IMAGE_TYPES = {IMAGE_SIZES: (pa.list_(pa.int32()),), PATCHES: (pa.int32(),), FRAMES: (pa.list_(pa.int32()),)}

Sizes = tuple[tuple[int, int], ...]
"""(height, width) in pixels of each image of a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowImages:
    """The images of every row of one split."""

    sizes: np.ndarray
    """int32, shape (images, 2): height and width of all images, in the order of rows."""
    bounds: np.ndarray
    """int64, shape (rows + 1,): row r has images bounds[r] to bounds[r + 1]."""
    patches: np.ndarray
    """int32, shape (rows,): patches of all images of a row; 0 for a row of text."""
    frames: np.ndarray | None = None
    """int32, shape (rows, 2): largest height and width of a row's processed images; None if they are not padded."""
    max_pixels: int | None
    """data.image_max_pixels of the tokens."""
    min_pixels: int | None
    """data.image_min_pixels of the tokens."""

    def of(self, row: int) -> Sizes:
        """The sizes of a row's images."""
        first, last = self.bounds.item(row), self.bounds.item(row + 1)
        return tuple((height, width) for height, width in self.sizes[first:last].tolist())

    def of_rows(self, rows: np.ndarray) -> tuple[Sizes, ...]:
        """The sizes of the images of each of several rows; empty if none has one."""
        sizes = tuple(map(self.of, rows.tolist()))
        return sizes if any(sizes) else ()

    def padded_pixels(self, rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Pixels of each micro-batch whose images are padded to the largest of it, int64.

        `rows` are those of all micro-batches, and those of one are from `bounds` of its number to that of the next.
        """
        assert self.frames is not None, "images are not padded"
        found = np.zeros(len(bounds) - 1, np.int64)
        filled = np.diff(bounds) > 0
        starts = bounds[:-1][filled]
        counts = np.add.reduceat(np.diff(self.bounds)[rows], starts)
        heights, widths = np.maximum.reduceat(self.frames[rows], starts).astype(np.int64).T
        found[filled] = counts * heights * widths
        return found

    def fullest(self, at_once: np.ndarray) -> int:
        """The row of which a batch has most patches, where so many rows like it fit in one."""
        return int((at_once * self.patches).argmax())

    def with_row(self, other: "RowImages", row: int) -> "RowImages":
        """These rows and one of others."""
        sizes = np.array(other.of(row), np.int32).reshape(-1, 2)
        return replace(
            self,
            sizes=np.concatenate([self.sizes, sizes]),
            bounds=np.append(self.bounds, self.bounds[-1] + len(sizes)),
            patches=np.append(self.patches, other.patches[row]),
            frames=None,
        )

    @property
    def worst(self) -> Sizes:
        """The sizes of the images of the row with most patches."""
        return self.of(int(self.patches.argmax()))
