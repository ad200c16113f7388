"""The families of models that are trained with pictures: what each one's processor makes of a picture of some size.

transformers' processor is the authority. A family says what its `replace_image_token` reads of a processed picture,
without processing one, and how many patches the vision tower makes of it.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST, FEWEST = "data.image_max_pixels", "data.image_min_pixels"


class Size(NamedTuple):
    """Pixels of a picture, which decide how many tokens and patches it has."""

    height: int
    width: int


class PictureFamily:
    """Models with one class of processor. A family derives from it and is listed in `FAMILIES`."""

    processor_class: ClassVar[str]
    """transformers' class."""
    models: ClassVar[tuple[str, ...]]
    """Values of model_type in config.json. Others may name the same class."""

    def __init__(self, processor: Any):
        """`processor` is transformers', of Pillow's backend."""
        self.processor, self.images = processor, processor.image_processor

    @classmethod
    def processor_kind(cls) -> type:
        """Transformers' class of the processor."""
        from transformers.models.auto.processing_auto import processor_class_from_name

        kind: type = processor_class_from_name(cls.processor_class)
        return kind

    def limit(self, most: int | None, fewest: int | None) -> None:
        """Set the limits of a picture's pixels; None keeps the processor's own, and one of them is given.

        Raises:
            UserError: the family has no such limit, or they contradict each other.
        """
        raise NotImplementedError

    def described(self, size: Size) -> Mapping[str, Any]:
        """What `replace_image_token` reads of a processed picture of this size.

        Raises:
            ValueError: the processor refuses such a picture.
        """
        raise NotImplementedError

    def patches(self, size: Size) -> int:
        """Patches of a picture of this size in the vision tower.

        Raises:
            ValueError: the processor refuses such a picture.
        """
        raise NotImplementedError

    def arguments(self, pictures: Sequence["Image"]) -> dict[str, Any]:
        """The model's arguments for pictures, as the processor returns them.

        Raises:
            ValueError: the processor refuses a picture.
        """
        import torch

        made, _ = self.processor._process_images(list(pictures), **self._options, return_tensors="np")
        names = [name for name in self.images.model_input_names if name not in self.processor.unused_input_names]
        # In NumPy's memory: what a loader thread reads ahead must not count in the memory of the step on a CPU.
        return {name: torch.from_numpy(made[name]) for name in names}

    @cached_property
    def _options(self) -> dict[str, Any]:
        """Arguments with which the processor calls its image processor."""
        return {
            name: value
            for name, value in self.processor._merge_kwargs()["images_kwargs"].items()
            if name != "return_tensors"
        }


def check_limits(name: str, fewest: int, most: int) -> None:
    """Refuse limits of which the fewest pixels are over the most; `name` is the parameter that was given."""
    if fewest > most:
        raise UserError(
            f"{name}: the fewest pixels must not be over the most; got {fewest} and {most}; change one of them"
        )


class QwenFamily(PictureFamily):
    """Qwen's processors: a picture keeps its proportions, and the size of the processor counts its pixels."""

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class."""
        size = dict(self.images.size or {})
        low, high = fewest or size["shortest_edge"], most or size["longest_edge"]
        check_limits(MOST if most is not None else FEWEST, low, high)
        self.images.size = type(self.images.size)(**{**size, "shortest_edge": low, "longest_edge": high})

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        import torch

        return {"image_grid_thw": torch.tensor([[1, 1, self.patches(size)]])}  # The text follows from their product.

    def patches(self, size: Size) -> int:
        """See the base class."""
        return int(self.images.get_number_of_image_patches(size.height, size.width, {}))


class Qwen2VL(QwenFamily):
    """Qwen2-VL."""

    processor_class, models = "Qwen2VLProcessor", ("qwen2_vl", "qwen2_5_vl")


class Qwen25VL(QwenFamily):
    """Qwen2.5-VL."""

    processor_class, models = "Qwen2_5_VLProcessor", ("qwen2_5_vl",)


class Qwen3VL(QwenFamily):
    """Qwen3-VL."""

    processor_class, models = "Qwen3VLProcessor", ("qwen3_vl",)


FAMILIES: tuple[type[PictureFamily], ...] = (Qwen25VL, Qwen2VL, Qwen3VL)
"""Families that are trained with pictures."""
MODELS = tuple(sorted({model for family in FAMILIES for model in family.models}))
"""Values of model_type of these families."""
