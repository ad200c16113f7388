"""What families publish about images: from config.json alone, as from the files of a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from lean_finetune.core.atomic_files import write_json
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_family import Size
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.images.published_processor import published_processor
from tests.kit.image_models import image_models

IMAGE = Size(height=960, width=1280)
SIZES = (IMAGE, Size(333, 777), Size(2000, 500))
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
USUAL = {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 1 / 255}
CROPS = {**USUAL, **HALF, "do_image_splitting": True, "do_pad": True, "resample": 1}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma 3 27B": (
        {
            **{**USUAL, **HALF, "do_convert_rgb": None, "do_pan_and_scan": None, "resample": 2},
            **{"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256},
            **{"processor_class": "Gemma3Processor", "size": {"height": 896, "width": 896}},
        },
        {"image_seq_length": 256, "processor_class": "Gemma3Processor"},
    ),
    "LLaVA-Next 7B (Mistral)": (
        {
            **{**USUAL, **CLIP, "aspect_ratio_setting": "anyres", "crop_size": {"height": 336, "width": 336}},
            **{"do_center_crop": True, "do_pad": True, "image_grid_pinpoints": PINPOINTS, "resample": 3},
            **{"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 336}},
        },
        {
            **{"image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14},
            **{"processor_class": "LlavaNextProcessor", "vision_feature_select_strategy": "default"},
        },
    ),
    "Mistral Small 3.1 24B": (
        {
            **{**USUAL, **CLIP, "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}},
            **{"patch_size": {"height": 14, "width": 14}, "processor_class": "PixtralProcessor", "resample": 3},
        },
        {
            **{"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]"},
            **{"patch_size": 14, "processor_class": "PixtralProcessor", "spatial_merge_size": 2},
        },
    ),
    "SmolVLM2 500M": (
        {
            **{**CROPS, "image_processor_type": "SmolVLMImageProcessor", "max_image_size": {"longest_edge": 512}},
            **{"processor_class": "SmolVLMProcessor", "size": {"longest_edge": 2048}},
        },
        {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
    ),
}
"""Published preprocessor_config.json and processor_config.json, without what is of videos."""
FILES["SmolVLM2 256M"] = FILES["SmolVLM2 500M"]
FILES["Gemma 3 4B"] = FILES["Gemma 3 27B"]
TOKENS = {
    "Gemma 3 4B": 256 + 4,  # Between two tokens, and a blank line on each side.
    "LLaVA 1.5 7B": (336 // 14) ** 2,
    "LLaVA-Next 7B (Mistral)": 576 + 36 * 48 + 36,  # 48 x 48 patches without 12 rows of padding, and line ends.
    "Pixtral 12B": (1024 // 16) * (768 // 16) + 48,
    "Mistral Small 3.1 24B": 46 * 35 + 35,  # 1280 x 960 by 28, rounded up.
    "InternVL3 1B": (4 * 3 + 1) * 256 + 2,
    "SmolVLM2 500M": (4 * 3 + 1) * (64 + 2) + 3 + 1,  # 4 x 3 crops of 512; a token ends each row.
    "SmolVLM2 2.2B": (4 * 3 + 1) * (81 + 2) + 3 + 1,
    "Idefics3 8B": 4 * 3 * (169 + 1 + 8) + (169 + 1 + 4) + 3 + 1,  # Names of crops are text: 8 tokens, and 4.
    "Qwen3-VL 30B-A3B": 1280 * 960 // 32**2,
    "Qwen3.5 †": 1280 * 960 // 32**2,
    "GLM-4V †": 46 * 34,  # 1280 x 960 by 28, rounded.
    "PaddleOCR-VL †": 46 * 34,
    "Gemma 4 †": 14 * 19 + 2,  # 672 x 912 pixels, of which 48 x 48 are a token; and a token on each side.
}
"""Of an image of 1280 x 960, by hand."""


def directory_of(path: Path, name: str, *files: dict[str, Any]) -> Path:
    """A directory with a model's config.json and with files of its processor."""
    path.mkdir()
    write_json(path / "config.json", image_models()[name])
    for file, content in zip(("preprocessor_config.json", "processor_config.json"), files, strict=False):
        write_json(path / file, content)
    return path


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_an_image_follow_from_config_json_alone(name: str, tmp_path: Path):
    processor, is_own = published_processor(directory_of(tmp_path / "model", name))
    assert not is_own
    assert processor.tokens(IMAGE) == TOKENS[name]


@pytest.mark.parametrize("name", FILES)
def test_published_files_give_the_same_text_and_patches(name: str, tmp_path: Path):
    """A limit or a size that the family is published with, and that is another here."""
    alone, _ = published_processor(directory_of(tmp_path / "alone", name))
    files, is_own = published_processor(directory_of(tmp_path / "files", name, *FILES[name]))
    assert is_own and alone.name == files.name
    for size in SIZES:
        assert (alone.expansion(size), alone.patches(size)) == (files.expansion(size), files.patches(size))
        assert alone.frame(size) == files.frame(size)


def test_what_config_json_leaves_out_is_transformers_own(tmp_path: Path):
    config = image_models()["Gemma 3 4B"]
    (tmp_path / "config.json").write_text(
        json.dumps({key: config[key] for key in config if key != "mm_tokens_per_image"})
    )
    assert published_processor(tmp_path)[0].tokens(IMAGE) == TOKENS["Gemma 3 4B"]


def test_models_of_type_llava_with_another_tower_are_refused(tmp_path: Path):
    """An image processor that is taken for granted: SigLIP's images are resized otherwise."""
    config = image_models()["LLaVA 1.5 7B"]
    other = {**config, "vision_config": {**config["vision_config"], "model_type": "siglip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match=r"--image: the image processor of llava with siglip_vision_model is not in "):
        published_processor(tmp_path)


def test_the_model_s_own_tokenizer_counts_where_it_is_here(tmp_path: Path):
    """Special tokens that a published vocabulary has and this model lacks, or the other way round."""
    directory = directory_of(tmp_path / "model", "Idefics3 8B")
    tokenizer = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<image>", "<fake_token_around_image>")]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    alone, _ = published_processor(directory)
    shutil.copytree(directory, tmp_path / "files")
    for file, content in zip(("preprocessor_config.json", "processor_config.json"), IDEFICS, strict=True):
        write_json(tmp_path / "files" / file, content)
    assert alone.tokens(IMAGE) == ImageProcessor(tmp_path / "files").tokens(IMAGE) != TOKENS["Idefics3 8B"]


IDEFICS = (
    {
        **{**CROPS, "image_processor_type": "Idefics3ImageProcessor", "max_image_size": {"longest_edge": 364}},
        **{"processor_class": "Idefics3Processor", "size": {"longest_edge": 4 * 364}},
    },
    {"image_seq_len": 169, "processor_class": "Idefics3Processor"},
)
