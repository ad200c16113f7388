"""The images that `fit` assumes in every row, as the model's processor turns them into tokens and patches."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from lean_finetune.config.data_schema import Data
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.images.image_family import Size
from lean_finetune.data.images.processor import ImageProcessor
from lean_finetune.data.images.published_processor import TOKENIZER_FILES, published_processor
from lean_finetune.images.attachment import ImageAttachment, Sizes
from lean_finetune.images.image_inputs import ImageInputs
from lean_finetune.memory.trace.known_values import KnownImages


@dataclass(frozen=True, kw_only=True)
class AssumedImages:
    """Images of one size in every row."""

    size: Size
    count: int
    """Images in a row."""
    directory: Path
    """Of the model's config.json, and of its processor if that is here."""
    beside_text: bool
    """Whether data.max_length is the text beside the images; else it is the whole row."""

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
class RowOfImages:
    """The images of each row of a run with full rows."""

    assumed: AssumedImages
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
    def shortest_row(self) -> int:
        """Tokens of a row with little text: one after each image."""
        return self.row_tokens + self.assumed.count

    @property
    def attachment(self) -> ImageAttachment:
        """Those of one row."""
        return ImageAttachment(
            sizes=np.array(self.sizes, np.int32),
            bounds=np.array([0, self.assumed.count]),
            patches=np.array([self.row_patches], np.int32),
            max_pixels=None,
            min_pixels=None,
        )

    @cached_property
    def known(self) -> KnownImages:
        """What makes the model's arguments in a trace."""
        return KnownImages(self.inputs, self.sizes)

    def sized(self, size: Size) -> "RowOfImages":
        """As many images of another size."""
        return replace(self, assumed=replace(self.assumed, size=size))

    def length(self, max_length: int, positions: int | None) -> int:
        """Tokens of the longest row, without padding; `positions` of the model.

        Raises:
            UserError: the images do not fit in it.
        """
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
