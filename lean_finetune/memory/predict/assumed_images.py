"""The images that `fit` assumes in every row, as the model's processor turns them into tokens and patches."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.config.data_schema import Data
from lean_finetune.config.schema import Bucket, Params, Train
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.images.attachment import ImageAttachment, ImageShape, Sizes, images_of
from lean_finetune.images.families import MODELS, not_offered
from lean_finetune.images.image_family import Size
from lean_finetune.images.image_inputs import ImageInputs
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.images.published_processor import TOKENIZER_FILES, published_processor
from lean_finetune.islands.tower import TOWER
from lean_finetune.memory.predict.assumed_rows import TEXT_ROWS, AssumedRows, FullRow
from lean_finetune.memory.trace.known_images import KnownImages
from lean_finetune.rows.attachment import Attachment
from lean_finetune.step.batches import BatchShape

FROZEN_TRACES = 4
"""Of a search for what fits, with a frozen tower."""
PIXEL_PARTS = (2, 4, 8, 16)
"""Parts of an image's pixels that advice tries as data.image_max_pixels."""


def refuse_images(p: Params, config: PretrainedConfig) -> None:
    """Refuse rows with images for a model or an objective that does not take them."""
    if config.model_type not in MODELS:
        raise UserError(not_offered(config.model_type))
    if p.train.goal.compares:
        raise UserError(
            f"--image: rows with images are trained with objective sft alone; got {p.train.objective}; set "
            "train.objective=sft, or leave --image out"
        )


REFUSALS = {"images": refuse_images}
"""What refuses rows that carry something, by its name."""


@dataclass(frozen=True, kw_only=True)
class AssumedImages(AssumedRows):
    """Images of one size in every row."""

    whole_model = True

    size: Size
    count: int
    """Images in a row."""
    directory: Path = Path()
    """Of the model's config.json, and of its processor if that is here."""
    beside_text: bool = False
    """Whether data.max_length is the text beside the images; else it is the whole row."""

    def refuse(self, p: Params, config: PretrainedConfig) -> None:
        """See the base class."""
        refuse_images(p, config)

    def for_model(self, directory: Path, *, beside_text: bool) -> "AssumedImages":
        """See the base class."""
        return replace(self, directory=directory, beside_text=beside_text)

    def made(self, config: PretrainedConfig, data: Data) -> "RowOfImages":
        """The images as the processor makes them with the limits of `data`.

        Raises:
            UserError: the processor cannot be had, or refuses such images; or the model's tokenizer has another token
                for images than `config`.
        """
        processor, own = published_processor(self.directory, data.image_max_pixels, data.image_min_pixels)
        if (self.directory / TOKENIZER_FILES[0]).is_file():
            processor.check_image_token(config.image_token_id)
        made = RowOfImages(assumed=self, processor=processor, inputs=ImageInputs(processor, config), own_limits=own)
        try:
            processor.patches(self.size)
        except RowFault as error:
            raise UserError(f"--image: {error}") from None
        return made


def assumed_of(attached: Iterable[Attachment], config: PretrainedConfig, directory: Path, data: Data) -> AssumedRows:
    """What to assume in every row of a run with full rows, for rows with these attachments; see `most_images`."""
    images = images_of(attached)
    return TEXT_ROWS if images is None else most_images(images, config, directory, data)


def most_images(images: ImageAttachment, config: PretrainedConfig, directory: Path, data: Data) -> AssumedImages:
    """Images of one size that have the patches of the row with most, for every row of a run with full rows.

    Args:
        images: of the rows.
        config: of a model that takes them.
        directory: of the model's config.json and its processor.
        data: has the limits of pixels.

    Raises:
        UserError: as `AssumedImages.made`.
    """
    sizes = [Size(height=height, width=width) for height, width in images.worst]
    made = AssumedImages(size=sizes[0], count=1, directory=directory, beside_text=False).made(config, data)
    largest = max(sizes, key=made.processor.patches)
    count = -(-int(images.patches.max()) // made.processor.patches(largest))
    return replace(made.assumed, size=largest, count=count)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowOfImages(FullRow):
    """The images of each row of a run with full rows."""

    assumed: AssumedImages
    """Those that were assumed."""
    processor: ImageProcessor
    inputs: ImageInputs
    own_limits: bool
    """Whether the processor's limits are the model's own, not those of its family."""

    @property
    def sizes(self) -> Sizes:
        """Height and width of each."""
        return ((self.assumed.size.height, self.assumed.size.width),) * self.assumed.count

    @cached_property
    def tokens(self) -> int:
        """Tokens of one image."""
        return self.processor.tokens(self.assumed.size)

    @cached_property
    def patches(self) -> int:
        """Patches of one image."""
        return self.processor.patches(self.assumed.size)

    @property
    def row_tokens(self) -> int:
        """Tokens of all images of a row."""
        return self.assumed.count * self.tokens

    @property
    def row_patches(self) -> int:
        """Patches of all images of a row."""
        return self.assumed.count * self.patches

    @property
    def shortest_row(self) -> int:  # type: ignore[override]
        """See the base class: one token of text after each image."""
        return self.row_tokens + self.assumed.count

    @property
    def attached(self) -> tuple[ImageAttachment]:
        """See the base class."""
        images = ImageAttachment(
            sizes=np.array(self.sizes, np.int32),
            bounds=np.array([0, self.assumed.count]),
            patches=np.array([self.row_patches], np.int32),
            max_pixels=None,
            min_pixels=None,
        )
        return (images,)

    @property
    def size(self) -> int:
        """See the base class: patches of one image."""
        return self.patches

    @cached_property
    def fakes(self) -> KnownImages:  # type: ignore[override]
        """See the base class."""
        return KnownImages(self.inputs, self.sizes)

    def bucket(self, bucket: Bucket, length: int) -> Bucket:
        """See the base class."""
        if not self.assumed.beside_text:
            return bucket
        return bucket.model_copy(update={"max_tokens": max(bucket.max_tokens, length)})

    def carried(self, shape: BatchShape, bucket: Bucket) -> BatchShape:
        """See the base class: the tokens of images are not trained, and bucket.max_patches holds."""
        rows, most = shape.rows, bucket.max_patches
        if most is not None:
            if self.row_patches > most:
                raise UserError(
                    "bucket.max_patches: the images of every row must fit in a micro-batch; those of a row have "
                    f"{self.row_patches} patches; got {most}; raise it or lower data.image_max_pixels"
                )
            rows = min(rows, most // self.row_patches)
        trained = max(1, shape.length - 1 - self.row_tokens)
        return replace(shape, rows=rows, supervised=rows * trained, attached=(ImageShape(sizes=(self.sizes,) * rows),))

    def most_traces(self, train: Train, most: int) -> int:
        """See the base class: traces take longer. A trained tower has one trace: all of its layers run."""
        return FROZEN_TRACES if TOWER.is_frozen(train) else 1

    def lighter(self, data: Data) -> Iterator[str]:
        """See the base class: data.image_max_pixels lowered by halves."""
        pixels = min(self.assumed.size.height * self.assumed.size.width, data.image_max_pixels or math.inf)
        for part in PIXEL_PARTS:
            yield f"data.image_max_pixels={int(pixels) // part}"

    def sized(self, size: Size) -> "RowOfImages":
        """As many images of another size."""
        return replace(self, assumed=replace(self.assumed, size=size))

    def length(self, max_length: int, positions: int | None) -> int:
        """See the base class."""
        length = max_length + self.row_tokens if self.assumed.beside_text else max_length
        if positions is not None and self.assumed.beside_text:
            length = min(length, positions)
        if length < self.shortest_row:
            what = "the model's positions" if self.assumed.beside_text else "data.max_length"
            raise UserError(
                f"--image: the images of a row must fit in {what}; got {self.assumed.count} of {self.tokens} tokens "
                f"for {length}; choose a smaller image, or set data.image_max_pixels"
            )
        return length
