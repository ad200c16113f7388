"""Columns of rows with images: hashes in the shards; sizes and patches in the index."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import pyarrow as pa

from cuda_memory.units import counted
from lean_finetune.core.atomic_files import link_or_copy
from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import Conversation
from lean_finetune.images.fill_images import RowImages
from lean_finetune.images.image_family import Size
from lean_finetune.images.image_files import (
    FRAMES,
    IMAGE_HASHES,
    IMAGE_SIZES,
    IMAGES,
    LIMITS,
    PATCHES,
    image_file,
)
from lean_finetune.images.image_store import ImageStore, StoredImage
from lean_finetune.images.named_images import refuse_changed_images
from lean_finetune.images.processor import ImageProcessor, image_family
from lean_finetune.rows.columns import InspectedRows, RowColumns

if TYPE_CHECKING:
    from lean_finetune.data.chat.control_tokens import TextSegment
    from lean_finetune.data.encode.row_tokenizer import Chunks, RowTokenizer
    from lean_finetune.data.encode.whole_row_encoder import EncodedRows
    from lean_finetune.data.format.format_base import Example, SourceFormat
    from lean_finetune.data.read.row_block import RowBlock

HASHES = pa.field(IMAGE_HASHES, pa.list_(pa.binary(32)), nullable=False)

Images = Sequence[StoredImage]
"""The images of a row."""


class Processor(Protocol):
    """What the columns need of an `ImageProcessor`."""

    def patches(self, size: Size) -> int:
        """Patches of an image."""
        ...

    def frame(self, size: Size) -> Size | None:
        """The size of a processed image that is padded to the largest of a batch; None for others."""
        ...


@dataclass(frozen=True, kw_only=True)
class ImageColumns(RowColumns):
    """The images of rows, for a model that takes some."""

    rows_text = "rows with images"
    params = ("image_max_pixels", "image_min_pixels")
    fields = (HASHES,)
    index_fields = (
        pa.field(IMAGE_SIZES, pa.list_(pa.int32()), nullable=False),
        pa.field(PATCHES, pa.int32(), nullable=False),
        pa.field(FRAMES, pa.list_(pa.int32()), nullable=False),
    )
    libraries = ("pillow", "transformers")
    cut_count = "cut_image_rows"
    cut_text = "with an image that {limit} cuts"
    cut_apart = "a part of it, split off by data.over_length, lacks its images"
    notes = {
        "cut_image_rows": "{share} were dropped because {limit} cuts one of their images{first}; raise it, or make "
        "them smaller with data.image_max_pixels",
        "damaged_exif_rows": "{share} have an image with damaged EXIF data{first}, which may not be upright; save it "
        "again",
    }

    patch: tuple[int, ...] | None = None
    """Height and width in pixels of a patch of the vision tower; None: as `ImageProcessor`."""
    max_pixels: int | None = None
    """data.image_max_pixels."""
    min_pixels: int | None = None
    """data.image_min_pixels."""
    tokenizer: "RowTokenizer | None" = None
    """None until it is opened."""
    store: Path | None = None
    directories: Sequence[Path | None] = ()

    @classmethod
    def of(cls, rows: InspectedRows) -> Self | None:
        """See the base class."""
        if rows.kind.compared or not any(one.takes_others for one in rows.sources):
            return None
        patch = rows.tokenizer_lock.get("vision_patch")
        return cls(
            patch=None if patch is None else tuple(patch),
            max_pixels=rows.data.image_max_pixels,
            min_pixels=rows.data.image_min_pixels,
        )

    @classmethod
    def model_takes(cls, directory: Path) -> bool:
        """See the base class."""
        return image_family(directory) is not None

    @property
    def metadata(self) -> dict[str, str]:
        """See the base class: the limits of pixels."""
        limits = self.max_pixels, self.min_pixels
        return {name: "" if limit is None else str(limit) for name, limit in zip(LIMITS, limits, strict=True)}

    def opened(self, tokenizer: "RowTokenizer", store: Path | None, directories: Sequence[Path | None]) -> Self:
        """See the base class."""
        return replace(
            self, tokenizer=tokenizer, store=None if store is None else store / IMAGES, directories=directories
        )

    @cached_property
    def images(self) -> RowImages:
        """Reads the images of rows. Rows of text need no processor, so it is loaded on first use."""
        assert self.tokenizer is not None, "the columns are not opened"
        directory = self.tokenizer.directory
        limits = {"max_pixels": self.max_pixels, "min_pixels": self.min_pixels}
        return RowImages(ImageStore(self.store, ImageProcessor(directory, patch=self.patch, **limits)), self.tokenizer)

    def prepare(self, block: "RowBlock", source: "SourceFormat") -> None:
        """See the base class: reading images imports transformers."""
        if b"image" in block.payload or b"<img>" in block.payload or "images" in source.columns:
            _ = self.images

    def value(self, row: Mapping[str, Any], example: "Example", source: "SourceFormat", file: int) -> Images:
        """See the base class."""
        if not isinstance(example, Conversation) or not example.others:
            return ()
        return self.images.stored(example.others, self.directories[file])

    def filled(self, segments: "list[list[TextSegment]]", value: Images) -> "list[list[TextSegment]]":
        """See the base class."""
        return [self.images.filled(segments[0], value)] if value else segments

    def counts(self, value: Images) -> Mapping[str, int]:
        """See the base class."""
        return {"damaged_exif_rows": int(any(image.has_damaged_exif for image in value))}

    def cut(self, chunks: "Chunks", encoded: "EncodedRows", values: Sequence[Images]) -> np.ndarray:
        """See the base class."""
        return self.images.cut(chunks, encoded) if any(values) else super().cut(chunks, encoded, values)

    def cut_reason(self, value: Images, ids: np.ndarray, limit: int) -> str | None:
        """See the base class: the first image that is cut."""
        if not value or (cut := self.images.first_behind(limit, value, ids)) is None:
            return None
        size = f"{cut.size.width} x {cut.size.height} pixels, {self.images.processor.tokens(cut.size)} tokens"
        return f"image {cut.name} ({size}) is cut by, or lies behind, data.max_length={limit}"

    def arrays(self, values: Sequence[Images]) -> list[pa.Array]:
        """See the base class: the hashes."""
        return [pa.array([[one.digest for one in row] for row in values], HASHES.type)]

    def index_arrays(self, values: Sequence[Images]) -> list[pa.Array]:
        """See the base class."""
        return index_columns(values, self.images.processor if any(values) else None)

    def digest(self, value: Images) -> bytes:
        """See the base class."""
        return b"".join(one.digest for one in value)

    def published(self, store: Path, out: Path, rows: Path, dropped: np.ndarray | None) -> int:
        """See the base class: rows with images, also duplicates."""
        found = 0
        for path in sorted(rows.glob("*.arrow")):
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    hashes = reader.get_batch(number).column(IMAGE_HASHES)
                    found += int((np.diff(hashes.offsets.to_numpy()) > 0).sum())
                    for digest in set(hashes.flatten().to_pylist()):
                        target = image_file(out / IMAGES, digest)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        if not target.exists():
                            link_or_copy(image_file(store / IMAGES, digest), target)
        return found

    def check(self, found: Mapping[str, int], rows: Mapping[str, int], why: str) -> None:
        """See the base class: held-out images without any in training."""
        if found["heldout"] and not found["train"]:
            raise UserError(
                "data.source: has no training row with an image, so that the model is trained without its parts for "
                f"them, and {counted(found['heldout'], 'held-out row')} with some{why}; add training rows with images, "
                "or train and evaluate the text alone with data.ignore_columns=[images]"
            )

    def refuse_change(
        self, lock: Mapping[str, Any], sources: "Sequence[SourceFormat]", ignore_columns: Collection[str]
    ) -> None:
        """See the base class."""
        refuse_changed_images(lock, [source.columns for source in sources], ignore_columns)


def index_columns(images: Sequence[Images], processor: Processor | None) -> list[pa.Array]:
    """The columns of the index, of the images of each row; `processor` is None where no row has an image."""
    sizes = [[edge for one in row for edge in one.size] for row in images]
    patches: list[int] = [0] * len(images)
    frames: list[list[int]] = [[]] * len(images)
    if processor is not None:
        patches = [sum(processor.patches(one.size) for one in row) for row in images]
        frames = [_largest([processor.frame(one.size) for one in row]) for row in images]
    columns = zip((sizes, patches, frames), ImageColumns.index_fields, strict=True)
    return [pa.array(values, field.type) for values, field in columns]


def _largest(frames: Sequence[Size | None]) -> list[int]:
    """The largest height and the largest width; nothing without sizes."""
    return list(map(max, zip(*(frame for frame in frames if frame is not None), strict=True)))
