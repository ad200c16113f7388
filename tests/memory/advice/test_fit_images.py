"""`lean-finetune fit --image`: rows with images from a config.json, and the largest image that fits."""

import json
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

from lean_finetune.commands.fit import fit
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.images.attachment import sizes_of
from lean_finetune.images.image_family import Size
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.images.published_processor import PUBLISHED, published_processor
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.choice.largest_image import largest_image, scaled
from lean_finetune.memory.choice.plain_run import plain_start
from lean_finetune.memory.predict.assumed_images import AssumedImages, RowOfImages
from lean_finetune.memory.predict.depth_extrapolation import WindowTrace
from lean_finetune.memory.predict.traced_step import _trace_steps
from tests.small_vision import vision_model
from tests.workspace import error, invoke

IMAGES = (Size(height=112, width=196), 2)
FAMILIES = sorted(PUBLISHED)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each family, with all files of a model; and one of config.json alone, below `configs`."""
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        vision_model(root / family, family)
        (root / "configs" / family).mkdir(parents=True)
        shutil.copy(root / family / "config.json", root / "configs" / family)
    return root


FROM_CONFIG = [family for family in FAMILIES if not family.startswith(("gemma4", "paddleocr"))]
"""Families whose small models have the limits of the published ones. Config.json does not say Gemma 4's tokens of an
image (280, and 70 here) and PaddleOCR-VL's fewest pixels (384 x 384, and 56 x 56 here)."""


def run_of(model: Path, *flags: str, shorten: bool = False, images: tuple[Size, int] = IMAGES) -> Run:
    named = [f"model.name={model}", "hardware.gpu=24GiB", "data.max_length=256", "bucket.max_tokens=512"]
    assumed = AssumedImages(size=images[0], count=images[1])
    return fit_run(with_flags(load_params(COMMON_PARAMS), [*named, *flags]), shorten=shorten, assumed=assumed)


def row_of(run: Run) -> RowOfImages:
    assert isinstance(run.full_row, RowOfImages)
    return run.full_row


@pytest.mark.parametrize("family", FROM_CONFIG)
def test_config_json_alone_gives_the_tokens_and_patches_of_the_model_s_own_processor(models: Path, family: str):
    """Other tokens than in training, since the processor is not downloaded."""
    alone, is_own = published_processor(models / "configs" / family)
    own = ImageProcessor(models / family)
    assert not is_own and published_processor(models / family)[1]
    for size in (Size(300, 500), Size(128, 1000), Size(777, 333)):
        assert alone.patches(size) == own.patches(size)
        assert alone.expansion(size).count(alone.fill_token) == own.expansion(size).count(own.fill_token)


@pytest.mark.slow
@pytest.mark.parametrize("family", FROM_CONFIG)
def test_config_json_alone_gives_the_peak_of_the_model_s_own_files(models: Path, family: str):
    """The tiny tokenizer has other tokens for the text around an image, so that its row has a length of its own."""
    one = (Size(280, 280), 1)  # No processor makes it larger.
    peaks = [
        run_of(models / place / family, "bucket.max_tokens=256", images=one).predict().peak.bytes
        for place in ("configs", ".")
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_another_token_for_images_than_the_tokenizer_s_is_refused(models: Path, tmp_path: Path):
    shutil.copytree(models / "llava", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "image_token_index": 7}))
    with pytest.raises(
        UserError, match=r"model.name: image_token_id in config.json must be the tokenizer's id of '<im"
    ):
        run_of(tmp_path / "model")


def test_a_kernel_that_takes_no_mask_is_refused_before_anything_is_traced(models: Path):
    """Minutes of tracing for a refusal."""
    with pytest.raises(
        UserError, match=r"train.attention: flash_attention_2 takes no mask, with which the tokens of a"
    ):
        run_of(models / "configs" / "gemma3", "train.attention=flash_attention_2", "hardware.gpu=A100-80GB")


def test_images_are_part_of_the_row_unless_its_length_is_an_assumption(models: Path):
    model = models / "configs" / "qwen2_5_vl"
    given, assumed = run_of(model), run_of(model, shorten=True)
    assert row_of(given).tokens == 4 * 7 and row_of(given).patches == 4 * 28
    (shape,) = given.steps[0][1:]
    assert (shape.rows, shape.length) == (2, 256)
    assert shape.supervised == 2 * (255 - 2 * 28) and sizes_of(shape.attached) == (((112, 196),) * 2,) * 2
    assert assumed.longest == 312 and assumed.steps[0][-1].rows == 1  # 256 + 2 · 28.


def test_limits_of_pixels_and_patches_count_as_in_a_plan(models: Path):
    model = models / "configs" / "qwen2_5_vl"
    smaller = run_of(model, f"data.image_max_pixels={112 * 196 // 4}")
    assert row_of(smaller).patches < 112 // 2
    assert run_of(model, "bucket.max_patches=300").steps[0][-1].rows == 1
    with pytest.raises(UserError, match=r"bucket.max_patches: .* have 224 patches; got 200; raise it"):
        run_of(model, "bucket.max_patches=200")
    with pytest.raises(UserError, match=r"--image: the images of a row must fit in data.max_length; got 9 of 28"):
        run_of(model, images=(IMAGES[0], 9))


def test_every_micro_batch_that_plan_chooses_from_has_images(models: Path):
    """Switches chosen for the text alone."""
    run = run_of(models / "configs" / "qwen2_5_vl", "train.tokens_per_step=1024")
    start = plain_start(run.params, run.config, run.device, "qlora", (), None, run.full_row.assumed)
    runs = [start.run, *(size.run for size in start.sizes)]
    assert [one.steps[-1][-1].rows for one in runs] == [4, 3, 2, 1]
    assert all(sizes_of(one.steps[-1][-1].attached) == (((112, 196),) * 2,) * one.steps[-1][-1].rows for one in runs)


@pytest.mark.slow
def test_trained_parts_cost_memory(models: Path):
    model = models / "configs" / "qwen2_5_vl"
    frozen, trained = run_of(model), run_of(model, "train.vision=lora", "train.projector=lora")
    assert trained.predict().peak.bytes > frozen.predict().peak.bytes


def ordered(events: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Sizes of events; of releases that follow each other, whose order is not defined, the sizes in order."""
    groups = groupby((size for _, size in events), lambda size: size < 0)
    return [sorted(sizes) if freed else list(sizes) for freed, sizes in groups]


def test_layers_of_a_frozen_tower_that_are_skipped_change_no_event(models: Path, tmp_path: Path):
    """A peak that differs because layers were taken for alike, such as those with windows and those without."""
    content = json.loads((models / "configs" / "qwen2_5_vl" / "config.json").read_text())
    content["vision_config"] |= {"depth": 9, "fullatt_block_indexes": [1, 5, 7]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    run = run_of(tmp_path, "data.max_length=400", images=(Size(280, 280), 1))
    traced = [
        _trace_steps(WindowTrace, run.model, (run.steps[0][1:],), skip, all_events=all_events)[0]
        for all_events, skip in ((True, False), (True, True), (False, True))
    ]
    every, skipped, fewer = traced
    assert ordered(skipped.events) == ordered(every.events)
    assert len(fewer.events) < len(every.events)
    assert fewer.peaks() == every.peaks() == skipped.peaks()


@pytest.mark.slow
def test_the_largest_image_fits_and_a_larger_one_does_not(models: Path):
    run = run_of(models / "configs" / "qwen2_5_vl", "data.image_max_pixels=20000000", shorten=True)
    usable = run_of(models / "configs" / "qwen2_5_vl", shorten=True, images=(Size(300, 525), 2)).predict().peak.bytes
    found = largest_image(run, row_of(run), usable, run.predict().peak.bytes)
    assert found.size is not None and found.limit is None
    assert found.size.width / found.size.height == pytest.approx(196 / 112, rel=0.01)
    peaks = [
        run_of(models / "configs" / "qwen2_5_vl", shorten=True, images=(size, 2)).predict().peak.bytes
        for size in (found.size, scaled(found.size, round(1.2 * found.size.width * found.size.height / (1 << 14))))
    ]
    assert peaks[0] <= usable < peaks[1]


def test_the_answer_says_where_images_stop_growing(models: Path):
    model, options = models / "configs" / "qwen2_5_vl", ["--length", "512", "--gpu", "T4", "--image", "196x112"]
    limited = ["--set", "data.image_max_pixels=100352", "--set", "train.tokens_per_step=512"]
    result = invoke(fit, "--model", str(model), *options, "--images-per-row", "2", *limited)  # A known speed.
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "images 2 of 196 x 112 in every row: 28 tokens and 112 patches each" in text
    assert "by the Qwen2_5_VLProcessor that qwen2_5_vl is published with" in text
    assert "data.image_max_pixels: a larger one is made smaller, so any fits" in text
    content = json.loads(invoke(fit, "--model", str(model), *options, *limited, "--json").stdout)
    assert content["images"] == {
        **{"width": 196, "height": 112, "per_row": 1, "tokens": 28, "patches": 112},
        "processor": "Qwen2_5_VLProcessor as published for qwen2_5_vl",
    }
    assert content["largest_image"]["limit"].startswith("data.image_max_pixels")
    assert content["params"]["data"]["max_length"] == 512


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--image", "1280"], "--image: must be width and height in pixels, such as 1280x960, and at most 89,478,485"),
        (["--image", "0x960"], "--image: must be width and height"),
        (["--image", "20000x20000"], "--image: must be width and height"),
        (["--images-per-row", "2"], "--images-per-row: needs --image"),
        (["--image", "64x64", "--lengths", "p50=4,p99=5"], "--lengths: is of rows of text"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], line: str):
    assert error(invoke(fit, "--model", "llama-3.1-8b", "--gpu", "T4", *options), 2).startswith(line)


def test_models_and_objectives_without_images_are_refused():
    model = ["--model", "llama-3.1-8b", "--gpu", "T4", "--image", "64x64"]
    refused = error(invoke(fit, *model))
    assert refused.startswith("model.name: rows with images are not offered for llama; choose a model of ")
