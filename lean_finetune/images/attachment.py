"""The images of rows: their sizes, and the patches that a vision tower makes of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from lean_finetune.core.arrow_files import read_column
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_files import FRAMES, IMAGE_HASHES, IMAGE_SIZES, LIMITS, PATCHES, ImageFiles
from lean_finetune.images.processor import ImageProcessor, write_limits
from lean_finetune.rows.attachment import AttachedShape, Attachment, Measure, files_of, sums_between

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PretrainedConfig

    from lean_finetune.config.schema import Train
    from lean_finetune.images.image_inputs import ImageInputs, ImagePart
    from lean_finetune.rows.attachment import IndexBatch, StoredRows

Sizes = tuple[tuple[int, int], ...]
"""(height, width) in pixels of each image of a row."""


@dataclass(frozen=True, kw_only=True)
class ImageShape(AttachedShape):
    """The images of a micro-batch."""

    sizes: tuple[Sizes, ...] = ()
    """Of the images of each row; empty if no row has one."""
    beside: bool = False
    """Whether the vision tower runs for no row, as other processes' do."""

    @property
    def of_rows(self) -> tuple[Sizes, ...]:
        """See the base class."""
        return self.sizes

    @property
    def attachment(self) -> "type[ImageAttachment]":
        """See the base class."""
        return ImageAttachment

    def largest(self, rows: int) -> "ImageShape":
        """See the base class."""
        return replace(self, sizes=tuple(sorted(self.sizes, key=_pixels, reverse=True)[:rows]))


def _pixels(images: Sizes) -> int:
    """Pixels of a row's images."""
    return sum(height * width for height, width in images)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageAttachment(Attachment):
    """The images of every row of one split."""

    columns = {IMAGE_SIZES: (pa.list_(pa.int32()),), PATCHES: (pa.int32(),), FRAMES: (pa.list_(pa.int32()),)}
    name = "images"
    rows_text = "rows with images"
    limits = ("max_patches",)
    whole_model = True
    sizes_option = "--image"
    unpackable = "vision towers of their families do not know packed rows"

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
    files: ImageFiles | None = None
    """The images themselves; None for rows without files."""
    inputs: "ImageInputs | None" = None
    """Makes the model's arguments; None until a model that takes images is known."""
    together: bool = False
    """Whether GPUs without images run the vision tower while others do (`Train.runs_towers_together`)."""

    @classmethod
    def from_columns(cls, batches: "Sequence[IndexBatch]", tokens: Path | None = None) -> Self:
        """See the base class."""
        metadata = batches[0].schema.metadata or {}
        limits = (metadata.get(name.encode(), b"").decode() for name in LIMITS)
        max_pixels, min_pixels = (int(limit) if limit else None for limit in limits)
        lists = [batch.column(IMAGE_SIZES) for batch in batches]
        counts = np.concatenate([np.diff(one.offsets.to_numpy()) for one in lists]) // 2
        frames = np.zeros((len(counts), 2), np.int32)
        padded = np.concatenate([np.diff(batch.column(FRAMES).offsets.to_numpy()) > 0 for batch in batches])
        frames[padded] = np.concatenate([batch.column(FRAMES).flatten().to_numpy() for batch in batches]).reshape(-1, 2)
        return cls(
            frames=frames if padded.any() else None,
            sizes=np.concatenate([one.flatten().to_numpy() for one in lists]).reshape(-1, 2),
            bounds=np.append(0, np.cumsum(counts, dtype=np.int64)),
            patches=read_column(batches, PATCHES, np.int32),
            max_pixels=max_pixels,
            min_pixels=min_pixels,
            files=None if tokens is None else ImageFiles(tokens),
        )

    @property
    def measures(self) -> Sequence[Measure]:
        """See the base class."""
        return (
            Measure(name="patches", values=self.patches, limit="max_patches", remedy="lower data.image_max_pixels"),
        )

    def shape_of(self, rows: np.ndarray, *, beside: bool = False) -> ImageShape | None:
        """See the base class."""
        sizes = tuple(map(self.of, rows.tolist()))
        return ImageShape(sizes=sizes if any(sizes) else (), beside=beside) if any(sizes) or beside else None

    def beside(self, rows: np.ndarray, bounds: np.ndarray, ranks: int) -> np.ndarray:
        """See the base class."""
        micro_batches = len(bounds) - 1
        if not self.together:
            return np.zeros(micro_batches, bool)
        shows = sums_between(self.patches[rows] > 0, bounds) > 0
        in_turn = np.logical_or.reduceat(shows, np.arange(0, micro_batches, ranks))
        return np.repeat(in_turn, ranks)[:micro_batches] & ~shows

    def memory_figures(self, rows: np.ndarray, bounds: np.ndarray, beside: np.ndarray) -> list[np.ndarray]:
        """See the base class; of images with padding, their pixels too."""
        padded = [] if self.frames is None else [self.padded_pixels(rows, bounds)]
        patches = sums_between(self.patches[rows], bounds)
        return [*padded, np.maximum(patches, beside)]  # A blank image has the fewest patches of all.

    def refuse_cut(self, lengths: np.ndarray, max_length: int) -> None:
        """See the base class."""
        if (lengths[self.patches > 0] > max_length).any():
            raise UserError(f"data.max_length: would cut images of rows; got {max_length}; raise it")

    def trained_by(self, train: "Train") -> Self:
        """See the base class."""
        return replace(self, together=train.runs_towers_together)

    def save(self, model: Path, out: Path) -> None:
        """See the base class: the limits of pixels."""
        if self.max_pixels or self.min_pixels:
            write_limits(model, out, max_pixels=self.max_pixels, min_pixels=self.min_pixels)

    def for_model(self, directory: Path, config: "PretrainedConfig") -> Self:
        """See the base class: its processor cannot be read, or `config` does not belong to its tokenizer."""
        from lean_finetune.images.image_inputs import ImageInputs  # Here: plans need no PyTorch.

        processor = ImageProcessor(directory, max_pixels=self.max_pixels, min_pixels=self.min_pixels)
        processor.check_image_token(config.image_token_id)
        return replace(self, inputs=ImageInputs(processor, config))

    def part(self, tokens: "StoredRows", rows: np.ndarray, ids_BT: "Tensor") -> "ImagePart | None":
        """See the base class."""
        from lean_finetune.images.image_inputs import ImagePart

        hashes = [files_of(tokens, row) for row in rows.tolist()]
        if not any(hashes):
            return None
        return ImagePart(shown=self.known_inputs.tensors(ids_BT, self.opened(hashes)))

    def files_of(self, tokens: "StoredRows", row: int) -> list[bytes]:
        """See the base class."""
        hashes: list[bytes] = tokens.value(IMAGE_HASHES, row)
        return hashes

    def for_generation(self, ids_BT: "Tensor", files: Sequence[Sequence[bytes]]) -> "dict[str, Tensor]":
        """See the base class."""
        return self.known_inputs.for_generation(ids_BT, self.opened(files))

    def blank(self) -> "ImagePart":
        """See the base class."""
        from lean_finetune.images.image_inputs import ImagePart

        return ImagePart(blank=self.known_inputs.blank)

    @property
    def known_inputs(self) -> "ImageInputs":
        """`inputs` once a model is known."""
        assert self.inputs is not None, "the model takes no images"
        return self.inputs

    def opened(self, hashes: Sequence[Sequence[bytes]]) -> "list[list[Image]]":
        """Images in RGB, from their hashes. Raises UserError if one is missing or damaged."""
        assert self.files is not None, "the rows have no files"
        return [[self.files.open(one) for one in of_row] for of_row in hashes]

    def with_row(self, other: Self, row: int) -> Self:
        """See the base class."""
        sizes = np.array(other.of(row), np.int32).reshape(-1, 2)
        return replace(
            self,
            sizes=np.concatenate([self.sizes, sizes]),
            bounds=np.append(self.bounds, self.bounds[-1] + len(sizes)),
            patches=np.append(self.patches, other.patches[row]),
            frames=None,
        )

    def of(self, row: int) -> Sizes:
        """The sizes of a row's images."""
        first, last = self.bounds.item(row), self.bounds.item(row + 1)
        return tuple((height, width) for height, width in self.sizes[first:last].tolist())

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

    @property
    def worst(self) -> Sizes:
        """The sizes of the images of the row with most patches."""
        return self.of(int(self.patches.argmax()))


def images_of(attached: Iterable[Attachment]) -> ImageAttachment | None:
    """The images among what rows carry; None if no row has one."""
    return next((one for one in attached if isinstance(one, ImageAttachment)), None)


def sizes_of(attached: Iterable[AttachedShape]) -> tuple[Sizes, ...]:
    """The sizes of the images of each row of a micro-batch; empty if no row has one."""
    return next((one.sizes for one in attached if isinstance(one, ImageShape)), ())
