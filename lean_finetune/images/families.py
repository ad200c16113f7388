"""The families of models that are trained with images: what each one's processor makes of an image of some size."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isqrt
from typing import Any

import numpy as np

from lean_finetune.core.errors import UserError
from lean_finetune.images.crop_families import (
    Granite4Vision,
    Idefics3,
    InternVL,
    Llava,
    LlavaNext,
    MiniCpmV46,
    Ovis2,
    SmolVLM,
)
from lean_finetune.images.image_family import FEWEST, MOST, ImageFamily, Size, check_limits, refuse_limits
from lean_finetune.patches.of_imports import PIXTRAL_WITH_PILLOW


class QwenFamily(ImageFamily):
    """Qwen's processors: an image keeps its proportions, and the size of the processor counts its pixels."""

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class."""
        size = dict(self.image_processor.size or {})
        low = size["shortest_edge"] if fewest is None else fewest * self._times
        high = size["longest_edge"] if most is None else most * self._times
        token = (self.image_processor.patch_size * self.image_processor.merge_size) ** 2
        if high < token * self._times:  # An image has a token at least.
            raise UserError(f"{MOST}: must hold one token of {token} pixels; got {high // self._times}; raise it")
        check_limits(MOST if most is not None else FEWEST, low // self._times, high // self._times)
        limited = {**size, "shortest_edge": low, "longest_edge": high}
        self.image_processor.size = type(self.image_processor.size)(**limited)

    @property
    def _times(self) -> int:
        """How many times the size of the processor counts a pixel."""
        return 1

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


class GlmFamily(QwenFamily):
    """GLM's processors, as Qwen's; their size counts the pixels of an image as those of a video."""

    @property
    def _times(self) -> int:
        """See the base class. An image stands for as many frames as a patch has."""
        return int(self.image_processor.temporal_patch_size)


class Glm4V(GlmFamily):
    """GLM-4.1V and GLM-4.5V."""

    processor_class, models = "Glm4vProcessor", ("glm4v", "glm4v_moe")


class Glm46V(GlmFamily):
    """GLM-4.6V, which is of the types of GLM-4.1V and GLM-4.5V too, and GLM-OCR."""

    processor_class, models = "Glm46VProcessor", ("glm46v", "glm_ocr", "glm4v", "glm4v_moe")


class PaddleOcrVL(QwenFamily):
    """PaddleOCR-VL."""

    processor_class, models = "PaddleOCRVLProcessor", ("paddleocr_vl",)


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


IMAGE_FAMILIES: tuple[type[ImageFamily], ...] = (
    *(Qwen25VL, Qwen2VL, Qwen3VL, Glm4V, Glm46V, PaddleOcrVL),
    *(Llava, LlavaNext, Granite4Vision, Pixtral, Gemma3, Gemma4, InternVL, Ovis2, MiniCpmV46),
    *(SmolVLM, Idefics3),
)
"""Families that are trained with images. Of those with the same models, the first is for files that name none."""
MODELS = tuple(sorted({model for family in IMAGE_FAMILIES for model in family.models}))
"""Values of model_type of these families."""
REFUSED: Mapping[str, str] = {
    "gemma3n": "its vision tower is code of the package timm",
    "minicpmv4_7": "the positions of its images follow from the text around them, which a prediction lacks",
    "mllama": "its images reach the decoder through layers that rows without images skip",
    **dict.fromkeys(
        ("gemma4_unified", "kimi_k25", "lfm2_vl", "llama4", "molmo2"),
        "transformers resizes its images with torchvision alone, and pixels are made by Pillow here",
    ),
}
"""Why rows with images are not offered for other models, by model_type."""
MASK_ARGUMENTS = tuple(family.marks_images for family in IMAGE_FAMILIES if family.marks_images is not None)
"""What these families' models may be told of the tokens of images."""


def family_of_images(model_type: object) -> type[ImageFamily] | None:
    """The family of a model whose files name no processor; None for models that are not trained with images."""
    return next((family for family in IMAGE_FAMILIES if model_type in family.models), None)


def not_offered(model_type: str) -> str:
    """The refusal of rows with images for a family that is not listed, up to a further remedy."""
    reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
    return (
        f"model.name: rows with images are not offered for {model_type}{reason}; choose a model of {', '.join(MODELS)}"
    )
