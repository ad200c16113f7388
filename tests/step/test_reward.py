"""Reward models: their loss against transformers' own classifier, and files that plain transformers and peft load."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from lean_finetune.commands.tuned.tuned_model import find_tuned
from lean_finetune.config.load import load_params, with_flags
from lean_finetune.config.schema import Train
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import save_adapter
from lean_finetune.model.merge_adapters import write_merged
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import Batch
from lean_finetune.step.loss import causal_lm, check_head, summed_loss
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.step_loss import known_figures
from lean_finetune.train.save_model import save_full
from tests.conftest import ROOT
from tests.kit.loaded import load_model
from tests.kit.specs import changed
from tests.small_model import CPU, spec_of
from tests.step.test_preference_loss import batch_of, gradients, pair_rows, step_of


def reward(method: str) -> Train:
    return changed(spec_of(method=method, loss_chunk=None), objective="reward")


def model_of(directory: Path, train: Train) -> torch.nn.Module:
    """A reward model whose adapters have an effect."""
    model = load_model(directory, train, CPU, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def own_scores(model: torch.nn.Module) -> torch.Tensor:
    """The scores of all rows by the model's own forward, one row at a time, so that nothing pads."""
    return torch.cat([model(input_ids=torch.from_numpy(ids)[None]).logits[0] for ids, _ in pair_rows()])


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_loss_is_bradley_terry_s_in_any_micro_batches(small_llama, method):
    train = reward(method)
    model = model_of(small_llama, train)
    check_head(model, CPU)
    scores = own_scores(model)
    expected = -F.logsigmoid(scores[::2] - scores[1::2]).mean()
    model.zero_grad()
    expected.backward()
    exact = gradients(model)
    divisions: list[list[Batch]] = [
        [batch_of([0, 1, 2])],
        [batch_of([1]), batch_of([0, 2])],
        [batch_of([2, 0, 1], flat=True)],
    ]
    for batches in divisions:
        model.zero_grad()
        loss = step_of(train).begin(None)
        parts = [summed_loss(model, batch, loss) for batch in batches]
        torch.stack(parts).sum().backward()
        assert sum(part.item() for part in parts) == pytest.approx(expected.item(), rel=1e-5)
        assert (gradients(model) - exact).norm() < 1e-5 * exact.norm()
        figures = known_figures(loss.figures(ParallelModel(model)))
        assert figures["reward_chosen"] == pytest.approx(scores[::2].mean().item(), rel=1e-4)
        assert figures["reward_accuracy"] == (scores[::2] > scores[1::2]).float().mean().item()
        with torch.no_grad():
            again = step_of(train).begin(8)
            assert sum(summed_loss(model, one, again).item() for one in batches) == pytest.approx(
                expected.item(), rel=1e-5
            )


def test_transformers_and_peft_load_what_is_saved(small_llama, tmp_path):
    """A head that is left out, or trained and saved under a name that peft does not read."""
    model = model_of(small_llama, reward("lora"))
    with torch.no_grad():
        causal_lm(model).get_output_embeddings().weight.add_(1.0)
    assert isinstance(model, PeftModel)
    save_adapter(model, tmp_path / "adapter", str(small_llama))
    base = AutoModelForSequenceClassification.from_pretrained(small_llama, num_labels=1, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renamed.
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.allclose(own_scores(loaded.eval()), own_scores(model.eval()), atol=1e-5)
    (tmp_path / "merged").mkdir()
    files = sorted(path.name for path in small_llama.iterdir())
    write_merged(small_llama, files, tmp_path / "adapter", reward("lora"), tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.num_labels == 1 and type(merged).__name__ == "LlamaForSequenceClassification"
    scores = own_scores(model.eval())  # The merged file has the base's type, bf16.
    assert (own_scores(merged.eval()) - scores).norm() < 0.03 * scores.norm()
    full = load_model(small_llama, reward("full"), CPU, seed=3)
    save_full(causal_lm(full), tmp_path / "full")
    for directory in ("adapter", "full", "merged"):  # Of chat, generate and export.
        with pytest.raises(UserError, match=f"^--model: must be a language model; .*{directory} is a reward model"):
            find_tuned(tmp_path / directory, None)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "full")
    assert loaded.config.num_labels == 1 and type(loaded).__name__ == "LlamaForSequenceClassification"
    assert torch.allclose(own_scores(loaded.eval()), own_scores(full.eval()), atol=1e-6)


def test_the_head_starts_from_the_seed_and_is_trained_in_full(small_llama):
    first, same, other = (load_model(small_llama, reward("lora"), CPU, seed=seed) for seed in (1, 1, 2))
    heads = [dict(one.named_parameters()) for one in (first, same, other)]
    [name] = [key for key, parameter in heads[0].items() if "score" in key and parameter.requires_grad]
    assert torch.equal(heads[0][name], heads[1][name]) and not torch.equal(heads[0][name], heads[2][name])
    assert heads[0][name].shape[0] == 1 and np.isclose(heads[0][name].std().item(), 0.02, rtol=0.5)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["train.loss_chunk=512", "evaluate.generate_rows=8"],
            "train.objective: a reward model has no logits and writes no text; got reward with train.loss_chunk=512 "
            "and evaluate.generate_rows=8; set train.loss_chunk=null and evaluate.generate_rows=0",
        ),
        (["train.router_aux_loss=0.1"], "train.router_aux_loss: was not tried with reward models; got 0.1 with"),
        (
            ["evaluate.generate_rows=8"],
            "train.objective: a reward model has no logits and writes no text; got reward with "
            "evaluate.generate_rows=8; set evaluate.generate_rows=0",
        ),
        (["train.preference.beta=0.1"], "train.preference: train.objective=reward does not read beta"),
    ],
)
def test_settings_without_an_effect_are_refused(flags, message):
    usual = ["train.objective=reward", "train.loss_chunk=null", "evaluate.generate_rows=0"]
    params = with_flags(load_params(ROOT / "params.yaml"), usual)
    with pytest.raises(UserError, match=f"^{message}"):
        with_flags(params, flags)


def test_a_family_without_a_classifier_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "granite", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, '
        '"num_attention_heads": 4, "vocab_size": 128}'
    )
    read_config(tmp_path)
    with pytest.raises(
        UserError, match="^train.objective: transformers has no AutoModelForSequenceClassification of granite"
    ):
        read_config(tmp_path, scores=True)
