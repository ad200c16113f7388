"""data.end_of_turn: each answer ends with a token at which generation stops, also where the template writes none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_finetune.commands.tuned.conversation import Prompter
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.format.format_base import Conversation
from tests.data.common import DATE, chat_row, decoder, meta, read_tokens, spans_of
from tests.data.families import ASK, FAMILIES, TURNS, Family, chat, save_tokenizer, trained, turn
from tests.data.shards.test_tokenize_block import block_of, both_sides, worker_of
from tests.workspace import error, write_rows

# As GLM-4.5's: the next turn's first token ends the one before.
GLM = (
    "[gMASK]{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Apriel's: a turn is closed only if another one follows.
CLOSED_LATER = (
    "{% for m in messages %}<|{{ m.role }}|>{{ '\\n' + m.content }}"
    "{% if not loop.last or m.role != 'assistant' %}{{ '\\n<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
UNCLOSED = TURNS.replace("<|im_end|>", "") + ASK
ROLES = (
    "[gMASK]",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
)
STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
CALL = turn("assistant", "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}])
TALK = chat("Q", "A", "R", "B")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A tokenizer with these tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "roles", Family(control=ROLES, eos="<|endoftext|>", bos=None, answer=lambda t, _: t))
        patch.setattr("tests.data.families.template_source", lambda name: GLM)
        return save_tokenizer(tmp_path_factory.mktemp("roles"), "roles")


def load(directory: Path, source: str, choice: str, stops: tuple[str, ...] = STOPS, **values: Any) -> ChatTemplate:
    tokens = {"eos_token": "<|endoftext|>"} | values.pop("tokens", {})
    return load_template(source, directory, tokens, values.pop("train_on", "assistant"), DATE, choice, stops)


@pytest.mark.parametrize(
    "source, choice, stops, expected",
    [
        (GLM, "auto", STOPS, ["\nA<|user|>", "\nB<|user|>"]),
        (GLM, "auto", ("<|endoftext|>",), ["\nA", "\nB<|endoftext|>"]),
        (GLM, "auto", (), ["\nA", "\nB<|endoftext|>"]),
        (GLM, "auto", ("<|observation|>",), ["\nA", "\nB<|observation|>"]),
        (GLM, "eos", STOPS, ["\nA<|user|>", "\nB<|endoftext|>"]),
        (GLM, "none", STOPS, ["\nA", "\nB"]),
        (CLOSED_LATER, "auto", ("<|end|>",), ["A\n<|end|>", "B\n<|end|>"]),
        (CLOSED_LATER, "none", ("<|end|>",), ["A", "B"]),
        (UNCLOSED, "auto", (), ["A", "B<|endoftext|>"]),
        # A template that ends its turns keeps its ends, whatever generation stops at.
        (TURNS + ASK, "auto", STOPS, ["A<|im_end|>", "B<|im_end|>"]),
        (TURNS + ASK, "none", (), ["A<|im_end|>", "B<|im_end|>"]),
        (TURNS + ASK, "eos", (), ["A<|im_end|>", "B<|im_end|><|endoftext|>"]),
    ],
)
def test_each_answer_ends_with_a_token_at_which_generation_stops(directory, source, choice, stops, expected):
    template = load(directory, source, choice, stops)
    found = trained(template.render(TALK))
    if source is UNCLOSED:  # Whether the line end behind such an answer is part of it is not decided here.
        found = [text.replace("\n", "") for text in found]
    assert found == expected
    assert bool(template.end_reason) == (choice == "eos" or (choice == "auto" and "im_end" not in source))


def test_a_token_that_follows_is_trained_once_and_one_is_added_behind_the_last_answer_only(directory):
    text = "".join(segment.text for segment in load(directory, GLM, "auto").render(TALK))
    assert text == "[gMASK]<|user|>\nQ<|assistant|>\nA<|user|>\nR<|assistant|>\nB<|user|>"
    whole = load(directory, GLM, "auto", train_on="all").render(TALK)
    assert trained(whole) == [text]
    last = load(directory, GLM, "auto", train_on="last_assistant").render(TALK)
    assert trained(last) == ["\nB<|user|>"]
    context = Conversation(messages=TALK.messages, tools=None, context=frozenset({3}))
    segments = load(directory, GLM, "auto").render(context)
    assert trained(segments) == ["\nA<|user|>"] and segments[-1].text.endswith("\nB")


def test_tool_calls_end_with_the_token_that_begins_their_results(directory):
    template = load(directory, GLM, "auto")
    calling = Conversation(messages=[turn("user", "Q"), CALL, turn("tool", "3"), turn("assistant", "A")], tools=None)
    calls = "\n<tool_call>add</tool_call><|observation|>"
    assert trained(template.render(calling)) == [calls, "\nA<|user|>"]
    assert trained(template.render(Conversation(messages=calling.messages[:2], tools=None))) == [calls]


def test_an_end_outside_generation_marks_is_trained_too(directory):
    marked = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    marked += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    template = load(directory, marked, "auto", ("<|end|>",))
    assert trained(template.render(TALK)) == ["A<|end|>", "B<|end|>"]


def test_a_template_without_any_end_is_refused_where_no_token_is_known(directory):
    """The model would never stop."""
    with pytest.raises(UserError, match="trains no end-of-turn token after the answer.* set data.end_of_turn to eos"):
        load_template(UNCLOSED, directory, {}, "assistant", DATE, "auto", ())


def test_the_added_token_counts_in_the_length_and_is_trained(directory):
    rows = [chat_row("Q", "A")]
    ids = {
        choice: both_sides(worker_of(directory, end_of_turn=choice)(block_of(rows)))[0] for choice in ("auto", "none")
    }
    added, plain = ids["auto"], ids["none"]
    assert len(added["input_ids"]) == len(plain["input_ids"]) + 1
    assert decoder(directory)(added["input_ids"]).endswith("\nA<|endoftext|>")
    assert (spans_of(added)[-1][1], spans_of(plain)[-1][1]) == (len(added["input_ids"]), len(plain["input_ids"]))


def test_the_stage_takes_the_tokens_at_which_the_pinned_model_stops(run, tiny_dir):
    """The tiny model's generation_config.json names <|im_end|>."""
    rows = write_rows(Path("rows.jsonl"), [chat_row(f"Say {n}", f"Well, {n}") for n in range(40)])
    Path("mine.jinja").write_text(UNCLOSED, encoding="utf-8")
    found = {}
    for choice in ("auto", "none"):
        result = run(rows, data__chat_template="mine.jinja", data__end_of_turn=choice)
        assert result.exit_code == 0, result.stderr
        note = "note: data.end_of_turn is auto: the row's last answer ends with '<|im_end|>'"
        assert (note in result.stderr) == (choice == "auto")
        found[choice] = read_tokens(Path("data/tokens/train"))[0]["input_ids"]
    assert found["auto"] == [*found["none"], meta(Path("data/tokens"))["eos_id"]]
    assert np.array_equal(found["auto"][:-1], found["none"])
    assert "data.end_of_turn: must be" in error(run(rows, data__end_of_turn="eot"))


def test_chat_stops_at_the_token_that_begins_the_next_turn(directory):
    """Ollama's file gets these too; chat and generate add those of generation_config.json."""
    assert Prompter(directory).stop_texts() == ["<|endoftext|>", "<|user|>"]


def test_the_token_that_begins_a_second_answer_ends_no_first_one(directory):
    """GLM-4.5 with two answers in a row, where generation_config.json has that token too: one span over both."""
    conversation = Conversation(messages=[*TALK.messages[:2], turn("assistant", "A2"), *TALK.messages[2:]], tools=None)
    template = load(directory, GLM, "auto", (*STOPS, "<|assistant|>"))
    assert trained(template.render(conversation)) == ["\nA", "\nA2<|user|>", "\nB<|user|>"]


MARKED_CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}<|observation|>{% endfor %}{{ m.content }}"
    "{% if not m.tool_calls %}<|end|>{% endif %}{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)


def test_a_row_whose_last_answer_has_no_end_is_refused(directory):
    """DiffusionGemma's marks: a call with text behind it ends with that text, where other answers have an end."""
    template = load(directory, MARKED_CALLS, "auto")
    assert trained(template.render(TALK)) == ["A<|end|>", "B<|end|>"]
    calling = Conversation(messages=[turn("user", "Q"), CALL], tools=None)
    assert trained(template.render(calling)) == ["add<|observation|>"]
    with_text = Conversation(messages=[turn("user", "Q"), {**CALL, "content": "I add."}], tools=None)
    with pytest.raises(RowFault, match="writes no end behind the row's last answer, though it ends others; "):
        template.render(with_text)
    assert trained(load(directory, MARKED_CALLS, "eos").render(with_text)) == ["add<|observation|>I add.<|endoftext|>"]
    assert trained(load(directory, MARKED_CALLS, "none").render(with_text)) == ["add<|observation|>I add."]
