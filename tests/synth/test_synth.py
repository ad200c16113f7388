"""The offline default: generated data, tokenizer and tiny model match their scripts and cards."""

import itertools
import json
import math
import string
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.synth.pretrain import SAMPLE, build_model, encode_rows, pretraining_rows, train
from data.synth.rows import SEEN, UNSEEN, prompts_of, stream_rows
from data.synth.sample import make_sample, to_jsonl
from data.synth.tokenizer import TINY, train_tiny
from tests.synth.checker import stated_answer, true_answer, wrong_steps

SAMPLE_SEED, SAMPLE_ROWS = 1, 5000  # as in data/raw/README.md
TOKENIZER_SEED, TOKENIZER_ROWS = 7, 20_000  # as in lean_finetune/tiny/README.md
WEATHER_CALL = {"function": {"name": "weather", "arguments": {"city": "北京"}}}
TOOL_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in 北京?"},
    {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


@pytest.fixture(scope="module")
def sample():
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, local_files_only=True, dtype=torch.float32).eval()


def test_committed_sample_is_what_the_script_makes():
    assert to_jsonl(make_sample(SAMPLE_SEED, SAMPLE_ROWS)).encode() == SAMPLE.read_bytes()


@pytest.mark.slow
def test_committed_tokenizer_is_what_the_script_trains():
    trained = json.loads(train_tiny(TOKENIZER_SEED, TOKENIZER_ROWS).to_str())
    committed = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    assert trained["model"] == committed["model"]
    assert trained["pre_tokenizer"] == committed["pre_tokenizer"]


def test_sample_is_small_and_has_no_prompt_twice(sample):
    prompts = [prompt for row in sample for prompt in prompts_of(row)]
    assert len(prompts) == len(set(prompts))
    assert len(sample) >= 4000 and SAMPLE.stat().st_size <= 3_000_000


def test_sample_covers_systems_turns_and_both_languages(sample):
    """Prevents a generator change that drops a kind of row later stages are shown on."""
    kinds: Counter[str] = Counter()
    for row in sample:
        kinds["system"] += row["messages"][0]["role"] == "system"
        kinds["multi-turn"] += len(prompts_of(row)) > 1
        kinds["Chinese"] += not prompts_of(row)[0].isascii()
        kinds["unseen"] += row["family"] in UNSEEN
    assert min(kinds.values()) > 0.05 * len(sample), kinds
    assert set(UNSEEN) < {row["family"] for row in sample} < set(SEEN) | set(UNSEEN)


def test_every_answer_is_right(sample):
    """Prevents teaching wrong answers: each is recomputed from the prompt by a checker that shares no code."""
    for row in [*sample, *itertools.islice(stream_rows(11, SEEN, set()), 2000)]:
        turns = [message["content"] for message in row["messages"] if message["role"] != "system"]
        for prompt, reply in zip(turns[::2], turns[1::2], strict=True):
            assert stated_answer(reply) == true_answer(row["family"], prompt), (row["family"], prompt)
            assert not wrong_steps(reply)


def test_pretraining_has_no_unseen_family_and_no_prompt_of_the_sample(sample):
    """Prevents contamination: a fine-tune's gain must not have been in the base already."""
    rows = list(itertools.islice(pretraining_rows(3, SAMPLE), 20_000))
    prompts = {prompt for row in rows for prompt in prompts_of(row)}
    assert not prompts & {prompt for row in sample for prompt in prompts_of(row)}
    assert not {row["family"] for row in rows} & set(UNSEEN)
    pretraining_heads = {prompt.split("\n")[0] for prompt in prompts}
    unseen_heads = {prompt.split("\n")[0] for row in sample if row["family"] in UNSEEN for prompt in prompts_of(row)}
    assert not pretraining_heads & unseen_heads


@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    """Prevents a tokenizer that loses bytes outside its training text."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens(tokenizer):
    """Prevents merges of digits, under which the tiny model cannot learn arithmetic."""
    assert not [token for token in tokenizer.get_vocab() if sum(letter in string.digits for letter in token) > 1]


def test_pad_is_its_own_id_and_never_produced_from_text(sample, tokenizer):
    """Prevents padding that is masked as end of turn, or text that becomes padding."""
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")}) == 3
    for row in sample[:200]:
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
        assert tokenizer.pad_token_id not in ids
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert tokenizer("a b").input_ids == tokenizer("a b", add_special_tokens=False).input_ids


def test_template_marks_only_the_assistants_text_and_renders_tools(tokenizer):
    """Prevents training on prompts, and replies whose end of turn is not learnt."""
    tools = [{"name": "weather"}]
    encoded = tokenizer.apply_chat_template(
        TOOL_CHAT, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    call = '<tool_call>{"name": "weather", "arguments": {"city": "北京"}}</tool_call>'
    assert tokenizer.decode(trained) == f"{call}<|im_end|>It rains.<|im_end|>"
    text = tokenizer.decode(encoded["input_ids"])
    assert text.startswith('<|im_start|>system\nBe brief.\nTools:\n{"name": "weather"}\n')
    assert "<|im_start|>tool\nrain<|im_end|>\n" in text
    prefix = tokenizer.apply_chat_template(TOOL_CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert prefix.endswith("<|im_start|>assistant\n")
    assert tokenizer.apply_chat_template(TOOL_CHAT[:3], tokenize=False).startswith(prefix)
    quoted = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [quoted]}
    assert '"arguments": {"a": 1}}</tool_call>' in tokenizer.apply_chat_template([called], tokenize=False)


def test_model_is_small_half_precision_and_fits_nf4_blocks():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 3_000_000
    with safe_open(TINY / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  (safe_open is no mapping)
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16
            assert all(side % 64 == 0 for side in tensor.shape), name


def test_model_knows_the_seen_families_and_not_the_unseen(sample, tokenizer, model):
    """Prevents shipping an untrained or contaminated base: a fine-tune of it would show nothing."""
    losses = {}
    for kind, families in (("seen", SEEN), ("unseen", UNSEEN)):
        rows = [row for row in sample if row["family"] in families][:64]
        losses[kind] = assistant_loss(model, encode_rows(iter(rows), tokenizer))
    uniform = math.log(model.config.vocab_size)
    assert losses["seen"] < 0.1 * uniform
    assert losses["unseen"] > 2 * losses["seen"]


@pytest.mark.slow
def test_pretraining_twice_gives_the_same_weights(tokenizer):
    """Prevents a base that its own script cannot make again on the same machine."""
    weights = []
    for _ in range(2):
        torch.manual_seed(5)
        model = build_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        before = model.model.embed_tokens.weight.detach().clone()
        train(model, encode_rows(pretraining_rows(5, SAMPLE), tokenizer), 2_500, tokenizer.pad_token_id)
        weights.append(model.state_dict())
        assert not torch.equal(before, weights[-1]["model.embed_tokens.weight"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def assistant_loss(model, encoded) -> float:
    """Mean next-token loss of assistant tokens in nats."""
    total, count = 0.0, 0
    for ids, mask in encoded:
        ids_BT, mask_T = torch.tensor([ids]), torch.tensor(mask[1:], dtype=torch.bool)
        with torch.inference_mode():
            logits_TV = model(input_ids=ids_BT).logits[0, :-1]
        losses_T = torch.nn.functional.cross_entropy(logits_TV, ids_BT[0, 1:], reduction="none")
        total, count = total + float(losses_T[mask_T].sum()), count + int(mask_T.sum())
    return total / count
