"""Attention with capped scores (Gemma 2): what transformers computes score by score, without and with masks."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lean_finetune.core.errors import UserError
from lean_finetune.evaluate.generate import Prompt, greedy_answers
from lean_finetune.model.attention_choice import generation_attention, training_attention
from lean_finetune.model.model_config import caps_scores, read_config, refuse_packed_rows
from lean_finetune.step.evaluation_limits import EvaluationLimits
from tests.kit.estimate_cpu import FAMILIES, SMALL, WINDOW
from tests.kit.loaded import load_base
from tests.small_model import CPU, VOCABULARY, spec_of

GEMMA = FAMILIES["Gemma 2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small Gemma 2 whose scores reach its cap."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GEMMA)
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.data *= 300
    directory = tmp_path_factory.mktemp("gemma2")
    model.save_pretrained(directory)
    return directory


def eager(directory) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def test_it_is_chosen_for_models_that_cap_and_for_no_other():
    """A cap left out in silence by a kernel that knows none."""
    assert caps_scores(GEMMA) and training_attention(GEMMA) == generation_attention(GEMMA) == "lean_capped"
    assert not caps_scores(LlamaConfig(**SMALL))
    assert generation_attention(LlamaConfig(**SMALL)) == "sdpa"


@pytest.mark.parametrize("length", [WINDOW - 8, 2 * WINDOW])
def test_logits_and_gradients_are_those_of_transformers(saved, length):
    """Another scale, a cap on the wrong side of it, or tokens seen beyond the window."""
    ours, theirs = load_base(saved, spec_of(method="full"), CPU).train(), eager(saved).train()
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    found, wanted = ours(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for logits in (found, wanted):
        logits.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
    uncapped = eager(saved)
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (uncapped(ids, use_cache=False).logits - wanted).abs().max() > 2e-3  # The cap is at work.


@pytest.fixture(scope="module")
def with_sinks(tmp_path_factory):
    """A small GPT-OSS."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["GPT-OSS"])
    for name, parameter in model.named_parameters():
        if "sinks" in name or "q_proj" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    directory = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("rows", [3, 1], ids=["padded", "one by one"])
@pytest.mark.parametrize("directory", ["saved", "with_sinks"], ids=["capped", "sinks"])
def test_answers_are_those_of_transformers(directory, rows, request):
    """Padding on the left seen, or turned into NaN; cached tokens not seen."""
    saved = request.getfixturevalue(directory)
    attention = generation_attention(read_config(saved))
    model, reference = load_base(saved, spec_of(method="full"), CPU, attention).eval(), eager(saved)
    prompts = [Prompt(family="all", ids=list(range(3, 3 + size)), answer_ids=[]) for size in (60, 7, 20)]
    found = greedy_answers(
        model,
        spec_of(method="full"),
        prompts,
        stops=(),
        limits=EvaluationLimits(max_tokens=1024, logits_chunk=64, max_new_tokens=6, generate_batch_rows=rows),
        pad_id=0,
        device=CPU,
    )
    for prompt, answer in zip(prompts, found, strict=True):
        ids = list(prompt.ids)
        for _ in range(6):
            ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert answer == ids[len(prompt.ids) :]


def test_joined_rows_are_refused(saved):
    """Rows of one sequence that see each other."""
    with pytest.raises(UserError, match="bucket.mode: packed .*gemma2 caps its scores.*set bucket.mode=bucketed"):
        refuse_packed_rows(read_config(saved), 16)


def test_a_cap_in_code_of_its_own_is_refused(saved, monkeypatch: pytest.MonkeyPatch):
    """A model that ignores our attention would train with another step than the predicted one."""
    kind = AutoModelForCausalLM._model_mapping[type(GEMMA)]
    monkeypatch.setattr(kind, "_supports_attention_backend", False)
    with pytest.raises(UserError, match="gemma2 caps attention scores in its own attention code") as caught:
        read_config(saved)
    assert "\n" not in str(caught.value)
