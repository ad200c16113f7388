"""What a batch gives a model for its images, against transformers' own processor and model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.images.attachment import ImageAttachment
from lean_finetune.images.image_family import Size
from lean_finetune.images.image_inputs import ImageInputs, ImagePart
from lean_finetune.images.processor import ImageProcessor, image_family
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import collate
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.small_vision import FAMILIES, vision_model

TEXT = "Is this {image} larger than {image}? No."
SIZES = [(100, 200), (60, 60)]


QWEN = ("qwen", "glm", "paddleocr")
"""Names of families with Qwen's kind of processor begin so."""
ALIKE = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "glm46v", "glm_ocr", "gemma4_large")
"""Families whose code for images is that of another one here."""


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=[pytest.mark.slow] * (one in ALIKE)) for one in FAMILIES]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp(request.param) / request.param, request.param)


def photo(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def crops_of(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels without the crops of zeros with which some processors pad rows and images."""
    if pixels.dim() < 4:
        return pixels
    crops = pixels.flatten(0, -4)
    return crops[crops.flatten(1).any(1)]


def patches_of(family: str, made: dict[str, torch.Tensor]) -> int:
    """Patches of processed images."""
    pixels = made["pixel_values"]
    if "target_sizes" in made:
        return int(made["target_sizes"].prod(-1).sum())
    if pixels.dim() < 4:  # The values of each patch, of each image in Gemma 4.
        return pixels.shape[:-1].numel()
    sizes = made["image_sizes"].tolist() if family in PADDED else [pixels.shape[-2:]] * len(crops_of(pixels))
    edge = EDGES[family]
    return sum((height // edge) * (width // edge) for height, width in sizes)


def patches_embedded(model: torch.nn.Module) -> list[int]:
    """Grows by the patches of each call of the tower's embedding, which is a convolution, or a layer of Gemma 4."""
    found: list[int] = []
    convolutions = [one for one in model.modules() if isinstance(one, torch.nn.Conv2d | torch.nn.Conv3d)]
    linear = [one for name, one in model.named_modules() if name.endswith("patch_embedder.input_proj")]
    embedding = (convolutions or linear)[0]  # GLM's projector begins with another one.
    channels = 1 if convolutions else -1
    embedding.register_forward_hook(lambda layer, given, out: found.append(out.numel() // out.shape[channels]))
    return found


EDGES = dict.fromkeys(FAMILIES, 14) | {
    "internvl": 7,
    "smolvlm": 8,
    "idefics3": 8,
    "gemma3": 7,
    "ovis2": 8,
    "granite4_vision": 8,
}
"""Pixels of an edge of a patch."""
PADDED = ("pixtral", "mistral3")
"""Families that pad images to the largest of a batch."""
GRID = [(height, width) for height in (1, 28, 31, 100, 999) for width in (3, 60, 333, 1500)]


def test_sizes_say_how_many_patches_and_tokens_the_processor_makes(model):
    """A crop that is not counted would leave an image token without pixels, or pixels without a token."""
    processor = ImageProcessor(model)
    family = processor._family
    usual = [Size(28, 28), Size(100, 200), Size(999, 60), Size(1500, 1200)]
    few = [*usual, Size(3, 60), Size(31, 333)]  # Qwen's kind of processor makes all of them larger.
    for size in few if model.name.startswith(QWEN) else [*usual, *(Size(*size) for size in GRID)]:
        image = Image.new("RGB", (size.width, size.height), "white")
        try:
            made, [text] = processor._processor._process_images([image], **family._options, return_tensors="pt")
            if model.name == "mistral3" and text.count(processor.image_token) == 1:  # Its model fails.
                raise ValueError
        except ValueError:
            with pytest.raises(RowFault, match="the image processor refuses"):
                processor.expansion(size)
            continue
        assert processor.patches(size) == patches_of(model.name, made), size
        numbered = "<image_id>0</image_id>" if model.name == "minicpmv4_6" else ""
        assert processor.expansion(size) == numbered + text, size
        assert processor.tokens(size) >= text.count(processor.image_token), size
        arguments = processor.arguments([[image]])
        assert torch.equal(crops_of(arguments["pixel_values"]), crops_of(made["pixel_values"])), size


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Of GLM's processor.
def test_losses_and_gradients_equal_those_of_transformers_called_directly(model):
    """Another token, position or pixel, or a mask that shows a padding token."""
    config, processor = read_config(model, whole=True), ImageProcessor(model)
    theirs = processor._processor
    inputs, words = ImageInputs(processor, config), AutoTokenizer.from_pretrained(model)
    images = [[photo(*size, seed=n) for n, size in enumerate(SIZES)], [photo(90, 120, seed=7)], []]
    texts = [TEXT, "What is {image}? A heron.", "Who is there? Nobody."]
    rows = []
    for text, shown in zip(texts, images, strict=True):
        for number, image in enumerate(shown):
            text = text.replace("{image}", processor.expansion(Size(image.height, image.width), number), 1)
        ids = np.array(words(text, add_special_tokens=False).input_ids, np.int32)
        rows.append((ids, np.array([[len(ids) - 4, len(ids)]])))
    longest = max(len(ids) for ids, _ in rows)
    batch = collate(rows, longest + 3, 0)
    made = inputs.tensors(batch.input_ids_BT, images)
    router = "trained" if model.name.endswith("moe") else "frozen"
    spec = spec_of(method="full", vision="full", projector="full", router=router, loss_chunk=4)
    ours = load_model(model, spec, CPU, images=True)
    embedded = patches_embedded(ours)
    loss = summed_loss(ours, replace(batch, parts=(ImagePart(shown=made),)), TokenLoss(4))
    loss.backward()
    if model.name not in PADDED:
        every = [Size(image.height, image.width) for shown in images for image in shown]
        assert sum(embedded) == sum(map(processor.patches, every))

    nested = model.name.startswith(("smolvlm", "gemma"))
    given = theirs(
        text=[text.replace("{image}", processor.image_token) for text in texts],
        images=images if nested else [image for shown in images for image in shown],
        **{"return_tensors": "pt", "padding": True, "padding_side": "right", "add_special_tokens": False},
    )
    assert torch.equal(given["input_ids"], batch.input_ids_BT[:, :longest])
    assert torch.equal(crops_of(given["pixel_values"]), crops_of(made["pixel_values"]))
    for name in ("image_grid_thw", "image_sizes", "image_position_ids", "target_sizes"):
        assert (name in made) == (name in given) and (name not in made or torch.equal(made[name], given[name]))
    direct = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32)
    targets_BT = batch.targets_BT[:, :longest]
    expected = torch.nn.functional.cross_entropy(
        direct(**given).logits.flatten(0, 1), targets_BT.flatten(), reduction="sum"
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = dict(direct.named_parameters())
    assert sum(parameter.grad is not None for parameter in ours.parameters()) > 30
    for name, parameter in ours.named_parameters():
        gradient = wanted[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            largest = gradient.abs().max().item()
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6 * max(1.0, largest))


RESIZED = ("glm4v", "glm46v", "paddleocr_vl")
"""Families whose limits, as Qwen's, are of the pixels of the resized image; of those with one processor, one alone."""
LIMITED = {
    "mistral3": (140 * 70, 70 * 70, 25),
    "pixtral": (140 * 70, 70 * 70, 25),
    "internvl": (4 * 28 * 28, 4 * 28 * 28, 5 * 16),
    "minicpmv4_6": (4 * 112 * 112, 4 * 112 * 112, 5 * 64),
    "ovis2": (2 * 32 * 32, 32 * 32, 16),
    "smolvlm": (5 * 32 * 32, 4 * 32 * 32, 5 * 16),
    "idefics3": (5 * 32 * 32, 4 * 32 * 32, 5 * 16),
}
"""Most pixels, pixels of a large square image then, and its patches."""


def test_the_most_pixels_limit_an_image_or_are_refused_by_the_name_of_what_decides(model):
    """A limit without effect, or one that the model does not know."""
    if model.name.startswith((*QWEN, "gemma4")):
        return
    size = Size(1500, 1500)
    if model.name not in LIMITED:
        with pytest.raises(UserError, match="data.image_max_pixels: cannot be set for this model: .*; leave it blank"):
            ImageProcessor(model, max_pixels=10_000)
        return
    most, pixels, patches = LIMITED[model.name]
    limited, free = ImageProcessor(model, max_pixels=most), ImageProcessor(model)
    if model.name in PADDED:
        frame = limited.frame(size)
        # Up to a token more on each edge.
        assert frame is not None and pixels <= frame.height * frame.width < most + 2 * 28 * 140
    else:
        assert limited.patches(size) == patches
    assert limited.patches(size) < free.patches(size)
    made = limited.arguments([[Image.new("RGB", (size.width, size.height), "white")]])
    assert limited.patches(size) == patches_of(model.name, made)
    if model.name == "internvl":
        assert ImageProcessor(model, min_pixels=pixels).patches(Size(28, 28)) == patches
        return
    with pytest.raises(UserError, match="data.image_min_pixels: cannot be set for this model"):
        ImageProcessor(model, min_pixels=10_000)


@pytest.mark.parametrize("family", RESIZED)
def test_limits_are_of_the_pixels_of_the_resized_image(tmp_path, family):
    """GLM's processor counts every pixel twice, for the frames of a patch."""
    token, directory = 28 * 28, vision_model(tmp_path, family)
    for size, most, fewest, tokens in (
        (Size(1500, 1500), 10 * token, None, 3 * 3),
        (Size(28, 28), None, 10 * token, 4 * 4),
        (Size(28, 84), 10 * token, token, 3),
    ):
        assert ImageProcessor(directory, max_pixels=most, min_pixels=fewest).patches(size) == 4 * tokens
    with pytest.raises(UserError, match="^data.image_min_pixels: the fewest pixels must not be over .*; got 99999999 "):
        ImageProcessor(directory, min_pixels=99_999_999)


def test_the_most_pixels_of_gemma_4_are_one_of_its_numbers_of_tokens(tmp_path):
    """A number of tokens that the processor refuses, or an image that a limit makes larger."""
    directory = vision_model(tmp_path, "gemma4")
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_soft_tokens": 280}))
    size, token = Size(1500, 1500), 16 * 16
    for most, tokens in ((70 * token, 70), (279 * token, 140), (10_000 * token, 280), (None, 280)):
        processor = ImageProcessor(directory, max_pixels=most)
        assert processor.patches(size) == 4 * tokens >= 4 * processor.expansion(size).count(processor.fill_token)
    with pytest.raises(UserError, match="data.image_max_pixels: must hold 70 tokens of 256 pixels each; got 10000"):
        ImageProcessor(directory, max_pixels=10_000)
    with pytest.raises(UserError, match="data.image_min_pixels: cannot be set for this model"):
        ImageProcessor(directory, min_pixels=10_000)


def test_a_limit_below_one_token_or_crop_is_refused(model):
    """Every image would have more pixels than the limit."""
    if model.name.startswith(("llava", "gemma", "granite")):
        return
    for fewest in {None, 1} if model.name.startswith("qwen") else {None}:
        with pytest.raises(UserError, match=r"^data\.image_max_pixels: must hold one (token|crop) of .*; got 195; "):
            ImageProcessor(model, max_pixels=195, min_pixels=fewest)


def test_a_config_with_another_image_token_than_the_tokenizer_is_refused(model):
    """Transformers fails at it in the first forward pass."""
    config = read_config(model, whole=True)
    none = np.zeros((0, 2), np.int32)
    images = ImageAttachment(sizes=none, bounds=none[:, 0], patches=none[:, 0], max_pixels=None, min_pixels=None)
    assert images.for_model(model, config).inputs is not None
    right, config.image_token_id = config.image_token_id, 7
    message = f"^model.name: image_token_id in config.json must be the tokenizer's id of .*, {right}; got 7; download"
    with pytest.raises(UserError, match=message):
        images.for_model(model, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: [content], "preprocessor_config.json must be a JSON object; got list"),
        (lambda content: {**content, "patch_size": "14"}, "the Qwen2_5_VLProcessor in .* cannot be read \\("),
        (lambda content: {**content, "patch_size": 0}, "the Qwen2_5_VLProcessor in .* cannot be read \\("),
    ],
)
def test_a_damaged_file_of_the_processor_is_refused_in_one_line(tmp_path, change, message):
    directory = vision_model(tmp_path, "qwen2_5_vl")
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UserError, match=f"^model.name: .*{message}.*; download or save it again$"):
        ImageProcessor(directory)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen2_5_vl", "rescale_factor", "x"),
        ("glm4v", "temporal_patch_size", {}),
        ("paddleocr_vl", "size", []),
        ("ovis2", "max_patches", "x"),
        ("granite4_vision", "image_grid_pinpoints", 3),
        ("minicpmv4_6", "scale_resolution", 0),
    ],
)
def test_a_value_that_only_an_image_reads_is_refused_before_there_is_one(tmp_path, family, key, value):
    """An error of Python in the first row, or in the first step."""
    path = vision_model(tmp_path, family) / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match="^model.name: the .*Processor in .* cannot be read .*; download or save it ag"):
        ImageProcessor(tmp_path)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "config.json"])
def test_broken_json_of_a_model_is_not_said_to_be_made_by_a_stage(tmp_path, name):
    """`delete it and run dvc repro`: the model would be broken for good."""
    directory = vision_model(tmp_path, "qwen2_5_vl")
    (directory / name).write_text('{"size": ')
    with pytest.raises(UserError, match=f"^model.name: {directory / name} is not JSON .*; download or save it again$"):
        image_family(directory)


def test_the_processor_is_the_one_that_the_files_name(tmp_path):
    """Pixtral in transformers' form has the type of LLaVA."""
    directory = vision_model(tmp_path, "pixtral")
    family = image_family(directory)
    assert family is not None and family.processor_class == "PixtralProcessor"
    (directory / "processor_config.json").unlink()
    family = image_family(directory)
    assert family is not None and family.processor_class == "LlavaProcessor"


def test_a_longest_edge_that_transformers_counts_wrongly_is_refused(tmp_path):
    directory = vision_model(tmp_path, "smolvlm")
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": {"longest_edge": 120}}))
    with pytest.raises(UserError, match="its longest edge of 120 pixels is no multiple of a crop's, 32"):
        ImageProcessor(directory)


def test_a_family_with_the_same_processor_is_refused_by_name(tmp_path):
    """A family that nobody tried, with files like those of Qwen3-VL."""
    directory = vision_model(tmp_path, "qwen3_vl")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_omni_moe"}))
    assert image_family(directory) is None
    with pytest.raises(UserError, match="model.name: .* has no processor of images that is supported"):
        ImageProcessor(directory)


def test_a_model_of_text_takes_no_images(tiny_dir):
    with pytest.raises(UserError, match="model.name: rows with images are not offered for llama; choose a model of"):
        read_config(tiny_dir, whole=True)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2_vl", "transformers resizes its images with torchvision alone, and pixels are made by Pillow here"),
        ("mllama", "its images reach the decoder through layers that rows without images skip"),
        ("gemma3n", "its vision tower is code of the package timm"),
    ],
)
def test_a_known_family_is_refused_with_its_reason(family, reason):
    with pytest.raises(UserError, match=f"^model.name: rows with images are not offered for {family}: {reason}; choo"):
        TOWER.refuse_family(family)


def test_crops_of_pan_and_scan_are_refused(tmp_path):
    """Each crop would have tokens that a row lacks."""
    directory = vision_model(tmp_path, "gemma3")
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_pan_and_scan": True}))
    with pytest.raises(UserError, match="model.name: the Gemma3Processor in .* cannot be read .do_pan_and_scan"):
        ImageProcessor(directory)


def test_limits_of_a_square_image_are_refused(tmp_path):
    with pytest.raises(
        UserError, match="data.image_max_pixels: cannot be set for this model: Gemma3Processor makes 56"
    ):
        ImageProcessor(vision_model(tmp_path, "gemma3"), max_pixels=1000)
