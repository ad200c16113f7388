"""What a batch gives a model for its pictures, against transformers' own processor and model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.data.pictures.families import Size
from lean_finetune.data.pictures.processor import PictureProcessor, blank, picture_family
from lean_finetune.model.load_model import load_model
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import collate
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.picture_inputs import PictureInputs
from tests.small_model import CPU, spec_of
from tests.small_vision import FAMILIES, vision_model

TEXT = "Is this {image} larger than {image}? No."
SIZES = [(100, 200), (60, 60)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp(request.param) / request.param, request.param)


def photo(height: int, width: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def test_sizes_say_how_many_patches_and_tokens_the_processor_makes(model):
    processor = PictureProcessor(model)
    images = processor._processor.image_processor
    for size in (Size(28, 28), Size(100, 200), Size(999, 60), Size(1500, 1200)):
        made = images([blank(size)], return_tensors="pt")
        assert processor.patches(size) == len(made["pixel_values"])
        assert processor.expansion(size) == processor._processor.replace_image_token(made, 0)


def test_losses_and_gradients_equal_those_of_transformers_called_directly(model):
    """Another position, another pixel, or a mask that shows a padding token."""
    config, processor = read_config(model, pictures=True), PictureProcessor(model)
    inputs, words = PictureInputs(processor, config), AutoTokenizer.from_pretrained(model)
    pictures = [[photo(*size, seed=n) for n, size in enumerate(SIZES)], [photo(90, 120, seed=7)], []]
    texts = [TEXT, "What is {image}? A heron.", "Who is there? Nobody."]
    rows = []
    for text, shown in zip(texts, pictures, strict=True):
        for picture in shown:
            text = text.replace("{image}", processor.expansion(Size(picture.height, picture.width)), 1)
        ids = np.array(words(text, add_special_tokens=False).input_ids, np.int32)
        rows.append((ids, np.array([[len(ids) - 4, len(ids)]])))
    longest = max(len(ids) for ids, _ in rows)
    batch = collate(rows, longest + 3, 0)
    made = inputs.tensors(batch.input_ids_BT, pictures)
    spec = spec_of(method="full", vision="full", projector="full", loss_chunk=4)
    ours = load_model(model, spec, CPU, pictures=True)
    loss = summed_loss(ours, type(batch)(**{**vars(batch), "pictures": made}), 4)
    loss.backward()

    theirs = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32)
    flat = [picture for shown in pictures for picture in shown]
    given = processor._processor.image_processor(flat, return_tensors="pt")
    for name, value in given.items():
        assert torch.equal(value, made[name]), name
    mask_BT = torch.zeros_like(batch.input_ids_BT)
    for number, (ids, _) in enumerate(rows):
        mask_BT[number, : len(ids)] = 1
    kinds_BT = (batch.input_ids_BT == config.image_token_id).int()
    logits = theirs(input_ids=batch.input_ids_BT, attention_mask=mask_BT, mm_token_type_ids=kinds_BT, **given).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient = wanted[name].grad
        assert gradient is not None and parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_a_family_with_the_same_processor_is_refused_by_name(tmp_path):
    """Qwen3-VL's mixtures and Qwen3.5 name the processor of Qwen3-VL."""
    directory = vision_model(tmp_path, "qwen3_vl")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "qwen3_vl_moe"}))
    assert picture_family(directory) is None
    with pytest.raises(UserError, match="model.name: .* has no processor of pictures that is supported"):
        PictureProcessor(directory)


def test_a_model_of_text_takes_no_pictures(tiny_dir):
    with pytest.raises(UserError, match="model.name: rows with images are not offered for llama; choose a model of"):
        read_config(tiny_dir, pictures=True)
