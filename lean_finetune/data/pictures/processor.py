"""The image processor of a model: pixel values, and the text that stands for a picture.

transformers' processor is the authority for both. It runs on Pillow and NumPy, so that pixel values are the same on
every machine, with or without torchvision.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import RowFault
from lean_finetune.pinning.config_file import CONFIG_FILE

if TYPE_CHECKING:
    from PIL.Image import Image

PIXEL_LIMITS = ("shortest_edge", "longest_edge")
"""Keys of a processor's size, of which some families count the pixels of a picture."""


class Size(NamedTuple):
    """Pixels of a picture, which decide how many tokens and patches it has."""

    height: int
    width: int


class PictureProcessor:
    """Turns pictures into the arguments of a model, and their placeholders into the tokens that they fill."""

    def __init__(self, directory: Path, *, max_pixels: int | None = None, min_pixels: int | None = None):
        """Load the processor of a model's directory.

        Args:
            directory: has the processor's and the tokenizer's files.
            max_pixels: larger pictures are made smaller; None: the processor's own limit.
            min_pixels: smaller pictures are made larger; None: the processor's own limit.

        Raises:
            UserError: the model has no processor of images, or the limits contradict each other.
        """
        self._processor = _load(directory)
        self._limit(max_pixels, min_pixels)
        self.image_token: str = self._processor.image_token
        """A picture's placeholder in the chat template's rendering, and each token that its pixels fill."""

    def _limit(self, max_pixels: int | None, min_pixels: int | None) -> None:
        """Set the limits of a picture's pixels."""
        given = {"data.image_max_pixels": max_pixels, "data.image_min_pixels": min_pixels}
        name = next((name for name, value in given.items() if value is not None), None)
        if name is None:
            return
        images = self._processor.image_processor
        size = dict(images.size or {})
        low, high = min_pixels or size[PIXEL_LIMITS[0]], max_pixels or size[PIXEL_LIMITS[1]]
        if low > high:
            raise UserError(
                f"{name}: the fewest pixels must not be over the most; got {low} and {high}; change one of them"
            )
        images.size = type(images.size)(**{**size, PIXEL_LIMITS[0]: low, PIXEL_LIMITS[1]: high})

    def arguments(self, pictures: Sequence[Sequence["Image"]]) -> dict[str, Any]:
        """The model's arguments for the pictures of several rows, such as pixel_values, as the processor returns them.

        Raises:
            RowFault: the processor refuses a picture.
        """
        import torch

        flat = [picture for row in pictures for picture in row]
        try:
            made = self._processor.image_processor(flat, return_tensors="np")
        except ValueError as error:
            raise RowFault(f"the image processor refuses a picture ({error}); change or remove it") from None
        # In NumPy's memory: what a loader thread reads ahead must not count in the memory of the step on a CPU.
        return {name: torch.from_numpy(value) for name, value in made.items()}

    @cache  # noqa: B019 - the processor lives as long as the process
    def expansion(self, size: Size) -> str:
        """The text that replaces the placeholder of a picture of this size.

        Raises:
            RowFault: the processor refuses such a picture.
        """
        import torch

        grid = torch.tensor([[1, 1, self.patches(size)]])  # The text follows from the number of patches.
        return str(self._processor.replace_image_token({"image_grid_thw": grid}, 0))

    @cache  # noqa: B019
    def patches(self, size: Size) -> int:
        """Patches of a picture of this size in the vision tower.

        Raises:
            RowFault: the processor refuses such a picture.
        """
        images = self._processor.image_processor
        try:
            return int(images.get_number_of_image_patches(size.height, size.width, {}))
        except ValueError as error:
            raise RowFault(
                f"the image processor refuses {size.width} x {size.height} pixels ({error}); change or remove it"
            ) from None


def picture_family(directory: Path) -> str | None:
    """The class of the processor of a model that is trained with pictures; None for another model.

    Raises UserError if a file of the processor is damaged.
    """
    config = directory / CONFIG_FILE
    if config.is_file():
        family = read_json(config).get("model_type")
        has_processor = any((directory / name).is_file() for name in PROCESSOR_FILES)
        return FAMILIES.get(family) if has_processor else None
    # Of a hub model, only the tokenizer's and the processor's files may be here.
    for name in PROCESSOR_FILES:
        if (directory / name).is_file() and (found := read_json(directory / name).get("processor_class")) is not None:
            return str(found) if found in FAMILIES.values() else None
    return None


def _load(directory: Path) -> Any:
    """The processor of a model, without its part for videos, which needs torchvision."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    family = picture_family(directory)
    if family is None:
        raise UserError(
            f"model.name: {directory} has no processor of pictures that is supported; choose a model of one of these "
            f"families: {', '.join(FAMILIES)}"
        )
    try:
        known = processor_class_from_name(family)
        kind: Any = type(known.__name__, (_WithoutVideos, known), {"__module__": known.__module__})
        return kind.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False, backend="pil")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"model.name: the {family} in {directory} cannot be read ({first}); download or save it again"
        ) from None


class _WithoutVideos:
    """Mixed into a family's processor: it has no part for videos."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts of the processor, in the order of its constructor's arguments."""
        return [name for name in super().get_attributes() if name != "video_processor"]  # type: ignore[misc]


FAMILIES = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
"""Families that are trained with pictures, and their processors."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def blank(size: Size) -> "Image":
    """A black picture."""
    from PIL import Image

    return Image.new("RGB", (size.width, size.height))
