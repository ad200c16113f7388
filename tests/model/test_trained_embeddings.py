"""A trained embedding and head beside adapters: saved, loaded by plain peft, merged, and predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.estimate_cpu import LAYOUTS, without_onednn
from lean_finetune.core.errors import UserError
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_tensors
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.load_model import load_base, load_model
from lean_finetune.model.merge_adapters import MERGED
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.save_model import save_tuned
from tests.memory.common import setting_of
from tests.memory.predict.test_measured import check
from tests.model.test_adapters import logits, plain_peft, trained
from tests.small_model import CPU, base_of, save_small_llama, spec_of
from tests.step.common import split
from tests.train.interrupted import finish, in_parts, small_job

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # In peft.

BOTH = ["embed_tokens", "lm_head"]
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "head": {"lora_modules_to_save": ["lm_head"]},
    "embedding, nf4": {"method": "qlora", "lora_modules_to_save": ["embed_tokens"]},
    "int8": {"method": "int8_lora"},
    "pure_bf16": {"precision": "pure_bf16"},
    "bf16": {"precision": "bf16"},
}
EXACT = {"fp32", "head", "embedding, nf4", "int8", "pure_bf16"}


def spec_with(**changes: Any) -> Any:
    return spec_of(**{"lora_modules_to_save": BOTH, **changes})


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose head has its own weight."""
    return save_small_llama(tmp_path_factory.mktemp("untied"), dtype=torch.float32, tie_word_embeddings=False)


@pytest.mark.parametrize("form", FORMS)
def test_copies_reload_in_plain_peft_and_in_evaluate_and_are_merged(untied: Path, tmp_path: Path, form: str):
    """A trained embedding that is not saved, not loaded, or left out of the merged model."""
    spec = spec_with(**FORMS[form])
    model = trained(untied, spec)
    files = [path.name for path in untied.iterdir()]
    save_tuned(ParallelModel(model), base_of(untied), tmp_path / "tuned", spec, files)
    bound = 1e-6 if form in EXACT else 0.1
    with torch.autocast("cpu", torch.bfloat16, enabled=spec.precision == "bf16"):
        expected = logits(model)
        ours = load_adapter(load_base(untied, spec, CPU, "sdpa"), tmp_path / "tuned", spec)
        assert (logits(ours) - expected).abs().max() <= bound
        with ours.disable_adapter():
            assert (logits(ours) - logits(load_base(untied, spec, CPU))).abs().max() <= bound
        assert (logits(plain_peft(untied, tmp_path / "tuned", spec)) - expected).abs().max() <= bound
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / MERGED, dtype=torch.float32)
    assert (logits(merged) - expected).abs().max() < (0.1 if form in ("pure_bf16", "int8", "bf16") else 2e-5)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_those_of_the_whole_loss(untied: Path, chunk: int | None, precision: str):
    """A head whose chunks give the frozen weight's gradient, or none."""
    [batch] = split([3])
    grads = [_gradients(untied, batch, precision, one) for one in (chunk, None)]
    for name, gradient in grads[0].items():
        assert gradient.dtype == torch.float32 and gradient.abs().max() > 0 or ".lora_A" in name, name
        torch.testing.assert_close(gradient, grads[1][name], rtol=0.05 if precision == "bf16" else 1e-4, atol=1e-3)


def _gradients(directory: Path, batch: Batch, precision: str, chunk: int | None) -> dict[str, torch.Tensor]:
    model = load_model(directory, spec_with(precision=precision), CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = summed_loss(model, batch, chunk)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


PREDICTED: list[dict[str, Any]] = [
    {"method": "lora"},
    {"method": "qlora", "precision": "bf16", "grad_ckpt": True, "optimizer": "adamw_8bit"},
]
PREDICTED_SLOW: list[dict[str, Any]] = [
    {"method": "lora", "precision": "bf16"},
    {"method": "lora", "precision": "pure_bf16", "loss_chunk": None},
    {"method": "lora", "precision": "fp16", "optimizer": "adafactor"},
    {"method": "qlora", "lora_modules_to_save": ["lm_head"]},
    {"method": "int8_lora", "lora_modules_to_save": ["embed_tokens"]},
]


@pytest.mark.parametrize(
    "changes", [*PREDICTED, *(pytest.param(one, marks=pytest.mark.slow) for one in PREDICTED_SLOW)], ids=str
)
def test_the_prediction_counts_the_copies(untied: Path, changes: dict[str, Any]):
    """Weights, gradients or optimizer state of a copy that nobody counted."""
    setting = setting_of(**{"lora_modules_to_save": BOTH, **changes})
    with without_onednn():
        check(untied, setting, LAYOUTS["padded"])


def test_names_are_checked_against_the_model(untied: Path, small_llama: Path):
    """A name that trains nothing, or a copy of a weight that the head shares."""
    for directory, changes, message in (
        (
            untied,
            {"lora_modules_to_save": ["norm"]},
            "must name the embedding or the head, embed_tokens or lm_head; got n",
        ),
        (untied, {"lora_targets": ["q_proj", "lm_head"]}, "lm_head is trained in full and has an adapter too"),
        (small_llama, {}, "embed_tokens and lm_head share their weight, and a copy of one"),
    ):
        with pytest.raises(UserError, match=f"train.lora.modules_to_save: {message}"):
            load_model(directory, spec_with(**changes), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_with_copies_resumes_and_goes_on(untied: Path, tmp_path: Path, method: str):
    """A copy that starts from the base again."""
    job = small_job(untied, tmp_path / "tokens", method=method, lora_modules_to_save=BOTH)
    finish(job).check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))
    start = tmp_path / "start"
    start.mkdir()
    model = trained(untied, spec_with(method=method))
    save_adapter(model, start, str(untied))
    again = load_model(untied, spec_with(method=method), CPU, adapter=start)
    assert torch.equal(logits(again), logits(model))
    names = {tensor.name for tensor in trained_tensors(model_shapes(read_config(untied)), spec_with())}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names
