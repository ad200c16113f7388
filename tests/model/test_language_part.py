"""Language models inside multimodal checkpoints: trained on text, saved for the complete model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from lean_finetune.config.schema import BaseWeights
from lean_finetune.core.errors import UserError
from lean_finetune.evaluate.base_and_tuned import generation_attention
from lean_finetune.memory.predict.evaluation_phases import GenerationShape, peak_of_answers
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.model.empty_model import left_out, left_out_text, meta_model, stored_left_out
from lean_finetune.model.experts.experts_forward import expert_modules
from lean_finetune.model.experts.grouped_matmul import packing_of
from lean_finetune.model.files.safetensors_files import model_tensors
from lean_finetune.model.merge_adapters import MERGED, refuse_merge
from lean_finetune.model.model_config import read_config
from lean_finetune.step.loss import causal_lm, check_head, check_packed_rows, decoder_hidden, head_logits
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.save_model import save_tuned
from tests.kit.estimate_cpu import CPU_TARGET, Case, compare, worst_share
from tests.kit.loaded import load_base, load_model
from tests.kit.specs import train_of
from tests.kit.tiny_config import small_timm_models
from tests.memory.common import setting_of
from tests.model.reload import changed_adapters
from tests.model.small_multimodal import CONFIGS, multimodal_config, save_multimodal
from tests.small_model import base_of

CPU = torch.device("cpu")
IDS = torch.arange(60)[None] * 3 % 200 + 3
"""A row longer than the small models' windows, without tokens that stand for images."""
QUICK = ("gemma3",)
FAMILIES = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in CONFIGS]
PROCESSOR = "preprocessor_config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves small complete models, each once."""
    root = tmp_path_factory.mktemp("multimodal")

    def directory_of(family: str) -> Path:
        directory = root / family
        return directory if directory.exists() else save_multimodal(multimodal_config(family), directory)

    return directory_of


@torch.no_grad()
def our_logits(model: nn.Module) -> torch.Tensor:
    lm = causal_lm(model.eval())
    return head_logits(lm, decoder_hidden(lm, IDS))


@torch.no_grad()
def complete_logits(model: Any) -> torch.Tensor:
    """Logits of transformers' complete model on text."""
    logits: torch.Tensor = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.float()
    return logits


def complete(directory: Path, **options: Any) -> Any:
    """The complete model of a directory, by the class with which users load it."""
    images = type(read_config(directory)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    with small_timm_models():
        return (AutoModelForImageTextToText if images else AutoModelForMultimodalLM).from_pretrained(
            directory, **options
        )


def save(model: nn.Module, base: Path, out: Path, spec: BaseWeights, merge: list[str] | None = None) -> Path:
    """Save as stage train does, with a file of the processor."""
    (base / PROCESSOR).write_text("{}")
    save_tuned(ParallelModel(model), base_of(base, PROCESSOR), out, spec, merge)
    return out


def lora_layers(model: nn.Module) -> int:
    return sum(isinstance(module, LoraLayer) for module in model.modules())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # By peft.
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_and_merged_model_are_of_the_complete_model(family, saved, tmp_path):
    """Names of another model, adapters in vision layers of the same names, or a merged model without vision."""
    base = saved(family)
    spec = train_of("lora", "fp32", rank=4)
    model = load_model(base, spec, CPU)
    check_head(model, CPU)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    files = [path.name for path in base.iterdir() if path.name != PROCESSOR]
    out = save(model, base, tmp_path / "out", spec, files)
    ours = our_logits(model)
    plain = complete(base)
    assert (complete_logits(plain) - ours).abs().max() > 0.1
    adapted = PeftModel.from_pretrained(plain, str(out))
    torch.testing.assert_close(complete_logits(adapted), ours, rtol=0, atol=1e-6)
    assert lora_layers(adapted) == lora_layers(model)
    merged, info = complete(out / MERGED, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(complete_logits(merged), ours, rtol=0, atol=2e-4)
    check_other_parts(base, out / MERGED)
    assert (out / MERGED / PROCESSOR).read_text() == "{}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_model_is_saved_with_the_parts_that_were_not_loaded(family, saved, tmp_path):
    """A checkpoint that lost its vision tower, or whose language model is the old one."""
    base = saved(family)
    spec = train_of("full", "fp32")
    model = load_model(base, spec, CPU)
    assert left_out(model)
    for parameter in model.parameters():
        parameter.data += 0.01
    out = save(model, base, tmp_path / "out", spec)
    tuned, info = complete(out, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(complete_logits(tuned), our_logits(model), rtol=0, atol=1e-5)
    check_other_parts(base, out)


def check_other_parts(base: Path, out: Path) -> None:
    """The same tensors as in the base, those of other parts unchanged."""
    before, after = (load_file(directory / "model.safetensors") for directory in (base, out))
    assert before.keys() == after.keys()
    others = stored_left_out(meta_model(read_config(base)), model_tensors(base))
    assert others and all(torch.equal(before[name], after[name]) for name in others)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_language_model_is_predicted_as_it_is_counted(family, method, saved):
    """Vision weights that are loaded or counted."""
    for grad_ckpt in (False, True):
        pairs = compare(Case(family=family, method=method, grad_ckpt=grad_ckpt), saved(family))
        assert worst_share(pairs) < 1e-3, pairs


def test_vision_is_neither_loaded_nor_counted(saved):
    pairs = compare(Case(family="gemma3", method="qlora", layout="joined"), saved("gemma3"))
    assert worst_share(pairs) < 1e-3, pairs


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_complete_model(family, saved):
    """Prompts padded on the left, whose positions the complete model computes in its own way."""
    base, config = saved(family), read_config(saved(family))
    ours = load_base(base, train_of("full", "fp32"), CPU, generation_attention(config)).eval()
    theirs = complete(base).eval()
    ids = torch.cat([IDS, IDS.flip(1)])
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
    shape = GenerationShape(rows=2, prompt_tokens=60, new_tokens=8)
    assert peak_of_answers(TracedModel(config, setting_of(method="lora"), CPU_TARGET), shape).bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [family for family in CONFIGS if family not in ("gemma4", "gemma4_moe", "llama4", "qwen3_5")]
)
def test_rows_can_be_joined(family, saved):
    """Positions of images' coordinates, which packed rows give as plain positions."""
    check_packed_rows(load_model(saved(family), train_of("full", "fp32"), CPU), CPU)


def test_the_parts_that_are_not_loaded_are_named(saved):
    text = left_out_text(meta_model(read_config(saved("gemma3"))))
    assert text is not None and text.startswith("model.vision_tower (32,352 parameters), model.multi_modal_projector (")


def test_gemma_3n_needs_no_package_for_its_vision_part():
    """A refusal for want of timm, whose model text never reaches."""
    text = left_out_text(meta_model(multimodal_config("gemma3n")))
    assert text is not None and text.startswith("model.vision_tower (a model of timm), model.audio_tower (")


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", ["gemma4_moe", "llama4", "qwen3_vl_moe"])
def test_adapted_experts_are_those_of_the_complete_model(family, method, saved, tmp_path):
    """Experts that files have transposed (Qwen3-VL-MoE), or that the complete model all runs (Llama 4)."""
    base, spec = saved(family), train_of(method, "fp32", rank=4, lora_experts="all", lora_expert_rank=2)
    model = changed_adapters(load_model(base, spec, CPU))
    packed = {packing_of(experts, "down_proj") is not None for _, experts in expert_modules(model)}
    assert packed == {method == "qlora"}
    refuse_merge(base, spec, experts=True)
    out = save(model, base, tmp_path / "out", spec, [path.name for path in base.iterdir() if path.name != PROCESSOR])
    ours, plain = our_logits(model), complete(base)
    assert (complete_logits(plain) - ours).abs().max() > 0.1
    torch.testing.assert_close(complete_logits(complete(out / MERGED)), ours, rtol=0, atol=2e-4)
    if method == "lora":
        adapted = PeftModel.from_pretrained(plain, str(out))
        torch.testing.assert_close(complete_logits(adapted), ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["t5gemma2", "blip"])
def test_other_multimodal_models_are_refused_in_one_line(family, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    with pytest.raises(UserError, match=r"^model\.name: ") as caught:
        meta_model(read_config(tmp_path))
    assert "\n" not in str(caught.value)
