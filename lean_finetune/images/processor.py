"""The image processor of a model: pixel values, and the text that stands for an image.

transformers' processor is the authority for both. It runs on Pillow and NumPy, so that pixel values are the same on
every machine, with or without torchvision.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError

from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.images.families import IMAGE_FAMILIES, MODELS
from lean_finetune.images.image_family import ImageFamily, Size, blank, vision_patch
from lean_finetune.pinning.config_file import CONFIG_FILE, json_object

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a processor. One of them is in the directory of every model that takes images."""
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, ArithmeticError, MemoryError),
    *(StrictDataclassError, AssertionError),
)
"""Exceptions of transformers for damaged files of a processor."""
OLD_LIMITS = ("min_pixels", "max_pixels")
"""Keys of older files, which transformers prefers to those of `size`."""


class ImageProcessor:
    """Turns images into the arguments of a model, and their placeholders into the tokens that they fill."""

    def __init__(
        self,
        directory: Path,
        *,
        patch: Sequence[int] | None = None,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
    ):
        """Load the processor of a model's directory.

        Args:
            directory: has the processor's and the tokenizer's files.
            patch: height and width in pixels of a patch of the vision tower; None: those of config.json in `directory`,
                or else of the family's class.
            max_pixels: larger images are made smaller; None: the processor's own limit.
            min_pixels: smaller images are made larger; None: the processor's own limit.

        Raises:
            UserError: the model has no processor of images, or it has no such limits, or they contradict each other.
        """
        self._family = _load(directory, patch)
        self._processor = self._family.processor
        if max_pixels is not None or min_pixels is not None:
            self._family.limit(max_pixels, min_pixels)
        self.image_token: str = self._processor.image_token
        """An image's placeholder in the chat template's rendering."""
        self.fill_token = self._family.fill_token
        """Each token that its pixels fill."""
        self.drops_zeros = self._family.drops_zeros
        self.name = self._family.processor_class
        """transformers' class."""

    def check_image_token(self, image_token_id: int) -> None:
        """Refuse the config of a model that looks for images at other tokens than its tokenizer makes."""
        number = self._processor.tokenizer.convert_tokens_to_ids(self.fill_token)
        if number != image_token_id:
            raise UserError(
                f"model.name: image_token_id in {CONFIG_FILE} must be the tokenizer's id of {self.fill_token!r}, "
                f"{number}; got {image_token_id}; download or save the model again"
            )

    def arguments(self, images: Sequence[Sequence["Image"]]) -> dict[str, Any]:
        """The model's arguments for the images of several rows, such as pixel_values, as the processor returns them.

        Raises:
            RowFault: the processor refuses an image.
        """
        try:
            return self._family.arguments([image for row in images for image in row])
        except ValueError as error:
            raise _refused("an image", error) from None

    @cache  # noqa: B019 - the processor lives as long as the process
    def expansion(self, size: Size, number: int = 0) -> str:
        """The text that replaces the placeholder of an image of this size, the row's image of a number from 0.

        Raises:
            RowFault: the processor refuses such an image.
        """
        try:
            return self._family.expansion(size, number)
        except ValueError as error:
            raise _refused(f"{size.width} x {size.height} pixels", error) from None

    @cache  # noqa: B019
    def tokens(self, size: Size) -> int:
        """Tokens of an image of this size, with those of its family's text around and between its pixels.

        Raises:
            RowFault: the processor refuses such an image.
        """
        return len(self._processor.tokenizer(self.expansion(size), add_special_tokens=False)["input_ids"])

    @cache  # noqa: B019
    def patches(self, size: Size) -> int:
        """Patches of an image of this size in the vision tower.

        Raises:
            RowFault: the processor refuses such an image.
        """
        try:
            return self._family.patches(size)
        except ValueError as error:
            raise _refused(f"{size.width} x {size.height} pixels", error) from None

    def frame(self, size: Size) -> Size | None:
        """The size of a processed image, if the family pads those of a batch to the largest."""
        return self._family.frame(size)


def _refused(what: str, error: ValueError) -> RowFault:
    return RowFault(f"the image processor refuses {what} ({error}); change or remove it")


def image_family(directory: Path) -> type[ImageFamily] | None:
    """The family of a model that is trained with images; None for another model.

    As in transformers, the class of the processor is the one that its files name, or else that of the model's type.

    Raises UserError if a file of the processor is damaged.
    """
    found = [directory / name for name in PROCESSOR_FILES if (directory / name).is_file()]
    named = next(filter(None, (json_object(path).get("processor_class") for path in found)), None)
    config = directory / CONFIG_FILE
    # Of a hub model, only the tokenizer's and the processor's files may be here.
    model = json_object(config).get("model_type") if config.is_file() else None
    for family in IMAGE_FAMILIES if found else ():
        if (model is None or model in family.models) and (named or family.processor_class) == family.processor_class:
            return family if named or model else None
    return None


def _load(directory: Path, patch: Sequence[int] | None = None) -> ImageFamily:
    """The processor of a model, without its part for videos, which needs torchvision."""
    family = image_family(directory)
    if patch is None and (config := directory / CONFIG_FILE).is_file():
        patch = vision_patch(json_object(config))
    if family is None:
        raise UserError(
            f"model.name: {directory} has no processor of images that is supported; choose a model of one of these "
            f"families: {', '.join(MODELS)}"
        )
    try:
        known = family.processor_kind()
        kind: Any = type(known.__name__, (_WithoutVideos, known), {"__module__": known.__module__})
        loaded = family(
            kind.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False, backend="pil"), patch
        )
        with suppress(ValueError):  # It refuses this image, as it then does those of rows.
            size = Size(64, 64)  # Values of another type or range make it fail.
            loaded.expansion(size, 0)
            loaded.patches(size)
            loaded.arguments([blank(size)])
        return loaded
    except UNREADABLE as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(
            f"model.name: the {family.processor_class} in {directory} cannot be read ({first}); download or save it "
            "again"
        ) from None


def write_limits(base: Path, out: Path, *, max_pixels: int | None, min_pixels: int | None) -> None:
    """Write limits into the processor's files in `out`, copies of those in `base`, so that images have the same size.

    Raises:
        UserError: as `ImageProcessor`.
    """
    family = _load(base)
    before = family.image_processor.to_dict()
    family.limit(max_pixels, min_pixels)
    changed = {name: value for name, value in family.image_processor.to_dict().items() if value != before[name]}
    for path in (out / name for name in PROCESSOR_FILES if (out / name).is_file()):
        content = json_object(path)
        section = content.get("image_processor") if path.name == PROCESSOR_FILES[0] else content
        if section is not None and changed:  # Else they are its own limits.
            kept = {name: value for name, value in section.items() if name not in OLD_LIMITS}
            section.clear()
            section.update(kept | changed)
        content.setdefault("processor_class", family.processor_class)
        write_json(path, content)


class _WithoutVideos:
    """Mixed into a family's processor: it has no part for videos."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts of the processor, in the order of its constructor's arguments."""
        return [name for name in super().get_attributes() if name != "video_processor"]  # type: ignore[misc]
