"""Adapters of reward models: trained embeddings and new tokens beside the head, and adapters that go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.continued_adapter import refuse_other_adapter
from lean_finetune.model.merge_adapters import MERGED
from lean_finetune.model.model_config import read_config
from lean_finetune.model.precision import base_dtype
from lean_finetune.model.quantize import keep_trainable_on_cpu, quantisation
from lean_finetune.model.trained_rows import with_rows
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.save_model import save_tuned
from tests.kit.estimate_cpu import LAYOUTS, without_onednn
from tests.kit.loaded import load_base, load_model
from tests.memory.common import setting_of
from tests.memory.predict.test_measured import check
from tests.memory.predict.test_preferences import of_kind
from tests.small_model import CPU, VOCABULARY, base_of, moved_adapter, save_small_llama, spec_of
from tests.step.common import slow

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # In peft.

HEAD = "base_model.model.score.weight"
TOKENS = [VOCABULARY + 3, 9, VOCABULARY + 1]
IDS = torch.tensor([[3, 9, 17, 30, 41, 9]])
NEW_IDS = torch.tensor([[3, 9, 17, VOCABULARY + 1, 30, VOCABULARY + 3, 41, 9]])


def reward(**changes: Any) -> Train:
    return spec_of(objective="reward", loss_chunk=None, **changes)


@pytest.fixture(scope="module", params=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose head shares the embedding's weight, or not."""
    tied = request.param == "tied"
    return save_small_llama(tmp_path_factory.mktemp(request.param), dtype=torch.float32, tie_word_embeddings=tied)


@torch.no_grad()
def scores(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The score after each token."""
    return torch.stack([model.eval()(input_ids=ids[:, :end]).logits[0] for end in range(1, ids.shape[1] + 1)])


def moved(directory: Path, spec: Train, seed: int = 3) -> Any:
    """A model whose trained tensors have left their start."""
    model, draw = load_model(directory, spec, CPU, seed=1), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model


def plain(directory: Path, adapter: Path, spec: Train, rows: int | None) -> nn.Module:
    """A reward model as someone without this project loads it; the base gets rows for new tokens, of any values."""
    how = quantisation(spec)
    more: dict[str, Any] = {} if how is None else {"quantization_config": how}
    base = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, dtype=base_dtype(spec), ignore_mismatched_sizes=False, **more
    )
    if rows is not None:
        base.resize_token_embeddings(rows)
    loaded = PeftModel.from_pretrained(base, str(adapter))
    keep_trainable_on_cpu(loaded)
    return loaded


FORMS: list[Any] = [
    {"lora_modules_to_save": ["embed_tokens"]},
    {"lora_trainable_tokens": TOKENS},
    slow({"lora_modules_to_save": ["embed_tokens"], "method": "qlora"}),
    slow({"lora_trainable_tokens": TOKENS, "method": "qlora"}),
]


@pytest.mark.parametrize("changes", FORMS, ids=str)
def test_trained_embeddings_reload_in_plain_peft_and_in_evaluate_and_are_merged(directory, tmp_path, changes):
    """A score head that gets an output for each new token, or a copy of the embedding that is not saved."""
    spec = reward(**changes)
    ids, rows = (NEW_IDS, VOCABULARY + 4) if spec.lora.trainable_tokens else (IDS, None)
    model = moved(directory, spec)
    files = [path.name for path in directory.iterdir()]
    save_tuned(ParallelModel(model), base_of(directory), tmp_path / "tuned", spec, files)
    expected, saved = scores(model, ids), load_file(tmp_path / "tuned/adapter_model.safetensors")
    assert expected.shape == (ids.shape[1], 1) and saved[HEAD].shape == (1, 64)
    assert len([name for name in saved if ".lora_" not in name]) == 2
    ours = load_adapter(load_base(directory, spec, CPU, "sdpa", scores=True), tmp_path / "tuned", spec)
    for loaded in (ours, plain(directory, tmp_path / "tuned", spec, rows)):
        torch.testing.assert_close(scores(loaded, ids), expected, rtol=1e-4, atol=1e-5)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned" / MERGED, dtype=torch.float32)
    torch.testing.assert_close(scores(merged, ids), expected, rtol=1e-3, atol=1e-4)
    start = load_model(directory, spec, CPU, seed=1)
    assert (scores(start, ids) - expected).abs().max() > 0.01


@pytest.mark.parametrize("changes", [{}, {"lora_modules_to_save": ["embed_tokens"]}, {"lora_trainable_tokens": [9, 3]}])
def test_a_reward_adapter_goes_on_from_its_own_head(directory: Path, tmp_path: Path, changes: dict[str, Any]):
    spec = reward(**changes)
    start = tmp_path / "start"
    start.mkdir()
    save_adapter(moved(directory, spec), start, str(directory))
    refuse_other_adapter(start, spec, read_config(directory, scores=True))
    model: Any = load_model(directory, spec, CPU, seed=7, adapter=start)
    save_adapter(model, tmp_path, str(directory))
    before, after = (load_file(path / "adapter_model.safetensors") for path in (start, tmp_path))
    assert HEAD in before and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("changes", [{}, {"lora_modules_to_save": ["embed_tokens"]}, {"lora_trainable_tokens": [9, 3]}])
def test_an_adapter_of_a_language_model_goes_on_with_a_new_head(directory: Path, tmp_path: Path, changes):
    """A tensor of the language model's head that nothing reads, or adapters that stay as they were initialised."""
    if "lora_modules_to_save" in changes and read_config(directory).tie_word_embeddings:
        pytest.skip("a copy of one of two tied weights is refused for a language model")
    names = {"lora_modules_to_save": ["embed_tokens", "lm_head"]} if "lora_modules_to_save" in changes else changes
    start, spec = moved_adapter(directory, tmp_path / "start", spec_of(**names)), reward(**changes)
    refuse_other_adapter(start, spec, read_config(directory, scores=True))
    model: Any = load_model(directory, spec, CPU, seed=7, adapter=start)
    save_adapter(model, tmp_path, str(directory))
    before, after = (load_file(path / "adapter_model.safetensors") for path in (start, tmp_path))
    assert after.keys() - before.keys() == {HEAD}
    assert all("lm_head" in name for name in before.keys() - after.keys())
    assert all(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())
    new = load_model(directory, spec, CPU, seed=7)
    head = dict(new.named_parameters())["base_model.model.score.modules_to_save.default.weight"]
    assert torch.equal(after[HEAD], head)
    # Stage evaluate loads the start as the base of the comparison.
    base = load_adapter(load_base(directory, spec, CPU, scores=True, seed=7), start, spec)
    torch.testing.assert_close(scores(base, IDS), scores(model, IDS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        (
            "dpo",
            {},
            r"model\.adapter: .*adapter_config\.json is that of a reward model, and train\.objective is dpo; set "
            r"train\.objective=reward, or name another adapter$",
        ),
        ("reward", {"lora_rank": 8}, r"train\.lora\.rank: must be 4, as in model\.adapter="),
        (
            "reward",
            {"lora_modules_to_save": ["embed_tokens"]},
            r"train\.lora\.modules_to_save: must be \[\], as in .*; got \[embed_tokens\]; set",
        ),
    ],
)
def test_a_reward_adapter_that_does_not_suit_the_run_is_refused(directory, tmp_path, objective, changes, message):
    start = moved_adapter(directory, tmp_path / "start", reward())
    spec = spec_of(objective=objective, loss_chunk=None, **changes)
    with pytest.raises(UserError, match=message):
        refuse_other_adapter(start, spec, read_config(directory, scores=spec.scores))


@pytest.mark.parametrize("name", ["score", "lm_head"])
def test_a_copy_of_a_head_is_refused(directory: Path, name: str):
    """The head of a reward model is trained in full anyway, and it has no other."""
    with pytest.raises(
        UserError,
        match=rf"must name the embedding \(a reward model's head .*\), embed_tokens; got {name}; leave it out",
    ):
        load_model(directory, reward(lora_modules_to_save=[name]), CPU)


PREDICTED: list[Any] = [
    {"method": "lora", "lora_modules_to_save": ["embed_tokens"]},
    {"method": "qlora", "lora_trainable_tokens": TOKENS, "grad_ckpt": True},
    slow({"method": "qlora", "lora_modules_to_save": ["embed_tokens"], "grad_ckpt": True, "precision": "bf16"}),
    slow({"method": "lora", "lora_trainable_tokens": TOKENS, "precision": "bf16", "optimizer": "adamw_8bit"}),
    slow({"method": "int8_lora", "lora_modules_to_save": ["embed_tokens"]}),
    slow({"method": "int8_lora", "lora_trainable_tokens": TOKENS}),
]


@pytest.mark.parametrize("changes", PREDICTED, ids=str)
def test_the_prediction_counts_the_head_and_the_embedding(directory: Path, changes: dict[str, Any]):
    """Logits of new tokens that a reward model does not have, or a copy that nobody counted."""
    setting = setting_of(objective="reward", loss_chunk=None, **changes)
    config = with_rows(read_config(directory, scores=True), setting.train)
    with without_onednn():
        check(directory, setting, of_kind("reward", LAYOUTS["padded"]), config)
