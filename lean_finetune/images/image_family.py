"""What a family of models says of its processor, and the sizes of images.

transformers' processor is the authority. A family says what its `replace_image_token` reads of a processed image,
without processing one, and how many patches the vision tower makes of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST, FEWEST = "data.image_max_pixels", "data.image_min_pixels"


class Size(NamedTuple):
    """Pixels of an image, which decide how many tokens and patches it has."""

    height: int
    width: int


class ImageFamily(ABC):
    """Models with one class of processor. A family derives from it and is listed in `IMAGE_FAMILIES`."""

    processor_class: ClassVar[str]
    """transformers' class."""
    models: ClassVar[tuple[str, ...]]
    """Values of model_type in config.json. Others may name the same class."""
    limits: ClassVar[tuple[str, ...]] = (MOST, FEWEST)
    """Parameters of an image's pixels that `limit` takes."""
    drops_zeros: ClassVar[bool] = False
    """Whether the model leaves out crops whose pixels are all zero. `arguments` returns none."""
    marks_images: ClassVar[str | None] = None
    """Argument of models in which the tokens of an image see each other: which tokens these are."""

    def __init__(self, processor: Any, patch: Sequence[int] | None):
        """`processor` is transformers', of Pillow's backend; `patch` as of `ImageProcessor`."""
        self.processor, self.image_processor, self._patch = processor, processor.image_processor, patch

    @classmethod
    def processor_kind(cls) -> type:
        """Transformers' class of the processor."""
        from transformers.models.auto.processing_auto import processor_class_from_name

        kind: type = processor_class_from_name(cls.processor_class)
        return kind

    @classmethod
    def mask_argument(cls, config: Any) -> str | None:
        """`marks_images`, if a model of this config needs it; None where the tokens of images see those before them."""
        return cls.marks_images

    @classmethod
    def layers_read(cls, config: Any) -> list[int] | None:
        """Layers of the tower whose outputs the projector reads, from 1, or from the end; None: it reads the last."""
        read = getattr(config, "vision_feature_layer", None)
        return [read] if isinstance(read, int) else read

    @property
    def fill_token(self) -> str:
        """Each token that the pixels of an image fill; most families use their placeholder."""
        return str(self.processor.image_token)

    @abstractmethod
    def limit(self, most: int | None, fewest: int | None) -> None:
        """Set the limits of an image's pixels; None keeps the processor's own, and one of them is given.

        Raises:
            UserError: the family has no such limit, or they contradict each other.
        """

    @abstractmethod
    def described(self, size: Size) -> Mapping[str, Any]:
        """What `replace_image_token` reads of a processed image of this size.

        Raises:
            ValueError: the processor refuses such an image.
        """

    def expansion(self, size: Size, number: int) -> str:
        """The text that replaces the placeholder of an image of this size; `number` is that of the image in its row.

        Raises:
            ValueError: the processor refuses such an image.
        """
        return str(self.processor.replace_image_token(self.described(size), 0))

    @abstractmethod
    def patches(self, size: Size) -> int:
        """Patches of an image of this size in the vision tower.

        Raises:
            ValueError: the processor refuses such an image.
        """

    def patches_of(self, height: int, width: int) -> int:
        """Patches of so many pixels by the config of the tower: most processors do not know its patches."""
        patch_height, patch_width = self._patch or self._patch_of_class
        return (height // patch_height) * (width // patch_width)

    @cached_property
    def _patch_of_class(self) -> tuple[int, int]:
        """Height and width of a patch where config.json has none."""
        from transformers import AutoConfig

        size: Any = AutoConfig.for_model(self.models[0]).vision_config.patch_size
        return tuple(size) if isinstance(size, list | tuple) else (size, size)

    def frame(self, size: Size) -> Size | None:
        """The size of a processed image, if those of a batch are padded to the largest; else None."""
        return None

    def arguments(self, images: Sequence["Image"]) -> dict[str, Any]:
        """The model's arguments for images, as the processor returns them.

        Raises:
            ValueError: the processor refuses an image.
        """
        import torch

        made, _ = self.processor._process_images(list(images), **self._options, return_tensors="np")
        unused = self.processor.unused_input_names
        names = [name for name in self.image_processor.model_input_names if name not in unused]
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


def refuse_limits(most: int | None, fewest: int | None, reason: str) -> None:
    """Refuse a limit that the family lacks."""
    name, value = (MOST, most) if most is not None else (FEWEST, fewest)
    if value is not None:
        raise UserError(f"{name}: cannot be set for this model: {reason}; got {value}; leave it blank")


def blank(size: Size) -> "Image":
    """A black image."""
    from PIL import Image

    return Image.new("RGB", (size.width, size.height))


def vision_patch(config: dict[str, Any]) -> list[int] | None:
    """Height and width in pixels of a patch of the vision tower; None if config.json leaves them to its class."""
    vision = config.get("vision_config")
    size = vision.get("patch_size") if isinstance(vision, dict) else None
    sizes: list[Any] = size if isinstance(size, list) else [size, size]
    return sizes if len(sizes) == 2 and all(type(edge) is int and edge > 0 for edge in sizes) else None


def config_facts(config: dict[str, Any]) -> dict[str, Any]:
    """What the tokenizer's lock has of a model's config.json: the patches of its tower, by which tokens differ."""
    patch = vision_patch(config)
    return {} if patch is None else {"vision_patch": patch}
