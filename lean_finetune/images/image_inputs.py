"""What a micro-batch with images gives to the model besides tokens: pixels, grids and positions.

Shape legend: B rows of the micro-batch, T padded length in tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isfunction, signature
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_iter
from transformers import AutoModel, PretrainedConfig

from lean_finetune.images.families import MASK_ARGUMENTS
from lean_finetune.images.image_family import Size, blank
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.images.tower import ImageTower
from lean_finetune.rows.batch_part import BatchPart

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
        self.processor, self._config = processor, config
        self.image_token_id: int = config.image_token_id
        self._model: Any = AutoModel._model_mapping[type(config)]

    @property
    def drops_zeros(self) -> bool:
        """Whether the model looks for crops of zeros, as `ImageFamily.drops_zeros`."""
        return self.processor.drops_zeros

    def tensors(self, ids_BT: torch.Tensor, images: Sequence[Sequence["Image"]]) -> ImageTensors:
        """The arguments for rows of token ids, int64, and the images of each row, in RGB.

        Raises:
            RowFault: the processor refuses an image.
        """
        made = self.processor.arguments(images)
        if hasattr(self._model, "get_rope_index"):
            made["position_ids"] = self._positions(ids_BT, made)
        masks = ImageTower().mask_argument(self._config)
        return {**made, **({} if masks is None else self._kinds(ids_BT, masks))}

    @cached_property
    def blank(self) -> ImageTensors:
        """The arguments of the tower for one small black image, of no row."""
        return self.processor.arguments([[blank(SMALLEST)]])

    def for_generation(self, ids_BT: torch.Tensor, images: Sequence[Sequence["Image"]]) -> ImageTensors:
        """The arguments of `generate`, in which the model computes positions itself, as the rows grow."""
        made: ImageTensors = self.processor.arguments(images)
        return {**made, **self._kinds(ids_BT, *MASK_ARGUMENTS)}

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
        return self.processor.expansion(size).count(self.processor.fill_token)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class ImagePart(BatchPart):
    """The images of a batch: of its rows, or of no row, if other processes have some."""

    shown: ImageTensors = field(default_factory=dict)
    """The model's arguments for the images of the rows."""
    blank: ImageTensors = field(default_factory=dict)
    """The arguments of the vision tower for an image of no row, if it runs beside the towers of other processes."""

    def to(self, device: torch.device | str) -> "ImagePart":
        """See the base class."""
        return ImagePart(shown=_moved(self.shown, device), blank=_moved(self.blank, device))

    def pinned(self) -> "ImagePart":
        """See the base class."""
        shown, blank = ({name: value.pin_memory() for name, value in one.items()} for one in (self.shown, self.blank))
        return ImagePart(shown=shown, blank=blank)

    @property
    def arguments(self) -> ImageTensors:
        """See the base class."""
        return self.shown

    @property
    def masks(self) -> bool:
        """See the base class."""
        return any(name in self.shown for name in MASK_ARGUMENTS)

    def inputs(self, lm: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See the base class."""
        if not self.blank or not (beside := _tower_beside_others(lm, self.blank)).requires_grad:
            return inputs
        # Backward must reach the tower through the decoder, as for real images: FSDP sums gradients in this order.
        embedded_BTD = lm.get_input_embeddings()(inputs["input_ids"]) + beside
        if not getattr(lm.config.get_text_config(), "hidden_size_per_layer_input", 0):
            return {"inputs_embeds": embedded_BTD}
        # Gemma 4 would look for the tokens of these embeddings.
        own = lm.get_decoder().get_per_layer_inputs(inputs["input_ids"], embedded_BTD)
        return {"inputs_embeds": embedded_BTD, "per_layer_inputs": own}


def _moved(images: ImageTensors, device: torch.device | str) -> ImageTensors:
    """Images on the device: on a CPU too new tensors, since its memory meter must count the pixels."""
    moved = {name: value.to(device, non_blocking=value.is_pinned()) for name, value in images.items()}
    return {name: value.clone() if value is images[name] else value for name, value in moved.items()}


def _tower_beside_others(lm: Any, blank: ImageTensors) -> torch.Tensor:
    """Run the vision tower for an image of no row; returns 0, from which backward gives it gradients of 0.

    Sharded weights are gathered, and gradients summed, by all processes that share them or by none.
    """
    output = lm.base_model.get_image_features(**blank, return_dict=True)
    features = tree_iter((output.pooler_output, getattr(output, "deepstack_features", None)))
    # An empty part of them: a product with 0 would not be 0 for features that are not finite.
    parts = [each.flatten()[:0].sum().float() for each in features if isinstance(each, torch.Tensor)]
    return torch.stack(parts).sum()
