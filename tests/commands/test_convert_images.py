"""Configurations of other tools whose rows have images: never answered as text."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.layer_patterns import names_of
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.commands.fit import fit
from lean_finetune.commands.import_config import import_config
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.images.image_family import Size
from tests.commands.tool_configs import AXOLOTL, LLAMA_FACTORY
from tests.conftest import ROOT
from tests.small_vision import vision_model
from tests.workspace import error, invoke

VISION_AXOLOTL = (
    AXOLOTL.replace("sample_packing: true", "sample_packing: false").replace("load_in_8bit", "load_in_4bit")
    + "processor_type: AutoProcessor\n"
)
LANGUAGE_ALONE = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
PATTERN = VISION_AXOLOTL.replace("lora_target_linear: true", f"lora_target_modules: '{LANGUAGE_ALONE}'")
WITH_TOWER = r"(model\.language_model\.layers\.\d+\.mlp\.up_proj|model\.visual\.blocks\.\d+\.mlp\.fc[12])"
FROZEN, ADAPTED = {"train.vision": "frozen", "train.projector": "frozen"}, {"train.vision": "lora"}
CASES: dict[str, tuple[str, Size, dict[str, Any]]] = {
    "LLaMA-Factory": (
        LLAMA_FACTORY + "image_max_pixels: 262144\n",
        Size(512, 512),
        {**FROZEN, "data.image_max_pixels": 262144},
    ),
    "its default limit": (
        LLAMA_FACTORY.replace("org/rows", "mllm_demo"),
        Size(768, 768),
        {**FROZEN, "data.image_max_pixels": 768 * 768},
    ),
    "its trained tower": (
        LLAMA_FACTORY.replace("qwen3", "qwen2_vl") + "freeze_vision_tower: false\nimage_min_pixels: 4096\n",
        Size(768, 768),
        {**ADAPTED, "train.projector": "frozen", "data.image_min_pixels": 4096},
    ),
    "a projector that is trained in full": (
        LLAMA_FACTORY.replace("org/rows", "mllm_demo") + "additional_target: embed_tokens,multi_modal_projector\n",
        Size(768, 768),
        {"train.vision": "frozen", "train.projector": "full", "train.lora.modules_to_save": ["embed_tokens"]},
    ),
    "a tower that is trained in full with its projector": (
        LLAMA_FACTORY.replace("org/rows", "mllm_demo") + "additional_target: visual\n",
        Size(768, 768),
        {"train.vision": "full", "train.projector": "full", "train.lora.modules_to_save": []},
    ),
    "Axolotl, a tower that is trained in full": (
        PATTERN + "lora_modules_to_save: [model.vision_tower, embed_tokens]\n",
        Size(768, 1024),
        {"train.vision": "full", "train.projector": "frozen", "train.lora.modules_to_save": ["embed_tokens"]},
    ),
    "Axolotl, language model alone": (
        PATTERN,
        Size(768, 1024),
        {**FROZEN, "train.lora.targets": ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]},
    ),
    "Axolotl, all layers": (VISION_AXOLOTL, Size(768, 1024), {**ADAPTED, "train.projector": "lora"}),
    "Axolotl, a kernel without masks": (
        VISION_AXOLOTL + "attn_implementation: flash_attention_2\n",
        Size(768, 1024),
        {"train.attention": "auto"},
    ),
    "Axolotl, tower by a pattern": (
        PATTERN.replace(LANGUAGE_ALONE, WITH_TOWER) + "image_size: 336\n",
        Size(336, 336),
        {**ADAPTED, "train.projector": "frozen", "data.image_max_pixels": 336 * 336},
    ),
    "Axolotl, all weights": (
        VISION_AXOLOTL.replace("adapter: lora", "").replace("load_in_4bit: true", ""),
        Size(768, 1024),
        {"train.vision": "full", "train.projector": "full"},
    ),
    "Axolotl, weights of the language model": (
        VISION_AXOLOTL.replace("adapter: lora", "").replace("load_in_4bit: true", "") + "freeze_mm_modules: true\n",
        Size(768, 1024),
        FROZEN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_with_images_keep_their_limits_and_what_is_trained(name: str, tmp_path: Path):
    text, size, expected = CASES[name]
    (tmp_path / "run.yaml").write_text(text)
    converted = read_config_of_tool(tmp_path / "run.yaml", 1, with_data=False)
    assert converted.image == size
    assert {key: converted.values[key] for key in expected} == expected
    assert f"one of {size.width} x {size.height} in each is assumed" in " ".join(converted.differs)
    with_flags(load_params(COMMON_PARAMS), converted.flags())


@pytest.mark.parametrize("named", ["template: gemma3", "template: llava_next", "model"])
def test_a_limit_that_the_family_refuses_is_left_out(named: str, tmp_path: Path):
    """LLaMA-Factory's default, at which stage tokenize ends a run that nobody gave a limit."""
    text = LLAMA_FACTORY.replace("org/rows", "mllm_demo")
    if named == "model":
        text = text.replace("org/model", str(vision_model(tmp_path / "m", "gemma3")))
    (tmp_path / "run.yaml").write_text(text.replace("template: qwen3", named if named != "model" else "template: x"))
    converted = read_config_of_tool(tmp_path / "run.yaml", 1, with_data=False)
    assert converted.image == Size(768, 768) and "data.image_max_pixels" not in converted.values
    assert not any("image_max_pixels" in line for line in converted.differs)
    (tmp_path / "run.yaml").write_text((tmp_path / "run.yaml").read_text() + "image_max_pixels: 100000\n")
    converted = read_config_of_tool(tmp_path / "run.yaml", 1, with_data=False)
    assert "data.image_max_pixels" not in converted.values and "image_max_pixels" not in converted.used
    assert any(line.startswith("image_max_pixels=100000: ") for line in converted.differs)


def test_a_part_of_the_tower_that_is_trained_in_full_is_all_of_it(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(PATTERN + "lora_modules_to_save: [visual.patch_embed]\n")
    converted = read_config_of_tool(tmp_path / "run.yaml", 1, with_data=False)
    assert converted.values["train.vision"] == "full" and converted.values["train.projector"] == "frozen"
    assert "visual.patch_embed is a part of the vision tower: all of it is trained here" in converted.differs


def test_text_has_no_limit_of_images(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    converted = read_config_of_tool(tmp_path / "run.yaml", 1)
    assert converted.image is None and "data.image_max_pixels" not in converted.values


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("image_max_pixels: true", "image_max_pixels: must be a number; got True"),
        ("freeze_vision_tower: maybe", "freeze_vision_tower: must be true or false; got 'maybe'"),
        ("train_mm_proj_only: true", "train_mm_proj_only: the language model is always trained here; got True"),
    ],
)
def test_values_of_another_type_are_refused(key: str, says: str, tmp_path: Path):
    """A limit of one pixel, or a tower that is frozen by a word that means the opposite."""
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY + key + "\n")
    with pytest.raises(UserError, match=re.escape(says)):
        read_config_of_tool(tmp_path / "run.yaml", 1, with_data=False)


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "a{2}", "a+", "[^a]", "(a|b)" * 20, "^a$", "(" * 2000 + ")" * 2000, "[ab]{}|".format("[ab]" * 10) * 3],
)
def test_other_patterns_are_refused(pattern: str):
    """A pattern that takes minutes, or layers that nobody named."""
    with pytest.raises(ValueError, match="must "):
        names_of(pattern)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone."""
    root = tmp_path_factory.mktemp("model")
    shutil.copy(vision_model(root / "whole") / "config.json", root)
    return root


def test_fit_predicts_them_with_the_assumed_images(model: Path, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        LLAMA_FACTORY.replace("org/model", str(model)).replace("q_proj,v_proj", "all") + "image_max_pixels: 50176\n"
    )
    answer = json.loads(invoke(fit, "--from", str(tmp_path / "run.yaml"), "--gpu", "24GiB", "--json").stdout)
    assert answer["images"] | {"tokens": 64, "patches": 256, "width": 224, "height": 224} == answer["images"]
    assert answer["as_tool"]["not_known"].endswith("for rows with images is not described here")
    assert answer["params"]["data"]["image_max_pixels"] == 50176


def test_import_refuses_a_family_that_is_not_trained_with_images(model: Path, tmp_path: Path):
    out, run = tmp_path / "params.yaml", tmp_path / "run.yaml"
    run.write_text(PATTERN.replace("org/model", str(ROOT / "lean_finetune/example_configs/llama-3.1-8b")))
    refused = error(invoke(import_config, str(run), "--out", str(out)))
    assert refused.startswith("model.name: rows with images are not offered for llama") and not out.exists()
    run.write_text(LLAMA_FACTORY.replace("org/model", str(model)) + "image_max_pixels: 50176\n")
    assert "rows have images" in " ".join(invoke(import_config, str(run), "--out", str(out)).stdout.split())
    assert load_params(out).data.image_max_pixels == 50176
