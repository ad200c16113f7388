"""A trained embedding and head beside adapters: saved, loaded by plain peft, merged, and predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from transformers import AutoModelForCausalLM

from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.predict.state_formulas import model_shapes, trained_tensors
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.merge_adapters import MERGED
from lean_finetune.model.model_config import read_config
from lean_finetune.model.precision import base_dtype
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation
from lean_finetune.model.trained_rows import TrainedRows, with_rows
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import TokenLoss
from lean_finetune.train.save_model import save_tuned
from tests.kit.estimate_cpu import LAYOUTS, without_onednn
from tests.kit.loaded import load_base, load_model
from tests.memory.common import setting_of
from tests.memory.predict.test_measured import check
from tests.model.test_adapters import logits, plain_peft, trained
from tests.small_model import CPU, VOCABULARY, base_of, save_small_llama, spec_of
from tests.step.common import slow, split
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


@pytest.mark.parametrize("form", [one if one in ("fp32", "embedding, nf4") else slow(one) for one in FORMS])
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


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
def test_gradients_are_those_of_the_whole_loss(untied: Path, precision: str):
    """A head whose chunks give the frozen weight's gradient, or none."""
    [batch] = split([3])
    grads = [_gradients(untied, batch, precision, chunk) for chunk in (16, None)]
    for name, gradient in grads[0].items():
        assert gradient.dtype == torch.float32 and gradient.abs().max() > 0 or ".lora_A" in name, name
        torch.testing.assert_close(gradient, grads[1][name], rtol=0.05 if precision == "bf16" else 1e-4, atol=1e-3)


def _gradients(directory: Path, batch: Batch, precision: str, chunk: int | None) -> dict[str, torch.Tensor]:
    model = load_model(directory, spec_with(precision=precision), CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = summed_loss(model, batch, TokenLoss(chunk))
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


@pytest.mark.parametrize("changes", [*PREDICTED, *map(slow, PREDICTED_SLOW)], ids=str)
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


TOKENS = [VOCABULARY + 3, 9, VOCABULARY + 1]
"""Ids of trained tokens: one that has a row, and two new ones."""
ROWS = VOCABULARY + 4
NEW_IDS = torch.tensor([[3, 9, 17, VOCABULARY + 1, 30, VOCABULARY + 3, 41, 9]])


@torch.no_grad()
def logits_of_new(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=NEW_IDS, use_cache=False).logits.float()


ROW_FORMS: list[Any] = [
    (False, {}),
    (True, {"method": "qlora"}),
    slow(True, {}),
    slow(False, {"precision": "bf16"}),
]


@pytest.mark.parametrize(("tied", "changes"), ROW_FORMS, ids=str)
def test_new_tokens_reload_in_plain_peft_and_in_evaluate_and_are_merged(untied, tied_llama, tmp_path, tied, changes):
    """Rows that a loader draws at random, that the head lacks, or that the merged model does not have."""
    directory = tied_llama if tied else untied
    spec = spec_of(lora_trainable_tokens=TOKENS, **changes)
    start: Any = load_model(directory, spec, CPU)
    rows = start.get_input_embeddings().original_module.weight
    base: Any = load_base(directory, spec, CPU)
    old = base.get_input_embeddings().weight
    assert len(rows) == ROWS and torch.equal(rows[:VOCABULARY], old)
    torch.testing.assert_close(rows[VOCABULARY:].float(), old.float().mean(0).expand(4, -1), rtol=1e-2, atol=1e-4)
    count = sum(p.numel() for n, p in start.named_parameters() if p.requires_grad and "delta" in n)
    assert count == (1 if tied else 2) * 3 * 64

    model = trained(directory, spec)
    files = [path.name for path in directory.iterdir()]
    save_tuned(ParallelModel(model), base_of(directory), tmp_path / "tuned", spec, files)
    adapter = tmp_path / "tuned"
    bound = 0.1 if spec.precision == "bf16" else 5e-5
    with torch.autocast("cpu", torch.bfloat16, enabled=spec.precision == "bf16"):
        expected = logits_of_new(model)
        ours = load_adapter(load_base(directory, spec, CPU, "sdpa"), adapter, spec)
        assert (logits_of_new(ours) - expected).abs().max() <= bound
        # As someone without this project: the base gets rows, whatever their values, then the adapter.
        how = quantisation(spec)
        base = AutoModelForCausalLM.from_pretrained(
            directory, dtype=base_dtype(spec), **({} if how is None else {"quantization_config": how})
        )
        base.resize_token_embeddings(ROWS)
        theirs = PeftModel.from_pretrained(base, str(adapter))
        keep_trainable_on_cpu(theirs)
        assert (logits_of_new(theirs) - expected).abs().max() <= bound
    assert (expected - logits_of_new(start)).abs().max() > 0.05
    merged: Any = AutoModelForCausalLM.from_pretrained(adapter / MERGED, dtype=torch.float32)
    assert merged.config.vocab_size == ROWS == len(merged.get_input_embeddings().weight)
    assert (logits_of_new(merged) - expected).abs().max() < bound


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("tied"), dtype=torch.float32)


@pytest.mark.parametrize(("tied", "chunk"), [(True, 16), (False, None), slow(True, None), slow(False, 16)])
def test_only_the_named_rows_are_trained_and_as_peft_trains_them(untied, tied_llama, tied: bool, chunk: int | None):
    """A gradient of another row, or that of one of two places where a tied row is used."""
    directory = tied_llama if tied else untied
    [batch] = split([3])
    used = batch.input_ids_BT.unique().tolist()[:4]
    model: Any = load_model(directory, spec_of(lora_trainable_tokens=used), CPU)
    summed_loss(model, batch, TokenLoss(chunk)).backward()
    plain: Any = load_model(directory, spec_of(lora_trainable_tokens=used), CPU)
    for module in plain.modules():
        if type(module) is TrainedRows:
            object.__setattr__(module, "__class__", TrainableTokensLayer)
    summed_loss(plain, batch, TokenLoss(None)).backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


ROWS_PREDICTED: list[tuple[bool, dict[str, Any]]] = [
    (True, {"method": "qlora", "precision": "bf16", "grad_ckpt": True}),
    (False, {"method": "lora"}),
]
ROWS_PREDICTED_SLOW: list[tuple[bool, dict[str, Any]]] = [
    (True, {"method": "lora"}),
    (False, {"method": "qlora"}),
    (False, {"method": "lora", "precision": "bf16", "optimizer": "adamw_8bit"}),
    (True, {"method": "lora", "precision": "fp16", "loss_chunk": None}),
    (True, {"method": "int8_lora"}),
]


@pytest.mark.parametrize(
    ("tied", "changes"),
    [*ROWS_PREDICTED, *(slow(*one) for one in ROWS_PREDICTED_SLOW)],
    ids=str,
)
def test_the_prediction_counts_the_rows(untied, tied_llama, tied: bool, changes: dict[str, Any]):
    """A copy of the embedding in each forward that nobody counted."""
    directory = tied_llama if tied else untied
    setting = setting_of(lora_trainable_tokens=TOKENS, **changes)
    config = with_rows(read_config(directory), setting.train)
    assert config.vocab_size == ROWS
    with without_onednn():
        check(directory, setting, LAYOUTS["padded"], config)


def test_fit_counts_rows_that_ids_need_without_a_tokenizer():
    """A shipped configuration has no tokenizer; text needs one."""
    base = with_flags(load_params(COMMON_PARAMS), ["model.name=qwen2.5-0.5b", "hardware.gpu=24GiB"])
    assert fit_run(base).config.vocab_size == 151936
    run = fit_run(with_flags(base, ["train.lora.trainable_tokens=[151940,7]"]))
    assert run.config.vocab_size == 151941 and run.setting.train.lora.trainable_tokens == [7, 151940]
    with pytest.raises(UserError, match="has no tokenizer.json"):
        fit_run(with_flags(base, ["train.lora.trainable_tokens=[<tool>]"]))
