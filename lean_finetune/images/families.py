"""The families of models that are trained with images: what each one's processor makes of an image of some size."""

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from lean_finetune.config.field_types import MAX_PIXELS
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_family import (
    FEWEST,
    MOST,
    ImageFamily,
    Size,
    blank,
    check_limits,
    refuse_limits,
)
from lean_finetune.patches.of_imports import PIXTRAL_WITH_PILLOW

if TYPE_CHECKING:
    from PIL.Image import Image


class QwenFamily(ImageFamily):
    """Qwen's processors: an image keeps its proportions, and the size of the processor counts its pixels."""

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class."""
        size = dict(self.image_processor.size or {})
        low, high = fewest or size["shortest_edge"], most or size["longest_edge"]
        token = (self.image_processor.patch_size * self.image_processor.merge_size) ** 2
        if high < token:  # An image has a token at least.
            raise UserError(f"{MOST}: must hold one token of {token} pixels; got {high}; raise it")
        check_limits(MOST if most is not None else FEWEST, low, high)
        limited = {**size, "shortest_edge": low, "longest_edge": high}
        self.image_processor.size = type(self.image_processor.size)(**limited)

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        import torch

        return {"image_grid_thw": torch.tensor([[1, 1, self.patches(size)]])}  # The text follows from their product.

    def patches(self, size: Size) -> int:
        """See the base class."""
        return int(self.image_processor.get_number_of_image_patches(size.height, size.width, {}))


class Qwen2VL(QwenFamily):
    """Qwen2-VL."""

    processor_class, models = "Qwen2VLProcessor", ("qwen2_vl", "qwen2_5_vl")


class Qwen25VL(QwenFamily):
    """Qwen2.5-VL."""

    processor_class, models = "Qwen2_5_VLProcessor", ("qwen2_5_vl",)


class Qwen3VL(QwenFamily):
    """Qwen3-VL and Qwen3.5 (so 3.6 and 3.8 too), and their mixtures of experts."""

    processor_class, models = "Qwen3VLProcessor", ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


class Llava(ImageFamily):
    """LLaVA 1.5: every image is resized and cut to one size."""

    processor_class, models = "LlavaProcessor", ("llava",)
    limits = ()

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class."""
        height, width = self._shape
        refuse_limits(most, fewest, f"{self.processor_class} makes {width} x {height} pixels of every image")

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        short = self.image_processor.size.shortest_edge
        if short and short**2 * max(size) / min(size) > MAX_PIXELS:
            raise ValueError(f"with {short} pixels of its shorter edge it would have over {MAX_PIXELS:,}")
        return self._blank

    def patches(self, size: Size) -> int:
        """See the base class."""
        height, width = self._shape
        return (height // self.processor.patch_size) * (width // self.processor.patch_size)

    @cached_property
    def _blank(self) -> dict[str, Any]:
        """A processed image, as large as any other."""
        images = self.image_processor
        if not images.do_center_crop and not (images.do_resize and images.size.height and images.size.width):
            raise ValueError("do_center_crop is off, so that images of different sizes cannot be in one batch")
        return ImageFamily.arguments(self, [blank(Size(64, 64))])

    @property
    def _shape(self) -> Size:
        """Pixels of every processed image, or of every crop."""
        return Size(*self._blank["pixel_values"].shape[-2:])


class LlavaNext(Llava):
    """LLaVA-Next: a small form of the image, and crops of a large one, whose size is the best of a list."""

    processor_class, models = "LlavaNextProcessor", ("llava_next",)

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class."""
        refuse_limits(
            most, fewest, f"image_grid_pinpoints of {self.processor_class} and of config.json decide the size"
        )

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        return {"pixel_values": self._blank["pixel_values"][None], "image_sizes": [tuple(size)]}

    def patches(self, size: Size) -> int:
        """See the base class."""
        return self._crops(size) * super().patches(size)

    def _crops(self, size: Size) -> int:
        """Crops of an image of this size, and its small form."""
        from transformers.image_processing_utils import select_best_resolution

        height, width = select_best_resolution(tuple(size), self.image_processor.image_grid_pinpoints)
        return -(-height // self._shape.height) * -(-width // self._shape.width) + 1

    def arguments(self, images: Sequence["Image"]) -> dict[str, Any]:
        """See the base class. The model also takes all crops in one list, without those that pad images with few."""
        import torch

        made = super().arguments(images)
        counts = [self._crops(Size(*size)) for size in made["image_sizes"].tolist()]
        crops = [image[:count] for image, count in zip(made["pixel_values"].numpy(), counts, strict=True)]
        return {**made, "pixel_values": torch.from_numpy(np.concatenate(crops))}


class Pixtral(ImageFamily):
    """Pixtral and Mistral Small 3: an image keeps its proportions, and no edge is longer than a limit."""

    processor_class, models = "PixtralProcessor", ("mistral3", "llava")
    limits = (MOST,)

    @classmethod
    def processor_kind(cls) -> type:
        """See the base class. Without torchvision, the module of the class imports only with Pillow's functions."""
        from transformers.models.pixtral import image_processing_pil_pixtral
        from transformers.utils.import_utils import is_torchvision_available

        if is_torchvision_available():
            return super().processor_kind()
        with PIXTRAL_WITH_PILLOW.importing(image_processing_pil_pixtral):
            kind: type = import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
        return kind

    def __init__(self, processor: Any, patch: Sequence[int] | None):
        """See the base class."""
        super().__init__(processor, patch)
        if not self.image_processor.size.longest_edge:
            raise ValueError("its size has no longest_edge")

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class. The longest edge becomes that of a square with the most pixels."""
        refuse_limits(None, fewest, f"{self.processor_class} makes no image larger")
        assert most is not None
        token = self.processor.patch_size * self.processor.spatial_merge_size
        if most < token**2:  # An image has a token at least.
            raise UserError(f"{MOST}: must hold one token of {token**2} pixels; got {most}; raise it")
        edge = min(isqrt(most), self.image_processor.size.longest_edge)
        self.image_processor.size = type(self.image_processor.size)(longest_edge=edge)

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        from transformers.image_utils import ChannelDimension

        resized: Any = sys.modules[type(self.processor).__module__].get_resize_output_image_size
        edge = self.image_processor.size.longest_edge
        patch_size = self.processor.patch_size * self.processor.spatial_merge_size
        image = np.broadcast_to(np.uint8(0), (3, *size))
        found = resized(image, (edge, edge), (patch_size, patch_size), ChannelDimension.FIRST)
        if not all(found):
            raise ValueError(f"resized to {edge} pixels, its shorter edge would have none")
        if found == (patch_size, patch_size) and self.processor.spatial_merge_size > 1:
            raise ValueError("of one token, at which the code of Mistral 3 in transformers fails")
        return {"image_sizes": [found]}

    def patches(self, size: Size) -> int:
        """See the base class."""
        height, width = self.frame(size)
        return (height // self.processor.patch_size) * (width // self.processor.patch_size)

    def frame(self, size: Size) -> Size:
        """See the base class."""
        return Size(*self.described(size)["image_sizes"][0])


class Gemma3(ImageFamily):
    """Gemma 3: every image is resized to one square, and has the same number of tokens, which see each other."""

    processor_class, models = "Gemma3Processor", ("gemma3",)
    limits = ()
    marks_images = "token_type_ids"

    def __init__(self, processor: Any, patch: Sequence[int] | None):
        """See the base class."""
        super().__init__(processor, patch)
        if self.image_processor.do_pan_and_scan or self._options.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan, which cuts images into crops, was not tried: set it to false there")

    @property
    def fill_token(self) -> str:
        """See the base class: the placeholder stands in front of the image's tokens."""
        return str(self.processor.tokenizer.image_token)

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class."""
        height, width = self.image_processor.size.height, self.image_processor.size.width
        refuse_limits(most, fewest, f"{self.processor_class} makes {width} x {height} pixels of every image")

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        return {"num_crops": [0]}

    def patches(self, size: Size) -> int:
        """See the base class."""
        return self.patches_of(self.image_processor.size.height, self.image_processor.size.width)


class Gemma4(ImageFamily):
    """Gemma 4: an image keeps its proportions, and is padded to the largest number of patches."""

    processor_class, models = "Gemma4Processor", ("gemma4",)
    limits = (MOST,)
    marks_images = "mm_token_type_ids"

    @classmethod
    def mask_argument(cls, config: Any) -> str | None:
        """See the base class."""
        sees = config.get_text_config().use_bidirectional_attention == "vision"
        return cls.marks_images if sees else None

    @classmethod
    def processor_kind(cls) -> type:
        """See the base class. Without the parts for audio and video, which need other packages."""
        from transformers.processing_utils import ProcessorMixin

        kind: Any = super().processor_kind()

        class OfImages(ProcessorMixin):
            # Between the family's class and its base, to which that passes all parts by name.
            def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None, **others: Any):
                super().__init__(image_processor, tokenizer, chat_template=chat_template)

        def init(
            self: Any, image_processor: Any, tokenizer: Any, chat_template: str | None = None, **more: Any
        ) -> None:
            # transformers reads the names of these arguments.
            kind.__init__(self, None, image_processor, tokenizer, None, chat_template, **more)

        return type(kind.__name__, (kind, OfImages), {"__module__": kind.__module__, "__init__": init})

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class. The most pixels become the number of tokens of the processor that has no more."""
        refuse_limits(None, fewest, f"{self.processor_class} makes every image as large as its tokens allow")
        assert most is not None
        known: tuple[int, ...] = sys.modules[type(self.image_processor).__module__]._SUPPORTED_SOFT_TOKENS
        token = (self.image_processor.patch_size * self.image_processor.pooling_kernel_size) ** 2
        fitting = [tokens for tokens in known if tokens * token <= most]
        if not fitting:
            raise UserError(f"{MOST}: must hold {known[0]} tokens of {token} pixels each; got {most}; raise it")
        self.image_processor.max_soft_tokens = min(fitting[-1], self.image_processor.max_soft_tokens)

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        images: Any = self.image_processor
        resized: Any = sys.modules[type(images).__module__].get_aspect_ratio_preserving_size
        height, width = resized(*size, images.patch_size, self.patches(size), images.pooling_kernel_size)
        edge = images.patch_size * images.pooling_kernel_size
        return {"num_soft_tokens_per_image": [(height // edge) * (width // edge)]}

    def patches(self, size: Size) -> int:
        """See the base class. Every image is padded to them."""
        return int(self.image_processor.max_soft_tokens * self.image_processor.pooling_kernel_size**2)


class InternVL(ImageFamily):
    """InternVL: crops of one size, and a small form of the image if it has several."""

    processor_class, models = "InternVLProcessor", ("internvl",)

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class. They limit the number of crops."""
        crop = self._crop.height * self._crop.width
        low = self.image_processor.min_patches if fewest is None else -(-fewest // crop)
        high = self.image_processor.max_patches if most is None else most // crop
        if not high:
            raise UserError(f"{MOST}: must hold one crop of {crop} pixels; got {most}; raise it")
        check_limits(MOST if most is not None else FEWEST, low * crop, high * crop)
        self.image_processor.min_patches, self.image_processor.max_patches = low, high

    @property
    def _crop(self) -> Size:
        """Pixels of a crop."""
        return Size(self.image_processor.size.height, self.image_processor.size.width)

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        count = self.image_processor.get_number_of_image_patches(size.height, size.width, self._options)
        return {"num_patches": [count]}

    def patches(self, size: Size) -> int:
        """See the base class."""
        return int(self.described(size)["num_patches"][0]) * self.patches_of(*self._crop)


class Idefics3(ImageFamily):
    """Idefics 3 and the first SmolVLM: crops of one size, and a small form of the image."""

    processor_class, models = "Idefics3Processor", ("idefics3",)
    limits = (MOST,)
    drops_zeros = True

    def __init__(self, processor: Any, patch: Sequence[int] | None):
        """See the base class."""
        super().__init__(processor, patch)
        longest, crop = self.image_processor.size["longest_edge"], self._crop
        # transformers would count other crops than it makes.
        if self.image_processor.do_image_splitting and longest % crop:
            raise ValueError(f"its longest edge of {longest} pixels is no multiple of a crop's, {crop}")

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class. The longest edge becomes a number of crops."""
        crop = self._crop
        refuse_limits(None, fewest, f"{self.processor_class} gives every image the same longest edge")
        assert most is not None
        if most < crop**2:
            raise UserError(f"{MOST}: must hold one crop of {crop**2} pixels; got {most}; raise it")
        edge = min(isqrt(most) // crop * crop, self.image_processor.size["longest_edge"])
        self.image_processor.size = type(self.image_processor.size)(longest_edge=edge)

    @property
    def _crop(self) -> int:
        """Pixels of an edge of a crop."""
        return int(self.image_processor.max_image_size["longest_edge"])

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        _, rows, columns = self.image_processor.get_number_of_image_patches(size.height, size.width, self._options)
        return {"rows": [[rows]], "cols": [[columns]]}

    def patches(self, size: Size) -> int:
        """See the base class."""
        found = self.described(size)
        return int(found["rows"][0][0] * found["cols"][0][0] + 1) * self.patches_of(self._crop, self._crop)

    def arguments(self, images: Sequence["Image"]) -> dict[str, Any]:
        """See the base class. All crops have one size, so that a mask of their pixels says nothing."""
        made = super().arguments(images)
        if bool(made["pixel_attention_mask"].all()):
            del made["pixel_attention_mask"]
        return made


class SmolVLM(Idefics3):
    """SmolVLM 2."""

    processor_class, models = "SmolVLMProcessor", ("smolvlm",)

    @classmethod
    def processor_kind(cls) -> type:
        """See the base class. For videos it asks for a package that writes numbers in words, and for a processor."""
        kind: Any = super().processor_kind()
        module: Any = sys.modules[kind.__module__]
        module.num2words = module.num2words or _no_videos

        class OfImages(kind):
            # transformers reads the names of these arguments.
            def __init__(
                self,
                image_processor: Any,
                tokenizer: Any,
                video_processor: Any = None,
                image_seq_len: int = 169,
                chat_template: str | None = None,
            ):
                super().__init__(image_processor, tokenizer, video_processor, image_seq_len, chat_template)

        OfImages.__name__, OfImages.__module__ = kind.__name__, kind.__module__
        return OfImages


def _no_videos(number: int) -> str:
    raise NotImplementedError("videos are not trained")


IMAGE_FAMILIES: tuple[type[ImageFamily], ...] = (
    *(Qwen25VL, Qwen2VL, Qwen3VL),
    *(Llava, LlavaNext, Pixtral, Gemma3, Gemma4, InternVL, SmolVLM, Idefics3),
)
"""Families that are trained with images. Of those with the same models, the first is for files that name none."""
MODELS = tuple(sorted({model for family in IMAGE_FAMILIES for model in family.models}))
"""Values of model_type of these families."""
MASK_ARGUMENTS = tuple(family.marks_images for family in IMAGE_FAMILIES if family.marks_images is not None)
"""What these families' models may be told of the tokens of images."""


def family_of_images(model_type: object) -> type[ImageFamily] | None:
    """The family of a model whose files name no processor; None for models that are not trained with images."""
    return next((family for family in IMAGE_FAMILIES if model_type in family.models), None)
