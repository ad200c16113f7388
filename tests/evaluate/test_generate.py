"""Greedy answers to each prompt alone, and prompts spread evenly over families."""

import tracemalloc

import pytest
import torch
from tokenizers import Tokenizer

from lean_finetune.evaluate.generate import Prompt, choose_prompts, greedy_answers, special_ids, stop_ids
from lean_finetune.step.evaluation_limits import EvaluationLimits
from tests.evaluate.conftest import CPU, EOS, PAD, heldout_rows, spec_of
from tests.kit.loaded import load_base
from tests.token_files import Row, heldout

SPECIAL = {0, 1, 2, 3}
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(base_dir):
    return load_base(base_dir, spec_of("full"), CPU, "sdpa").eval()


def chosen_and_skipped(rows, count=100, max_length=64, max_prompt_tokens=None, max_new_tokens=NEW_TOKENS):
    limits = {"max_length": max_length, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
    return choose_prompts(rows, count, **limits, special=SPECIAL)


def choose(rows, **limits):
    return chosen_and_skipped(rows, **limits)[0]


def answer(model, prompts, stops=(), batch_rows=4, pad_id=PAD, max_tokens=10_000):
    limits = EvaluationLimits(
        max_tokens=max_tokens, logits_chunk=64, max_new_tokens=NEW_TOKENS, generate_batch_rows=batch_rows
    )
    return greedy_answers(model, spec_of("full"), prompts, stops=stops, limits=limits, pad_id=pad_id, device=CPU)


@torch.no_grad()
def by_hand(model, prompt: list[int], count: int) -> list[int]:
    """Argmax after argmax, without cache, mask or padding."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_answers_do_not_depend_on_how_prompts_are_batched(model):
    """A batch beyond max_tokens, or prompts that are answered twice, or never."""
    prompts = [Prompt(family="all", ids=list(range(20, 20 + size)), answer_ids=[]) for size in (9, 30, 3, 17, 30, 5)]
    widest: list[int] = []

    def watch(module, args, kwargs):
        rows, tokens = kwargs["input_ids"].shape
        if tokens > 1:  # The prompts; then one token after another.
            widest.append(rows * (tokens + NEW_TOKENS))

    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        within = answer(model, prompts, max_tokens=90)
    finally:
        hook.remove()
    assert within == answer(model, prompts, batch_rows=1) == answer(model, prompts)
    assert len(widest) == 3 and 80 <= max(widest) <= 90


def test_batched_answers_equal_those_to_each_prompt_alone(model, rows):
    """Left padding that leaks, wrong positions or a stale cache would change an answer; so would a lost order."""
    prompts = choose(rows)
    expected = [by_hand(model, prompt.ids, NEW_TOKENS) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > len(prompts) // 2, "the model must answer by the prompt"
    assert answer(model, prompts) == expected


def test_an_answer_ends_before_its_first_stop_token(model, rows):
    """Text after the stop token would never match."""
    prompts = choose(rows)[:3]
    complete = [by_hand(model, prompt.ids, NEW_TOKENS) for prompt in prompts]
    stop = complete[0][4]
    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in complete]
    assert answer(model, prompts, stops=[stop]) == expected
    assert answer(model, prompts, stops=[stop], pad_id=stop) == expected, "the padding token may be the stop token"


def test_sampling_settings_of_the_model_are_not_used(model, rows):
    """A chat model's generation_config often samples: greedy answers must repeat."""
    prompts = choose(rows)[:2]
    before = answer(model, prompts)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    assert answer(model, prompts) == before


def test_stops_include_the_turn_end_of_the_template(base_dir, rows, tiny_dir):
    """Where a turn ends with another token than the tokenizer's end of sequence, answers must end there too."""
    fresh = load_base(base_dir, spec_of("full"), CPU, "sdpa")
    special = special_ids(Tokenizer.from_file(str(tiny_dir / "tokenizer.json")))
    assert EOS in special
    prompts = [Prompt(family="all", ids=[50], answer_ids=[60, 1]), Prompt(family="all", ids=[50], answer_ids=[60])]
    assert stop_ids(fresh, None, prompts, SPECIAL) == [1, EOS]
    fresh.generation_config.eos_token_id = [7, 8]
    assert stop_ids(fresh, 9, prompts, SPECIAL) == [1, 7, 8, 9]
    fresh.generation_config.eos_token_id = None
    assert stop_ids(fresh, None, prompts[1:], SPECIAL) == []


def test_prompts_are_spread_evenly_over_families(rows):
    """The first prompts of the file would test one family only."""
    families = [prompt.family for prompt in choose(rows, count=7)]
    assert sorted(families.count(name) for name in ("all", "dates", "sums")) == [2, 2, 3]


def test_prompts_do_not_depend_on_the_order_of_the_file(rows, tmp_path):
    """Rows added or moved upstream must not exchange the questions."""
    backwards = heldout(tmp_path, heldout_rows()[::-1])
    assert choose(backwards, count=6) == choose(rows, count=6)


def test_prompt_is_all_before_the_last_span(tmp_path):
    """An earlier turn is part of the question; the trained end of turn is part of the answer."""
    rows = heldout(tmp_path, [([5, 6, 7, 8, 9, EOS, 20], [1, 2, 4, 6], "sums")])
    assert choose(rows) == [Prompt(family="sums", ids=[5, 6, 7, 8], answer_ids=[9, EOS])]


def test_rows_with_long_answers_are_answered_but_not_compared(tmp_path):
    """With chats of hundreds of tokens, no answer at all was shown; plain text and repeated prompts are none."""
    rows: list[Row] = [
        ([30, 31, 32], [0, 3], None),  # Plain text.
        ([1, 31, 32], [1, 3], None),
        ([50, 51, 52, EOS], [2, 4], None),
        ([50, 51, 53, EOS], [2, 4], None),  # The same prompt.
        ([40, 41, 42, 43, 44, 45], [2, 6], None),  # Truncated at max_length.
        ([60, 61, 62, 63, EOS], [4, 5], None),  # Longer than max_prompt_tokens.
        ([70, 71, 72, 73, 74], [2, 5], None),  # Longer than max_new_tokens.
        ([80, 81, 82, 83, EOS], [2, 5], None),  # Not longer: the end token is not counted.
    ]
    prompts, skipped = chosen_and_skipped(heldout(tmp_path, rows), max_length=6, max_prompt_tokens=3, max_new_tokens=2)
    can_match = {tuple(prompt.ids): prompt.can_match for prompt in prompts}
    assert can_match == {(40, 41): False, (50, 51): True, (70, 71): False, (80, 81): True} and skipped == 1
    assert Prompt(family="all", ids=[50, 51], answer_ids=[52, EOS]) in prompts


def test_choosing_prompts_of_many_rows_takes_little_memory(tmp_path):
    """Holding the tokens of every prompt took 6 GB for half a million held-out rows."""
    rows: list[Row] = [([5 + k % 40, 6 + k // 40, *[7] * 990, 1], [990, 993], None) for k in range(400)]
    tokens = heldout(tmp_path, rows)
    tracemalloc.start()
    try:
        prompts = choose(tokens, count=3, max_length=2000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [prompt.answer_ids for prompt in prompts] == [[7, 7, 1]] * 3
    assert peak_bytes < 400 * 990 * 8 / 4, "a list of tokens takes 8 bytes each"
