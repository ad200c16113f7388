"""The image processor of a model of which only config.json is here: a prediction needs no more of it.

The sizes of patches are those of config.json, and the limits of a picture's pixels those with which the family was
published. The tokenizer knows the family's tokens for pictures alone.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.data.pictures.processor import PROCESSOR_FILES, PictureProcessor
from lean_finetune.pinning.config_file import CONFIG_FILE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class Published:
    """What the models of a family publish about pictures beside config.json."""

    processor: Mapping[str, Any]
    """Content of preprocessor_config.json."""
    from_config: Mapping[str, str] = field(default_factory=dict)
    """Key of the processor → key of `vision_config` in config.json, which counts where it has a value."""
    tokens: tuple[str, ...]
    """Tokens of the tokenizer that the processor uses."""


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_SIZES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}


def _qwen(patch_size: int, fewest_pixels: int) -> Published:
    limits = {"shortest_edge": fewest_pixels, "longest_edge": (2 * patch_size) ** 2 * 16384}
    sizes = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2, "size": limits}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", **sizes}
    return Published(processor=processor, from_config=QWEN_SIZES, tokens=QWEN_TOKENS)


PUBLISHED: dict[str, Published] = {
    "qwen2_vl": _qwen(14, 56 * 56),
    "qwen2_5_vl": _qwen(14, 56 * 56),
    "qwen3_vl": _qwen(16, 256 * 256),
    "qwen3_vl_moe": _qwen(16, 256 * 256),
}
"""By family, from the files of Qwen/Qwen2-VL-7B-Instruct, Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct."""


@cache
def published_processor(
    directory: Path, max_pixels: int | None = None, min_pixels: int | None = None
) -> tuple[PictureProcessor, bool]:
    """The processor of a model, and whether its limits of pixels are the model's own.

    `directory` has the model's config.json, and perhaps its processor. The limits are those of `PictureProcessor`.

    Raises:
        UserError: the processor's files are not there, and what the family publishes is not known; or as
            `PictureProcessor`.
    """
    processors = [name for name in PROCESSOR_FILES if (directory / name).is_file()]
    if processors and (directory / TOKENIZER_FILES[0]).is_file():
        return PictureProcessor(directory, max_pixels=max_pixels, min_pixels=min_pixels), True
    family = read_json(directory / CONFIG_FILE)["model_type"]
    if family not in PUBLISHED:
        raise UserError(
            f"--image: the image processor of {family} is not in {directory}; name a directory with its "
            f"{' or '.join(PROCESSOR_FILES)} and its {TOKENIZER_FILES[0]}"
        )
    with TemporaryDirectory(prefix="lean-finetune-processor-") as scratch:
        _write(Path(scratch), directory, PUBLISHED[family], processors)
        return PictureProcessor(Path(scratch), max_pixels=max_pixels, min_pixels=min_pixels), bool(processors)


def _write(out: Path, directory: Path, published: Published, processors: Sequence[str]) -> None:
    """Write config.json, the given files of the processor or else the published ones, and a tokenizer."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel

    for name in (CONFIG_FILE, *processors):
        shutil.copyfile(directory / name, out / name)
    if not processors:
        vision = read_json(directory / CONFIG_FILE).get("vision_config") or {}
        own = {key: vision[name] for key, name in published.from_config.items() if vision.get(name) is not None}
        write_json(out / PROCESSOR_FILES[1], {**published.processor, **own})
    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in published.tokens])
    tokenizer.save(str(out / TOKENIZER_FILES[0]))
    write_json(out / TOKENIZER_FILES[1], {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
