"""Families whose images have crops of one size: one of them, or several with a small form of the whole image."""

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from lean_finetune.config.field_types import MAX_PIXELS
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_family import FEWEST, MOST, ImageFamily, Size, blank, check_limits, refuse_limits

if TYPE_CHECKING:
    from PIL.Image import Image


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


class Granite4Vision(LlavaNext):
    """Granite 4 Vision: images as in LLaVA-Next, and features of several layers of the tower."""

    processor_class, models = "Granite4VisionProcessor", ("granite4_vision",)

    @classmethod
    def layers_read(cls, config: Any) -> list[int]:
        """See the base class."""
        return [*(layer for layer, _ in config.deepstack_layer_map), config.spatial_vision_layer]


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


class Ovis2(ImageFamily):
    """Ovis 2: crops of one size, and a small form of the image if it has several."""

    processor_class, models = "Ovis2Processor", ("ovis2",)
    limits = (MOST,)

    @property
    def fill_token(self) -> str:
        """See the base class."""
        return "<IMG_ATOM>"

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class. The most pixels limit the number of crops."""
        refuse_limits(None, fewest, f"{self.processor_class} chooses the number of crops")
        assert most is not None
        crop = self._crop.height * self._crop.width
        if most < crop:
            raise UserError(f"{MOST}: must hold one crop of {crop} pixels; got {most}; raise it")
        self.image_processor.max_patches = min(most // crop, self.image_processor.max_patches)

    @property
    def _crop(self) -> Size:
        """Pixels of a crop."""
        return Size(self.image_processor.size.height, self.image_processor.size.width)

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        images: Any = self.image_processor
        module: Any = sys.modules[type(images).__module__]
        columns, rows = 1, 1
        if images.crop_to_patches and images.max_patches > 1 and images.use_covering_area_grid:
            columns, rows = module.get_min_tile_covering_grid(tuple(size), self._crop.height, images.max_patches)
        elif images.crop_to_patches and images.max_patches > 1:
            limits = images.min_patches, images.max_patches
            columns, rows = module.get_optimal_tiled_canvas(tuple(size), tuple(self._crop), *limits)
        return {"grids": np.array([[rows, columns]])}

    def patches(self, size: Size) -> int:
        """See the base class."""
        crops = int(self.described(size)["grids"].prod())
        return (crops + (crops > 1)) * self.patches_of(*self._crop)


class MiniCpmV46(ImageFamily):
    """MiniCPM-V 4.6: a small form of the image, and slices of a large one; a row's images are numbered."""

    processor_class, models = "MiniCPMV4_6Processor", ("minicpmv4_6",)
    limits = (MOST,)

    @classmethod
    def processor_kind(cls) -> type:
        """See the base class. Without the part for videos, which needs torchvision."""
        from transformers.processing_utils import ProcessorMixin

        kind: Any = super().processor_kind()

        class OfImages(ProcessorMixin):
            # Between the family's class and its base.
            def __init__(self, image_processor: Any, videos: Any, tokenizer: Any, chat_template: str | None = None):
                super().__init__(image_processor, tokenizer, chat_template=chat_template)
                self.video_processor = image_processor  # The family's class reads the same options of both.

        def init(self: Any, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            # transformers reads the names of these arguments.
            kind.__init__(self, image_processor, None, tokenizer, chat_template)

        return type(kind.__name__, (kind, OfImages), {"__module__": kind.__module__, "__init__": init})

    def limit(self, most: int | None, fewest: int | None) -> None:
        """See the base class. The most pixels limit the number of slices."""
        refuse_limits(None, fewest, f"{self.processor_class} chooses the number of slices")
        assert most is not None
        crop = self.image_processor.scale_resolution**2
        if most < crop:
            raise UserError(f"{MOST}: must hold one crop of {crop} pixels; got {most}; raise it")
        self.image_processor.max_slice_nums = min(most // crop, self.image_processor.max_slice_nums)

    def described(self, size: Size) -> Mapping[str, Any]:
        """See the base class."""
        images: Any = self.image_processor
        edge, patch, mode = images.scale_resolution, images.patch_size, images.downsample_mode
        grid = images.get_sliced_grid(tuple(size), images.max_slice_nums, edge) if images.slice_mode else None
        sizes = [images.find_best_resize(tuple(size), edge, patch, mode, allow_upscale=grid is None)]
        if grid is not None:
            rows, columns = grid
            height, width = images.get_refine_size(tuple(size), grid, edge, patch, mode, allow_upscale=True)
            sizes += [(height // rows, width // columns)] * (rows * columns)
        return {
            "grids": [grid or [0, 0]],
            "num_patches_per_image": [len(sizes)],
            "target_sizes": np.array(sizes) // patch,
        }

    def expansion(self, size: Size, number: int) -> str:
        """See the base class."""
        own: Any = self.processor
        text = own.replace_image_token(self.described(size), 0, image_token_divisor=own.image_token_divisor)
        numbered = own.default_use_image_id if own.use_image_id is None else own.use_image_id
        return f"{own.image_id_start_token}{number}{own.image_id_end_token}{text}" if numbered else str(text)

    def patches(self, size: Size) -> int:
        """See the base class."""
        return int(self.described(size)["target_sizes"].prod(-1).sum())


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
