"""What a micro-batch with images gives to the model besides tokens: pixels, grids and positions.

Shape legend: B rows of the micro-batch, T padded length in tokens.
"""

from collections.abc import Sequence
from functools import cached_property
from inspect import isfunction, signature
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModel, PretrainedConfig

from lean_finetune.data.images.families import Size, blank
from lean_finetune.data.images.processor import ImageProcessor
from lean_finetune.images.attachment import ImageAttachment
from lean_finetune.model.images.image_config import SEE_EACH_OTHER

if TYPE_CHECKING:
    from PIL.Image import Image

ImageTensors = dict[str, torch.Tensor]
"""Arguments of the model by name: pixel_values and others of its family, and position_ids if images change them."""

SMALLEST = Size(56, 56)
"""Of an image of no row; processors make it larger where they have a limit."""


class ImageInputs:
    """Makes the arguments of a model for the images of its rows."""

    def __init__(self, processor: ImageProcessor, config: PretrainedConfig):
        """`processor` and `config` are the model's own."""
        self._processor, self._config = processor, config
        self.image_token_id: int = config.image_token_id
        self._model: Any = AutoModel._model_mapping[type(config)]

    @property
    def drops_zeros(self) -> bool:
        """Whether the model looks for crops of zeros, as `ImageFamily.drops_zeros`."""
        return self._processor.drops_zeros

    def tensors(self, ids_BT: torch.Tensor, images: Sequence[Sequence["Image"]]) -> ImageTensors:
        """The arguments for rows of token ids, int64, and the images of each row, in RGB.

        Raises:
            RowFault: the processor refuses an image.
        """
        made = self._processor.arguments(images)
        if hasattr(self._model, "get_rope_index"):
            made["position_ids"] = self._positions(ids_BT, made)
        return {**made, **self._kinds(ids_BT, SEE_EACH_OTHER)}

    @cached_property
    def blank(self) -> ImageTensors:
        """The arguments of the tower for one small black image, of no row."""
        return self._processor.arguments([[blank(SMALLEST)]])

    def for_generation(self, ids_BT: torch.Tensor, images: Sequence[Sequence["Image"]]) -> ImageTensors:
        """The arguments of `generate`, in which the model computes positions itself, as the rows grow."""
        made: ImageTensors = self._processor.arguments(images)
        return {**made, **self._kinds(ids_BT, SEE_EACH_OTHER, "mm_token_type_ids")}

    def _kinds(self, ids_BT: torch.Tensor, *names: str) -> ImageTensors:
        """Which tokens images fill, as those of these arguments that the model has."""
        known = signature(self._model.forward).parameters
        # In NumPy's memory, as the pixels are.
        return {
            name: torch.from_numpy((ids_BT == self.image_token_id).numpy().astype(np.int32))
            for name in names
            if name in known
        }

    def of_shapes(self, ids_BT: torch.Tensor, sizes: Sequence[Sequence[tuple[int, int]]]) -> ImageTensors:
        """The arguments for black images of these sizes, whose tokens are put into `ids_BT` in place."""
        ids = ids_BT.numpy()
        for row, of_row in enumerate(sizes):
            place = 0
            for size in of_row:
                count = self.tokens(Size(*size))
                ids[row, place : place + count] = self.image_token_id
                place += count + 1  # Another token parts two images, as in every family's text.
        return self.tensors(ids_BT, [[blank(Size(*size)) for size in of_row] for of_row in sizes])

    def tokens(self, size: Size) -> int:
        """Tokens that an image of this size fills, of those that its pixels replace."""
        return self._processor.expansion(size).count(self._processor.fill_token)

    def _positions(self, ids_BT: torch.Tensor, made: ImageTensors) -> torch.Tensor:
        """Positions of tokens in time, height and width, int64 (3, B, T), as the family's own code computes them."""
        owner: Any = _Functions(self._model, self._config)
        wanted = signature(self._model.get_rope_index).parameters
        arguments = {
            "input_ids": ids_BT,
            "mm_token_type_ids": (ids_BT == self.image_token_id).int(),
            "image_grid_thw": made["image_grid_thw"],
        }
        positions_3BT: torch.Tensor
        positions_3BT, _ = owner.get_rope_index(**{name: arguments[name] for name in arguments if name in wanted})
        return torch.from_numpy(positions_3BT.numpy().copy())  # In NumPy's memory, as the pixels are.


class _Functions:
    """The functions of a model's class, without a model: they read its config alone."""

    def __init__(self, kind: type, config: PretrainedConfig):
        self.config, self._kind = config, kind

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kind, name)
        return MethodType(value, self) if isfunction(value) else value


def read_image_inputs(directory: Path, config: PretrainedConfig, images: ImageAttachment | None) -> ImageInputs | None:
    """What makes the arguments of images, from a model's directory; None for rows of text.

    Raises:
        UserError: the model's processor cannot be read, or `config` does not belong to its tokenizer.
    """
    if images is None:
        return None
    processor = ImageProcessor(directory, max_pixels=images.max_pixels, min_pixels=images.min_pixels)
    processor.check_image_token(config.image_token_id)
    return ImageInputs(processor, config)
