"""Trained text of each model family's template: the assistant's text and its end of turn, with or without marks."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat import chat_template as bundled_templates
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template, read_bundled
from lean_finetune.data.chat.compiled_template import CompiledTemplate
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.format.format_base import Conversation
from tests.data.common import DATE, conversation, decoder, encode_one, row_tokenizer
from tests.data.families import (
    ASK,
    FAMILIES,
    TURNS,
    chat,
    open_family,
    save_tokenizer,
    template_source,
    trained,
    turn,
)

CALL = {"type": "function", "id": "a1B2c3D4e", "function": {"name": "add", "arguments": {"a": 1, "b": "二"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
THOUGHT = "<think>\nHm, two.\n</think>\n\n"
WITH_TOOLS = ("llama-3.1", "mistral-tools", "qwen2.5", "qwen3")


RESULT = turn("tool", "3", tool_call_id="a1B2c3D4e")
CALLING = Conversation(
    messages=[
        turn("user", "Q"),
        turn("assistant", "", tool_calls=[CALL]),
        RESULT,
        turn("assistant", "It is 3."),
        turn("user", "Thanks"),
        turn("assistant", "Bye"),
    ],
    tools=TOOLS,
)


def joined(segments: list[TextSegment]) -> str:
    return "".join(segment.text for segment in segments)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("families")
    return {name: save_tokenizer(base / name, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def bundled(directories) -> dict[str, ChatTemplate]:
    return {name: open_family(directories[name], name) for name in FAMILIES}


UNKNOWN = "{{ ' ' }}"
"""In front of a template: no bundled template renders the same text, so turns are located."""


@pytest.fixture(scope="module")
def by_segments(directories) -> dict[str, ChatTemplate]:
    return {name: open_family(directories[name], name, template=UNKNOWN + template_source(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def tokenizers(directories):
    return {name: (row_tokenizer(path), decoder(path)) for name, path in directories.items()}


@cache
def compiled(name: str) -> CompiledTemplate:
    return CompiledTemplate(template_source(name), FAMILIES[name].special_tokens, "own", DATE)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
PIECE = st.sampled_from(
    ["<|im_end|>", "</s>", "[/INST]", "<end_of_turn>", "<|eot_id|>", " ", "\n", "user", "你好", "é"]
)
WORDS = st.one_of(TEXT, st.lists(PIECE, min_size=1, max_size=4).map("".join).filter(str.strip))


@pytest.mark.parametrize("name", FAMILIES)
@given(texts=st.lists(WORDS, min_size=2, max_size=6), system=st.none() | WORDS)
@settings(max_examples=10, deadline=None)
def test_the_trained_tokens_are_the_answers_and_their_ends(name, bundled, by_segments, tokenizers, texts, system):
    """Also if the template has no marks, trims, drops earlier thinking, or texts contain control tokens."""
    family = FAMILIES[name]
    tokenizer, decode = tokenizers[name]
    protect = tokenizer.guard.protect
    texts = texts[: len(texts) // 2 * 2]
    conversation = chat(*protect(texts), system=protect(system) if family.takes_system else None)

    def expected(answers: list[str]) -> list[str]:
        return [family.answer(answer, n + 1 == len(answers)) for n, answer in enumerate(answers)]

    for template, method, start in ((bundled[name], "bundled", ""), (by_segments[name], "segments", " ")):
        assert template.method == method
        segments = template.render(conversation)
        assert trained(segments) == expected(protect(texts[1::2]))
        assert joined(segments) == start + compiled(name).text(conversation.messages, None)
        row = encode_one(tokenizer, segments)
        assert [decode(row.ids[first:last]) for first, last in row.spans.tolist()] == expected(texts[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_of_the_marked_templates_equal_those_of_transformers(name, directories, bundled, tokenizers):
    """An independent reading of our marks: whole-text encoding and character offsets; and of the unmarked original."""
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(directories[name])
    conversations = [
        chat("Q", "A"),
        chat("Q 1", "A 1", "Q 2\n", "Ä 2\n"),
        chat(" Q", THOUGHT + "A", "R", THOUGHT + "B"),
    ]
    conversations += [chat("Q", "A", system="Be brief.")] if FAMILIES[name].takes_system else []
    conversations += [CALLING] if name in WITH_TOOLS else []
    date = {"date_string": "26 Jul 2024"}  # transformers would offer today's
    for each in conversations:
        row = encode_one(tokenizers[name][0], bundled[name].render(each))
        marked = reference.apply_chat_template(
            each.messages,
            each.tools,
            chat_template=read_bundled(name),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **date,
        )
        assert row.ids.tolist() == marked["input_ids"]
        mask = [0] * len(row.ids)
        for start, end in row.spans.tolist():
            mask[start:end] = [1] * (end - start)
        assert mask == marked["assistant_masks"]
        own = reference.apply_chat_template(each.messages, each.tools, return_dict=True, **date)
        assert own["input_ids"] == marked["input_ids"]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_trained_alike_by_marks_and_by_segments(name, bundled, by_segments):
    """Mistral's template shows tools before the last question, so prompts of earlier turns have them elsewhere."""
    segments = bundled[name].render(CALLING)
    assert joined(segments).count('"Adds."') == 1, "tools are shown"
    call, answer, last = trained(segments)
    assert '"add"' in call and '"二"' in call and "It is 3." in answer and "Bye" in last
    ends = ("<|im_end|>", "<|eot_id|>", "</s>")
    assert all(text.endswith(ends) and sum(text.count(end) for end in ends) == 1 for text in (call, answer, last))
    assert trained(by_segments[name].render(CALLING)) == [call, answer, last]


def test_a_turn_that_cannot_be_located_is_a_fault(directories):
    """Here every rendering has other text around the first answer."""
    source = (
        "{% for m in messages %}{{ messages | length }}{{ m.content }}{{ messages | length }}{% endfor %}<|im_end|>"
    )
    template = custom(directories, UNKNOWN + source + "{% if add_generation_prompt %}5{% endif %}")
    with pytest.raises(RowFault, match="renders turn 2 in a way that its tokens cannot be located; put gen"):
        template.render(chat("Q", "A", "R", "B"))


def test_qwen3_learns_the_last_thoughts_and_sees_no_earlier_ones(by_segments, bundled):
    messages = chat("Q", THOUGHT + "A", "R", THOUGHT + "B")
    for template in (by_segments["qwen3"], bundled["qwen3"]):
        segments = template.render(messages)
        assert trained(segments) == ["A<|im_end|>", THOUGHT + "B<|im_end|>"]
    reasoned = Conversation(messages=[turn("user", "Q"), turn("assistant", "A", reasoning_content="Hm.")], tools=None)
    assert trained(bundled["qwen3"].render(reasoned)) == ["<think>\nHm.\n</think>\n\nA<|im_end|>"]


@pytest.mark.parametrize("name", FAMILIES)
def test_train_on_all_trains_every_token_and_last_assistant_the_last_answer(name, directories):
    conversation = chat("Q", "A", "R", "B")
    everything = open_family(directories[name], name, "all")
    assert everything.method == "all" and "data.train_on is all" in everything.reason
    [segment] = everything.render(conversation)
    assert segment.trained
    last = open_family(directories[name], name, "last_assistant").render(conversation)
    assert joined(last) == segment.text
    assert trained(last) == [FAMILIES[name].answer("B", True)]


def test_turns_of_weight_0_are_not_trained(bundled, by_segments, directories):
    messages = chat("Q", "A", "R", "B").messages
    for template in (bundled["qwen2.5"], by_segments["qwen2.5"]):
        conversation = Conversation(messages=messages, tools=None, context=frozenset({1}))
        assert trained(template.render(conversation)) == ["B<|im_end|>"]
    template = open_family(directories["chatml"], "chatml", "last_assistant")
    assert trained(template.render(Conversation(messages=messages, tools=None, context=frozenset({3})))) == [
        "A<|im_end|>"
    ]


def test_the_method_has_a_reason(directories, bundled, by_segments):
    assert (
        "no generation marks, but renders test conversations as the bundled gemma template" in bundled["gemma"].reason
    )
    assert "no generation marks, so each answer is what its turn adds" in by_segments["gemma"].reason
    marked = open_family(directories["gemma"], "gemma", template=read_bundled("gemma"))
    assert (marked.method, marked.reason) == ("marks", "the template of data.chat_template has generation marks")
    chatml = open_family(directories["chatml"], "chatml", template="chatml")
    assert (chatml.method, chatml.reason) == ("marks", "the built-in ChatML template has generation marks")


def test_a_row_that_the_bundled_template_renders_differently_uses_its_turns(directories):
    """The renderings are compared for each row, so marks are never applied to another text."""
    source = template_source("chatml").replace("message['content']", "message['content'].replace('color', 'colour')")
    template = open_family(directories["chatml"], "chatml", template=source)
    assert template.method == "bundled"
    assert trained(template.render(chat("Q", "A"))) == ["A<|im_end|>"]
    segments = template.render(chat("Which color?", "The color.", "R", "B"))
    assert trained(segments) == ["The colour.<|im_end|>", "B<|im_end|>"] and "Which colour?" in joined(segments)


def test_chatml_shows_tools_and_calls_and_needs_its_tokens(directories):
    template = open_family(directories["chatml"], "chatml", template="chatml")
    segments = template.render(CALLING)
    assert trained(segments)[0] == '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "二"}}</tool_call><|im_end|>'
    assert '"Adds."' in segments[0].text
    with pytest.raises(UserError, match="^data.chat_template: chatml needs the control token <|im_start|>, which the"):
        open_family(directories["zephyr"], "zephyr", template="chatml")


def test_an_end_of_turn_token_counts_though_it_is_not_called_special(directories, tmp_path):
    """Some tokenizers add <|im_end|> as an ordinary token and name it as their EOS."""
    saved = json.loads((directories["chatml"] / "tokenizer.json").read_text(encoding="utf-8"))
    for token in saved["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    for source in ("chatml", template_source("chatml")):
        template = load_template(source, tmp_path, {"eos_token": "<|im_end|>"}, "assistant", DATE)
        assert trained(template.render(chat("Q", "A"))) == ["A<|im_end|>"]


HIDDEN = {
    "tools": Conversation(messages=chat("Q", "A").messages, tools=TOOLS),
    "tool_calls": Conversation(messages=CALLING.messages[:2], tools=None),
    "tool": Conversation(messages=[turn("user", "Q"), turn("tool", "3"), turn("assistant", "A")], tools=None),
    "developer": Conversation(messages=[turn("developer", "D"), *chat("Q", "A").messages], tools=None),
}


@pytest.mark.parametrize("part", HIDDEN)
def test_a_part_that_the_template_leaves_out_is_a_fault(part, bundled):
    """Otherwise calls would be trained as empty answers."""
    with pytest.raises(RowFault, match=f"the chat template does not show '{part}', which the row has; set data.chat_t"):
        bundled["zephyr"].render(HIDDEN[part])


def custom(directories, source: str, name: str = "chatml", train_on: str = "assistant") -> ChatTemplate:
    return open_family(directories[name], name, train_on, source)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_greeting_before_any_question_is_found(directories):
    """Templates that read the first message cannot render an empty list."""
    template = custom(directories, UNKNOWN + "{{ '' if messages[0].role.strip() else '' }}" + TURNS + ASK)
    greeting = Conversation(messages=[turn("assistant", "Welcome!"), *chat("Q", "A").messages], tools=None)
    assert trained(template.render(greeting)) == ["Welcome!<|im_end|>", "A<|im_end|>"]


@pytest.mark.parametrize(
    "source",
    [
        TURNS + "{% if not add_generation_prompt %}<pad>{% endif %}" + ASK,
        TURNS + ASK.replace("assistant\n", "assistant\n<think>\n"),
        "{{ messages | length }}" + TURNS + ASK,
        TURNS.replace("m.content", "(m.content if loop.last else m.content | upper | lower)") + ASK,
    ],
    ids=["text behind the last turn", "a longer header", "a count in front", "a filter on earlier turns"],
)
def test_turns_are_found_where_a_prefix_is_rendered_otherwise(source, directories):
    template = custom(directories, UNKNOWN + source)
    found = trained(template.render(chat("q1", "<b>a1", "q2", "a2", "q3", "a3")))
    assert [text.removesuffix("\n<pad>") for text in found] == ["<b>a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]


@pytest.mark.parametrize("name", [*WITH_TOOLS, "chatml"])
def test_public_tool_calls_are_located_in_every_template_that_shows_them(name, public_data, directories):
    """Every row is either trained on all its assistant's turns, or refused in one line."""
    rows = json.loads((public_data / "glaive_toolcall_en_demo.json").read_text(encoding="utf-8"))[:100]
    template = open_family(directories[name], name, template="chatml" if name == "chatml" else "tokenizer")
    refused = 0
    for row in rows:
        example = conversation(row, "sharegpt")
        try:
            segments = template.render(example)
        except RowFault as fault:
            assert "refuses the row" in str(fault), "nothing is hidden and every turn is found"
            refused += 1
            continue
        assert len(trained(segments)) == len(example.turns())
    # Mistral's template wants ids of calls, which these rows have not.
    assert refused == 0 or name == "mistral-tools"


def test_every_bundled_template_is_of_a_known_family():
    """One that is not listed would never be used; one that is listed and missing would end runs."""
    assert {path.stem for path in bundled_templates.DIRECTORY.glob("*.jinja")} == set(bundled_templates.BUNDLED)


def test_a_turn_ends_at_its_own_token_where_calls_end_otherwise(directories):
    """Llama's call of a built-in tool ends with <|eom_id|>: what follows is not the assistant's."""
    source = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
        "{% if m.tool_calls %}<|python_tag|>{{ m.tool_calls[0].function.name }}<|eom_id|>{% else %}<|eot_id|>"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )
    segments = custom(directories, UNKNOWN + source, "llama-3").render(
        Conversation(messages=CALLING.messages, tools=None)
    )
    assert trained(segments) == ["<|python_tag|>add<|eom_id|>", "It is 3.<|eot_id|>", "Bye<|eot_id|>"]


def test_a_marked_template_whose_marks_are_not_one_a_turn_follows_weights_by_the_turns(directories):
    """Otherwise a mark could be assigned to the wrong turn."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %} {% generation %}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + ASK
    )
    conversation = Conversation(messages=chat("Q", "A", "R", "B").messages, tools=None, context=frozenset({1}))
    template = custom(directories, source)
    assert trained(template.render(chat("Q", "A"))) == ["A", "<|im_end|>"]
    assert trained(template.render(conversation)) == ["B <|im_end|>"]


def test_a_template_that_trains_no_end_of_turn_is_refused(directories):
    """The model would never stop."""
    unclosed = TURNS.replace("<|im_end|>", "")
    for source in (unclosed, unclosed + ASK, MARKED.replace("<|im_end|>", "")):
        with pytest.raises(UserError, match="^data.chat_template: the template trains no end-of-turn token after"):
            load_template(source, directories["chatml"], {}, "assistant", DATE)


def test_a_doubled_bos_is_refused(directories):
    with pytest.raises(UserError, match="writes the BOS token <s> twice; remove one"):
        custom(directories, "{{ bos_token }}" + template_source("llama-3"), "llama-3")
