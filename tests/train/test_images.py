"""Training on rows with images: what is trained, and that interruptions change nothing."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForMultimodalLM, AutoTokenizer

from lean_finetune.core.atomic_files import FIGURES, read_json
from lean_finetune.core.errors import UserError
from lean_finetune.images.attachment import images_of
from lean_finetune.images.image_family import Size
from lean_finetune.images.image_inputs import ImageInputs
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_values
from lean_finetune.model.adapters import save_adapter
from lean_finetune.model.attention.kernels import maskless_forward
from lean_finetune.model.beside.whole_config import refuse_parts
from lean_finetune.model.continued_adapter import refuse_other_adapter
from lean_finetune.model.merge_adapters import write_merged
from lean_finetune.model.model_config import read_config
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.train.save_model import Base, save_full
from stages.bucket import main as bucket
from stages.estimate import main as estimate
from stages.evaluate import main as evaluate
from stages.train import main as train
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.small_vision import FAMILIES, adapted_parts, vision_model
from tests.train.image_jobs import image_workspace, job_of
from tests.train.interrupted import finish, in_parts
from tests.workspace import invoke

pytestmark = pytest.mark.usefixtures("one_thread")
FAST = [("mistral3", "lora", "lora"), ("gemma3", "full", "full")]
MODES = [("lora", "lora"), ("lora", "full"), ("full", "frozen"), ("full", "lora"), ("full", "full")]
"""train.vision and train.projector."""
FULL_PARTS = {"vision": "full", "projector": "full"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of drawn images and of text, and a small Qwen2.5-VL."""
    return image_workspace(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "qlora", "vision": "lora", "projector": "lora", "grad_ckpt": True},
        pytest.param({"method": "full", "vision": "full"}, marks=pytest.mark.slow),
        pytest.param({"method": "lora"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_interrupted_run_equals_an_uninterrupted_one(workspace, tmp_path, changes):
    """Images that are read in another order, or a tower in another mode, after a resume."""
    load_model(workspace / "model", spec_of(method=changes["method"]), CPU)  # bitsandbytes' tables.
    job = job_of(workspace, **changes)
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Of peft.
@pytest.mark.parametrize(
    ("family", "vision", "projector"),
    [
        pytest.param(family, *modes, marks=() if (family, *modes) in FAST else pytest.mark.slow)
        for family in FAMILIES
        for modes in MODES
    ],
)
def test_each_family_goes_from_rows_to_a_model_in_plain_transformers(tmp_path, family, vision, projector):
    """Rows whose tokens the model takes for others, a run that a kill changes, a tower whose adapters are lost."""
    root = image_workspace(tmp_path, family)
    changes = adapted_parts(family, {"method": "lora", "vision": vision, "projector": projector})
    job = job_of(root, **changes)
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [2]))
    check_plain_copies(root, tmp_path / "adapter", changes)


OF_STAGES: dict[str, Any] = {
    **{"bucket__max_tokens": 512, "train__tokens_per_step": 512, "train__epochs": 1, "train__method": "lora"},
    **{"train__vision": "lora", "evaluate__generate_rows": 4, "evaluate__max_new_tokens": 2, "run__cpu_threads": 1},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Of peft.
@pytest.mark.parametrize(
    ("family", "vision"),
    [
        *(
            ("qwen3_vl_moe", "lora"),
            ("qwen3_5", "lora"),
            ("qwen3_5_moe", "full"),
            ("gemma3", "full"),
            ("smolvlm", "lora"),
        ),
        *(("gemma4", "lora"), ("gemma4_large", "full"), ("glm4v", "lora"), ("glm4v_moe", "frozen")),
        *(("paddleocr_vl", "full"), ("ovis2", "lora"), ("granite4_vision", "lora"), ("minicpmv4_6", "full")),
    ],
)
def test_a_family_passes_through_the_stages(tmp_path, monkeypatch, family, vision):
    """A plan, a prediction or an answer that no job of a test asks for."""
    root = image_workspace(tmp_path, family, **{**OF_STAGES, "train__vision": vision})
    monkeypatch.chdir(root)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    for stage in (bucket, estimate, train, evaluate):
        result = invoke(stage)
        assert result.exit_code == 0, result.output
    predicted = read_json(root / "data/estimate" / FIGURES)["peak_bytes_predicted"]
    assert read_json(root / "data/train" / FIGURES)["peak_bytes_measured"] == pytest.approx(predicted, rel=1e-3)
    answers = [json.loads(line) for line in (root / "data/evaluate/generations.jsonl").read_text().splitlines()]
    assert any(answer.get("images") for answer in answers)


@pytest.mark.parametrize(
    ("changes", "trained"),
    [
        ({"method": "full"}, ""),
        ({"method": "full", "vision": "full"}, "blocks patch_embed"),
        ({"method": "full", "projector": "full"}, "merger"),
        ({"method": "lora"}, ""),
        ({"method": "lora", "vision": "lora"}, "blocks"),
        ({"method": "lora", "projector": "lora"}, "merger"),
        ({"method": "lora", "projector": "full"}, "merger"),
        ({"method": "qlora", "projector": "full", "vision": "lora"}, "blocks merger"),
        ({"method": "lora", "vision": "full"}, "blocks patch_embed"),
        ({"method": "qlora", "projector": "lora", "vision": "full", "grad_ckpt": True}, "blocks merger patch_embed"),
        ({"method": "int8_lora", **FULL_PARTS, "grad_ckpt": True}, "blocks merger patch_embed"),
    ],
    ids=str,
)
def test_parts_are_trained_as_the_parameters_say(workspace, changes, trained):
    model = load_model(workspace / "model", spec_of(**changes), CPU, images=True)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {name.partition("visual.")[2].partition(".")[0] for name in names if "visual." in name}
    assert found == set(trained.split()) and any("language_model." in name for name in names)
    visual: Any = next(module for name, module in model.named_modules() if name.endswith("visual"))
    assert visual.blocks[0].training == ("blocks" in trained) and visual.merger.training == ("merger" in trained)
    output = visual(torch.randn(16, 1176), grid_thw=torch.tensor([[1, 4, 4]])).pooler_output
    assert output.requires_grad == bool(trained)
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shapes = model_shapes(read_config(workspace / "model", whole=True))
    assert trained_values(shapes, spec_of(**changes)) == count  # Frozen parts once counted as trained state.
    if trained:  # A frozen projector once left the tower without gradients.
        output.square().sum().backward()
        assert all(one.grad is not None for one in visual.parameters() if one.requires_grad)


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "int8_lora"])
def test_a_frozen_tower_keeps_nothing_for_backward(workspace, method):
    """With recomputed layers, transformers gave its patches a gradient: 17 GiB of Qwen2.5-VL-7B for two images."""
    model = load_model(workspace / "model", spec_of(method=method, grad_ckpt=True), CPU, images=True)
    visual: Any = next(module for name, module in model.named_modules() if name.endswith("visual"))
    found = visual(torch.randn(16, 1176), grid_thw=torch.tensor([[1, 4, 4]])).pooler_output
    assert not found.requires_grad


def test_a_tower_in_the_type_of_adapters_returns_that_of_the_base(tmp_path):
    """SmolVLM converts what its tower returns to the type of the first parameter, and ended with an error in bf16."""
    root = image_workspace(tmp_path, "smolvlm")
    job = job_of(root, [[[0, 24]]], method="lora", vision="full", precision="bf16")
    assert len(finish(replace(job, measured_steps=frozenset())).curves) == 1


def test_a_tower_learns_although_the_first_step_has_no_image(workspace):
    """Its adapters, which get no gradient there, were refused as dead."""
    job = job_of(workspace, [[[24, 25]], [[0, 1]]], method="lora", vision="lora")
    assert len(finish(replace(job, measured_steps=frozenset())).curves) == 2


SWITCHES: list[dict[str, Any]] = [
    {"grad_ckpt": True, "grad_ckpt_policy": "every_n", "loss_chunk": None},
    {"grad_ckpt": True},
    {"loss_chunk": None},
    {"grad_ckpt": True, "grad_ckpt_policy": "every_n"},
]
"""The first ones together; alone, which shows the one at fault, they are slow."""


@pytest.mark.parametrize(
    ("vision", "switches"),
    [
        ("frozen", SWITCHES[:1]),
        *(pytest.param(vision, SWITCHES[1:], marks=pytest.mark.slow) for vision in ("frozen", "full")),
    ],
)
def test_memory_switches_leave_the_loss_unchanged(workspace, vision: str, switches: list[dict[str, Any]]):
    plain = [row["loss"] for row in finish(job_of(workspace, method="lora", vision=vision)).curves]
    for switch in switches:
        found = [row["loss"] for row in finish(job_of(workspace, method="lora", vision=vision, **switch)).curves]
        assert found == pytest.approx(plain, rel=1e-6), switch


def test_more_loader_threads_give_the_same_bytes(workspace):
    jobs = [job_of(workspace, method="lora", loader_threads=count) for count in (0, 3)]
    assert finish(jobs[0]).weights == finish(jobs[1]).weights
    assert torch.get_num_threads() == 1


def logits_of(model: Any, root: Path) -> torch.Tensor:
    """Logits of transformers' own model, or of one of peft's, for a drawn image and a question."""
    processor = ImageProcessor(root / "model")
    image = Image.open(sorted((root / "shapes/images").glob("*.png"))[0]).convert("RGB")
    text = f"{processor.expansion(Size(image.height, image.width))} Which colour?"
    ids_BT = AutoTokenizer.from_pretrained(root / "model")(text, return_tensors="pt").input_ids
    given = ImageInputs(processor, read_config(root / "model", whole=True)).for_generation(ids_BT, [[image]])
    # In training, our attention makes a mask of images where the step asks for it.
    with torch.no_grad(), maskless_forward(None, keeps_masks=True):
        found: torch.Tensor = model.eval()(input_ids=ids_BT, **given).logits
    return found


def plain(directory: Path) -> Any:
    return AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32)


def shuffled(model: Any, parts: str) -> Any:
    """The model with other values in its trained parameters, of which some have names with `parts`."""
    torch.manual_seed(3)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    assert any(re.search(parts, name) for name, _ in trained)
    for _, parameter in trained:
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def check_plain_copies(root: Path, adapter: Path, changes: dict[str, Any]) -> None:
    """A tower that is trained beside adapters gives the same logits in plain peft and merged in plain transformers."""
    base, spec = root / "model", spec_of(**changes)
    model = shuffled(load_model(base, spec, CPU, images=True), r"\.(visual|vision_\w+)\.")
    adapter.mkdir()
    save_adapter(model, adapter, str(base))
    expected = logits_of(model, root)
    config = read_config(base, whole=True)
    refuse_other_adapter(adapter, spec, config)
    for part in ("vision", "projector"):
        full = getattr(spec, part) == "full"
        needed, other = ("full", "lora") if full else ("lora, or frozen", "full")
        with pytest.raises(UserError, match=f"train.{part}: must be {needed}, as in mo"):
            refuse_other_adapter(adapter, spec_of(**{**changes, part: other}), config)
    torch.testing.assert_close(logits_of(load_model(base, spec, CPU, adapter=adapter, images=True), root), expected)
    assert (expected - logits_of(plain(base), root)).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(plain(base), adapter), root), expected)
    merged = adapter / "merged"
    merged.mkdir()
    write_merged(base, [path.name for path in base.iterdir()], adapter, spec, merged)
    torch.testing.assert_close(logits_of(plain(merged), root), expected)


OLD_FORM = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 640}
"""Limits in the form of Qwen2-VL's published file."""


@pytest.mark.parametrize(
    ("own", "limits"),
    [({}, {"max_pixels": 3136, "min_pixels": 1568}), (OLD_FORM, {"max_pixels": 3136}), (OLD_FORM, OLD_FORM)],
    ids=["size", "old form", "its own"],
)
def test_the_limits_of_training_are_those_of_the_result(workspace, tmp_path, own, limits):
    """Other tools, and our chat, would show a model images of other sizes than it learnt from."""
    names = [path.name for path in (workspace / "model").iterdir() if path.suffix != ".safetensors"]
    base = shutil.copytree(workspace / "model", tmp_path / "base")
    file = base / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    rows = TokenRows(workspace / "data/tokens", "train")
    shown = images_of(rows.attached)
    assert shown is not None
    tuned = Base(
        address="base",
        revision=None,
        directory=base,
        tokenizer_files=[name for name in names if name not in ("config.json", "generation_config.json")],
        chat_template=None,
        attached=(replace(shown, **limits),),
    )
    (tmp_path / "tuned").mkdir()
    tuned.copy_tokenizer(tmp_path / "tuned")
    image, expected = Image.new("RGB", (1680, 1260)), ImageProcessor(base, **limits)
    theirs: Any = AutoImageProcessor.from_pretrained(tmp_path / "tuned", backend="pil")
    pixels = expected.arguments([[image]])["pixel_values"]
    assert len(pixels) == ImageProcessor(tmp_path / "tuned").patches(Size(1260, 1680))
    torch.testing.assert_close(theirs(image, return_tensors="pt")["pixel_values"], pixels)


def test_a_model_trained_in_full_loads_in_plain_transformers(workspace, tmp_path):
    spec = spec_of(method="full", vision="full", projector="full")
    model: Any = shuffled(load_model(workspace / "model", spec, CPU, images=True), r"visual\.patch_embed")
    save_full(model, tmp_path)
    assert "_is_whole" not in json.loads((tmp_path / "config.json").read_text())
    torch.testing.assert_close(logits_of(plain(tmp_path), workspace), logits_of(model, workspace))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_tiles": 4}, "train.sequence_tiles: was not tried .* got 4 and rows with images; leave it blank"),
        ({"offload": "parameters"}, "train.offload: was not tried .* got parameters and rows with images; set it to n"),
        ({"context_parallel": 2}, "train.context_parallel: would divide an image's tokens among GPUs; got 2 and rows"),
        ({"tensor_parallel": 2}, "train.tensor_parallel: divides the products of the language model alone; got 2 and"),
        ({"pipeline_stages": 2}, "train.pipeline_stages: has no stage for a vision tower; got 2 and rows with images"),
    ],
    ids=str,
)
def test_switches_that_do_not_know_a_tower_are_refused(workspace, changes, message):
    config = read_config(workspace / "model", whole=True)
    with pytest.raises(UserError, match=message):
        refuse_parts(spec_of(**changes), config)


def test_parts_of_rows_of_text_are_not_trained(workspace):
    with pytest.raises(UserError, match="train.vision: has an effect only on rows with images; got lora"):
        refuse_parts(spec_of(vision="lora"), read_config(workspace / "model"))


def test_adapters_of_a_part_without_layers_are_refused(workspace, tmp_path):
    """A projector of one matrix, or targets that are the language model's alone."""
    gemma = vision_model(tmp_path, "gemma3")
    with pytest.raises(UserError, match="train.projector: adapts no layer: .* got lora; set it to frozen, or change"):
        load_model(gemma, spec_of(method="lora", projector="lora"), CPU, images=True)
    with pytest.raises(UserError, match="train.vision: adapts no layer"):
        load_model(
            workspace / "model", spec_of(method="lora", vision="lora", lora_targets=["q_proj"]), CPU, images=True
        )
