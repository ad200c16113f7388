"""The image processor of a model of which only config.json is here: a prediction needs no more of it.

Sizes are those of config.json, with transformers' values for what it leaves out; the rest is what the family is
published with. Where the tokenizer is not here, one is made that knows the family's tokens for images alone.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig

from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.images.processor import PROCESSOR_FILES, ImageProcessor
from lean_finetune.pinning.config_file import CONFIG_FILE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WORDS = r"_col|-?\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s+"
"""Each match is one token of the text between an image's special tokens: line breaks, and in Idefics 3 the names of
crops, which Llama 3's tokenizer divides so (`<row_1_col_1>` has 8 tokens, `<global-img>` has 4)."""

Content = dict[str, Any]
OfConfig = Callable[[Any], Content]
"""Content of a file, from the model's config."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the models of a family publish about images beside config.json."""

    tower: str | None = None
    """model_type of the vision tower, if the family's models have several."""
    images: OfConfig
    """Content of preprocessor_config.json."""
    processor: OfConfig = lambda config: {}
    """Content of processor_config.json; there is none if it is empty."""
    tokens: Callable[[Any], Sequence[str]]
    """Special tokens in an image's text."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Those that the tokenizer has as attributes."""


def _qwen(patch_size: int, fewest_pixels: int) -> Published:
    limits = {"shortest_edge": fewest_pixels, "longest_edge": (2 * patch_size) ** 2 * 16384}

    def images(config: Any) -> Content:
        vision = config.vision_config
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        in_time = {"temporal_patch_size": vision.temporal_patch_size}
        return {"image_processor_type": "Qwen2VLImageProcessor", **sizes, **in_time, "size": limits}

    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return Published(images=images, tokens=lambda config: tokens)


def _glm(processor: str) -> Published:
    limits = {"shortest_edge": 112 * 112, "longest_edge": 2 * 28**2 * 6144}  # Of two frames.

    def images(config: Any) -> Content:
        vision = config.vision_config
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        in_time = {"temporal_patch_size": vision.temporal_patch_size}
        kind = {"image_processor_type": processor.replace("Processor", "ImageProcessor"), "processor_class": processor}
        return {**kind, **sizes, **in_time, "size": limits}

    tokens = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")
    return Published(images=images, tokens=lambda config: tokens)


def _paddle() -> Published:
    limits = {"shortest_edge": 147_384, "longest_edge": 2_822_400}

    def images(config: Any) -> Content:
        vision = config.vision_config
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        return {"image_processor_type": "PaddleOCRVLImageProcessor", **sizes, "size": limits}

    named = {"image_token": "<|IMAGE_PLACEHOLDER|>"}
    tokens = ("<|IMAGE_START|>", "<|IMAGE_END|>", *named.values())
    return Published(images=images, tokens=lambda config: tokens, named=named)


def _square(config: Any) -> dict[str, int]:
    """The image that the tower takes."""
    size = config.vision_config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"height": height, "width": width}


def _gemma3() -> Published:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    return Published(
        tower="siglip_vision_model",
        images=lambda config: {"image_processor_type": "Gemma3ImageProcessor", "size": _square(config)},
        processor=lambda config: {
            "processor_class": "Gemma3Processor",
            "image_seq_length": config.mm_tokens_per_image,
        },
        tokens=lambda config: tuple(named.values()),
        named=named,
    )


def _gemma4() -> Published:
    named = {
        **{"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    }

    def images(config: Any) -> Content:
        vision = config.vision_config
        sizes = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
        return {"image_processor_type": "Gemma4ImageProcessor", **sizes}

    return Published(
        tower="gemma4_vision",
        images=images,
        processor=lambda config: {"processor_class": "Gemma4Processor"},
        tokens=lambda config: tuple(named.values()),
        named=named,
    )


def _llava(name: str, images: str, *own: str) -> Published:
    """`images`: the class of the image processor. `own`: its values that config.json has under the same name."""

    def made(config: Any) -> Content:
        crop = _square(config)
        sizes = {"size": {"shortest_edge": crop["height"]}, "crop_size": crop}
        return {"image_processor_type": images, **sizes, **{key: getattr(config, key) for key in own}}

    return Published(
        tower="clip_vision_model",
        images=made,
        processor=lambda config: {
            "processor_class": name,
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": 1,  # CLIP's class token.
        },
        tokens=lambda config: ("<image>",),
    )


def _granite4() -> Published:
    def images(config: Any) -> Content:
        crop = _square(config)
        kind = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": config.image_grid_pinpoints}
        return {**kind, "size": crop, "crop_size": crop}

    return Published(
        images=images,
        processor=lambda config: {
            "processor_class": "Granite4VisionProcessor",
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": int(config.vision_feature_select_strategy == "default"),
            "downsample_rate": config.downsample_rate,
        },
        tokens=lambda config: ("<image>",),
    )


def _pixtral() -> Published:
    def images(config: Any) -> Content:
        vision = config.vision_config
        size = {"longest_edge": vision.image_size}
        return {"image_processor_type": "PixtralImageProcessor", "size": size, "patch_size": vision.patch_size}

    return Published(
        tower="pixtral",
        images=images,
        processor=lambda config: {
            "processor_class": "PixtralProcessor",
            "patch_size": config.vision_config.patch_size,
            "spatial_merge_size": getattr(config, "spatial_merge_size", 1),
        },
        tokens=lambda config: ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    )


def _internvl() -> Published:
    named = {
        **{"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"},
        "video_token": "<video>",
    }
    return Published(
        images=lambda config: {"image_processor_type": "GotOcr2ImageProcessor", "size": _square(config)},
        processor=lambda config: {"processor_class": "InternVLProcessor", "image_seq_length": config.image_seq_length},
        tokens=lambda config: tuple(named.values()),
        named=named,
    )


def _ovis2() -> Published:
    tokens = ("<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")

    def processor(config: Any) -> Content:
        crop, patch = _square(config), config.vision_config.patch_size * config.vision_config.hidden_stride
        return {"processor_class": "Ovis2Processor", "image_seq_length": math.ceil(crop["height"] / patch) ** 2}

    return Published(
        images=lambda config: {
            **{"image_processor_type": "Ovis2ImageProcessor", "size": _square(config)},
            "crop_to_patches": True,
        },
        processor=processor,
        tokens=lambda config: tokens,
    )


def _minicpm() -> Published:
    named = {
        **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        **{"image_start_token": "<image>", "image_end_token": "</image>"},
        **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
        **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
    }

    def images(config: Any) -> Content:
        sizes = {"patch_size": config.vision_config.patch_size, "scale_resolution": config.image_size}
        return {"image_processor_type": "MiniCPMV4_6ImageProcessor", **sizes, "downsample_mode": config.downsample_mode}

    return Published(
        images=images,
        processor=lambda config: {"processor_class": "MiniCPMV4_6Processor"},
        tokens=lambda config: tuple(named.values()),
        named=named,
    )


CROP_NAMES = ("<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)))


def _idefics(name: str) -> Published:
    def images(config: Any) -> Content:
        crop = config.vision_config.image_size
        sizes = {"size": {"longest_edge": 4 * crop}, "max_image_size": {"longest_edge": crop}}
        return {"image_processor_type": f"{name}ImageProcessor", **sizes}

    def processor(config: Any) -> Content:
        vision = config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        return {"processor_class": f"{name}Processor", "image_seq_len": patches // config.scale_factor**2}

    def tokens(config: Any) -> Sequence[str]:
        added = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
        # A vocabulary that ends with these (Idefics3-8B-Llama3, SmolVLM-Instruct) has no tokens for names of crops.
        ends = config.get_text_config().vocab_size - config.image_token_id == 2
        return added if ends else (*added, *CROP_NAMES)

    return Published(images=images, processor=processor, tokens=tokens)


PUBLISHED: dict[str, Published] = {
    "qwen2_vl": _qwen(14, 56 * 56),
    "qwen2_5_vl": _qwen(14, 56 * 56),
    "qwen3_vl": _qwen(16, 256 * 256),
    "qwen3_vl_moe": _qwen(16, 256 * 256),
    "qwen3_5": _qwen(16, 256 * 256),
    "qwen3_5_moe": _qwen(16, 256 * 256),
    "glm4v": _glm("Glm4vProcessor"),
    "glm4v_moe": _glm("Glm4vProcessor"),
    "glm46v": _glm("Glm46VProcessor"),
    "glm_ocr": _glm("Glm46VProcessor"),
    "paddleocr_vl": _paddle(),
    "gemma3": _gemma3(),
    "gemma4": _gemma4(),
    "llava": _llava("LlavaProcessor", "CLIPImageProcessor"),
    "llava_next": _llava("LlavaNextProcessor", "LlavaNextImageProcessor", "image_grid_pinpoints"),
    "granite4_vision": _granite4(),
    "pixtral": _pixtral(),
    "mistral3": _pixtral(),
    "internvl": _internvl(),
    "ovis2": _ovis2(),
    "minicpmv4_6": _minicpm(),
    "smolvlm": _idefics("SmolVLM"),
    "idefics3": _idefics("Idefics3"),
}
"""By family; `pixtral` is the one whose models are of type `llava`.

Compared with copies of the published files of Qwen2-VL-7B, Qwen2.5-VL-7B, Qwen3-VL-8B, gemma-3-27b-it,
llava-1.5-7b-hf, llava-v1.6-mistral-7b-hf, Mistral-Small-3.1-24B, SmolVLM2-500M and SmolVLM-Instruct, and with the
scripts of transformers' repository that wrote those of pixtral-12b, InternVL3 and Idefics3-8B-Llama3. Those of Qwen3.5
are taken to be as Qwen3-VL's, and those of Gemma 4 the defaults of its classes.
"""


@cache
def published_processor(
    directory: Path, max_pixels: int | None = None, min_pixels: int | None = None
) -> tuple[ImageProcessor, bool]:
    """The processor of a model, and whether its limits of pixels are the model's own.

    `directory` has the model's config.json, and perhaps its processor and its tokenizer. The limits are those of
    `ImageProcessor`.

    Raises:
        UserError: the processor's files are not there, and what the family publishes is not known; or as
            `ImageProcessor`.
    """
    processors = [name for name in PROCESSOR_FILES if (directory / name).is_file()]
    if processors and (directory / TOKENIZER_FILES[0]).is_file():
        return ImageProcessor(directory, max_pixels=max_pixels, min_pixels=min_pixels), True
    config: Any = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    tower = getattr(config.vision_config, "model_type", None)
    pixtral = (config.model_type, tower) == ("llava", "pixtral")
    published = PUBLISHED.get("pixtral" if pixtral else config.model_type)
    if published is None or published.tower not in (None, tower):
        raise UserError(
            f"--image: the image processor of {config.model_type} with {tower} is not in {directory}; name a directory "
            f"with its {' or '.join(PROCESSOR_FILES)} and its {TOKENIZER_FILES[0]}"
        )
    with TemporaryDirectory(prefix="lean-finetune-processor-") as scratch:
        _write(Path(scratch), directory, config, published)
        return ImageProcessor(Path(scratch), max_pixels=max_pixels, min_pixels=min_pixels), bool(processors)


def _write(out: Path, directory: Path, config: Any, published: Published) -> None:
    """Write what is in `directory`, and instead of the processor or the tokenizer that is missing the published one."""
    for path in (directory / name for name in (CONFIG_FILE, *PROCESSOR_FILES, *TOKENIZER_FILES)):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    if not any((out / name).is_file() for name in PROCESSOR_FILES):
        for name, content in zip(PROCESSOR_FILES, (published.processor(config), published.images(config)), strict=True):
            if content:
                write_json(out / name, content)
    if not (out / TOKENIZER_FILES[0]).is_file():
        _write_tokenizer(out, published.tokens(config), published.named)


def _write_tokenizer(out: Path, tokens: Sequence[str], named: Mapping[str, str]) -> None:
    """Write a tokenizer with these special tokens, for which other text is unknown words."""
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(WORDS), "isolated")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(out / TOKENIZER_FILES[0]))
    attributes = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "extra_special_tokens": named}
    write_json(out / TOKENIZER_FILES[1], attributes)
