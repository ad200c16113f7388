"""Turns in templates that render messages otherwise once others follow; boundaries outside of control tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from lean_finetune.core.errors import RowFault
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.format.format_base import Conversation
from tests.data.common import DATE, encode_one, row_tokenizer
from tests.data.families import chat, trained, turn

# As Gemma 4's: a call replaces what the generation prompt ends with, and both begin with the same characters.
GEMMA = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|turn>model\n{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}<|tool_call>{{ c.function.name }}({{ c.function.arguments | tojson }})<tool_call|>"
    "{% endfor %}{% endif %}{{ m.content }}<turn|>\n{% else -%}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n"
    "{% endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|turn>model\n<|channel>thought<channel|>{%- endif -%}"
)
GEMMA_TOKENS = ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>")
# As Qwen 3.5's: answers behind the last question begin with a think block, others do not.
QWEN = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or () %}<tool_call>{{ c.function.name }}"
    "({{ c.function.arguments | tojson }})</tool_call>{% endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n{% endif -%}"
)
# As gpt-oss': another token ends the last answer, and the header has control tokens of its own.
HARMONY = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|start|>assistant"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}"
    "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
HARMONY_TOKENS = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|channel|>")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = Conversation(
    messages=[
        turn("user", "q"),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "r"),
        turn("assistant", "a"),
        turn("user", "q2"),
        turn("assistant", "b"),
    ],
    tools=None,
)


@pytest.fixture
def open_template(tmp_path: Path, tiny_dir: Path):
    """A template with the shipped tokenizer and further control tokens."""

    def load(
        source: str, control: tuple[str, ...], plain: tuple[str, ...] = (), eos: str | None = None
    ) -> ChatTemplate:
        tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<|pad|>"}')
        return load_template(source, tmp_path, {"eos_token": eos} if eos else {}, "assistant", DATE)

    return load


def test_a_span_starts_at_a_control_token_and_not_inside_it(open_template, tmp_path):
    template = open_template(GEMMA, GEMMA_TOKENS)
    segments = template.render(CALLING)
    assert trained(segments) == ['<|tool_call>f({"x": 1})<tool_call|><turn|>', "a<turn|>", "b<turn|>"]
    tokenizer = row_tokenizer(tmp_path)
    row = encode_one(tokenizer, segments)
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    assert row.ids[row.spans[0, 0]] == vocabulary["<|tool_call>"]


def test_earlier_answers_without_their_think_block_are_found(open_template):
    """What the template shows of them is trained."""
    template = open_template(QWEN, (), ("<think>", "</think>", "<tool_call>", "</tool_call>"))
    assert template.method == "segments"
    assert trained(template.render(CALLING)) == [
        '<tool_call>f({"x": 1})</tool_call><|im_end|>',
        "a<|im_end|>",
        "\n</think>\n\nb<|im_end|>",
    ]
    assert trained(template.render(chat("q", "a", "r", "<think b", reasoning_content="Hm."))) == [
        "a<|im_end|>",
        "Hm.\n</think>\n\n<think b<|im_end|>",
    ]


def test_earlier_answers_that_another_token_ends_are_found(open_template):
    template = open_template(HARMONY, HARMONY_TOKENS)
    assert trained(template.render(chat("q", "a", "r", "b", thinking="Hm."))) == [
        "<|channel|>final<|message|>a<|end|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
    ]
    assert trained(template.render(chat("q", "same", "same", "same"))) == [
        "<|channel|>final<|message|>same<|end|>",
        "<|channel|>final<|message|>same<|return|>",
    ]


def test_the_start_of_another_answer_behind_calls_is_not_trained(open_template):
    """As Command R7B's template writes it, though no generation prompt is asked for."""
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}<|go|>{{ m.content }}{% for c in m.tool_calls or () %}"
        "<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt or messages[-1].tool_calls %}<|start|>assistant<|go|>{% endif %}"
    )
    template = open_template(source, ("<|start|>", "<|go|>", "<|call|>", "<|end|>"), eos="<|end|>")
    called = Conversation(messages=CALLING.messages[:2], tools=None)
    assert trained(template.render(called)) == ['<|call|>f{"x": 1}<|end|>']
    assert trained(template.render(CALLING)) == ['<|call|>f{"x": 1}<|end|>', "a<|end|>", "b<|end|>"]


def test_a_header_that_only_the_rendering_has_is_not_trained(open_template):
    """As in Diffusion Gemma's: no generation prompt follows a tool's result."""
    turns, _, _ = GEMMA.partition("{%- if add_generation_prompt")
    source = (
        turns + "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{ '<|turn>model\n' }}{%- endif -%}"
    )
    template = open_template(source, GEMMA_TOKENS)
    assert trained(template.render(CALLING))[1] == "a<turn|>"


def test_a_span_does_not_start_inside_a_tag_that_is_no_token(open_template):
    """As Nemotron Nano 2's <TOOLCALL>, which begins as the prompt's <think> does."""
    source = QWEN.replace("<tool_call>", "<TOOL>").replace("loop.index0 > ns.last", "false")
    assert trained(open_template(source, ()).render(CALLING)) == [
        '<TOOL>f({"x": 1})</tool_call><|im_end|>',
        "a<|im_end|>",
        "b<|im_end|>",
    ]


# As Apertus': an answer goes on behind the results in one list, and only the generation prompt has a header there.
APERTUS = (
    "{%- set ns = namespace(open=false, results=false) -%}{%- for m in messages -%}"
    "{%- if ns.results and m.role != 'tool' -%}]{%- set ns.results = false -%}{%- endif -%}"
    "{%- if m.role == 'user' -%}{%- if ns.open -%}<|end|>{%- set ns.open = false -%}{%- endif -%}"
    "<|user|>{{ m.content }}<|end|>"
    "{%- elif m.role == 'assistant' -%}{%- if not ns.open -%}<|answer|>{%- set ns.open = true -%}{%- endif -%}"
    "{{ m.content }}{% for c in m.tool_calls or () %}<|call|>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}<|called|>{% endfor %}"
    "{%- else -%}{{ ', ' if ns.results else '[' }}{{ m.content }}{%- set ns.results = true -%}{%- endif -%}"
    "{%- endfor -%}{%- if ns.results -%}]{%- endif -%}{%- if add_generation_prompt -%}<|answer|>{%- endif -%}"
)
APERTUS_TOKENS = ("<|user|>", "<|answer|>", "<|call|>", "<|called|>", "<|end|>")
ASK, RESULT = turn("user", "q"), turn("tool", "r")


def test_an_answer_that_goes_on_behind_results_without_a_header_is_found(open_template):
    """Its span begins where the text leaves the generation prompt: at a control token, or at the answer."""
    template = open_template(APERTUS, APERTUS_TOKENS, eos="<|end|>")
    answers = [CALLING.messages[1], RESULT, RESULT, turn("assistant", "", tool_calls=[CALL]), RESULT]
    messages = [ASK, *answers, turn("assistant", "]a"), ASK, turn("assistant", "b")]
    call = '<|call|>f{"x": 1}<|called|>'
    segments = template.render(Conversation(messages=messages, tools=None))
    assert trained(segments) == [call, call, "]a<|end|>", "b<|end|>"]
    assert f"<|answer|>{call}[r, r]{call}[r]]a<|end|>" in "".join(text for text, _ in segments)


@pytest.mark.parametrize("end", ["<|called|>", "<|end|>"])
def test_a_turn_whose_parts_stand_around_its_results_is_refused(end, open_template):
    """As Gemma 4 writes text beside calls. Whatever token ends the text, the results are not trained."""
    source = (
        "{%- for m in messages -%}{%- if m.role == 'user' -%}<|user|>{{ m.content }}<|end|>"
        "{%- elif m.role == 'assistant' -%}<|answer|>{% for c in m.tool_calls or () %}<|call|>"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{%- if m.tool_calls -%}{%- for r in messages[loop.index:] -%}"
        "{%- if r.role == 'tool' -%}[{{ r.content }}]{%- endif -%}{%- endfor -%}{{ m.content }}END"
        "{%- else -%}{{ m.content }}<|end|>{%- endif -%}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|answer|>{%- endif -%}"
    ).replace("END", end)
    template = open_template(source, APERTUS_TOKENS, eos="<|end|>")
    spoken = turn("assistant", "text", tool_calls=[CALL])
    for results in ([RESULT], [RESULT, RESULT]):
        messages = [ASK, spoken, *results, turn("assistant", "a")]
        with pytest.raises(RowFault, match=r"writes turn 3 between parts of turn 2, .*; remove the text beside its"):
            template.render(Conversation(messages=messages, tools=None))
        untrained = Conversation(messages=messages, tools=None, context=frozenset({1}))
        assert trained(template.render(untrained)) == ["a<|end|>"]


# As gpt-oss': the text beside a call is shown as long as no answer follows.
DROPPING = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{% generation %}{%- if m.tool_calls -%}"
    "{%- set later = namespace(found=false) -%}{%- for one in messages[loop.index:] -%}"
    "{%- if one.role == 'assistant' and not one.tool_calls -%}{%- set later.found = true -%}{%- endif -%}{%- endfor -%}"
    "{%- if m.content and not later.found -%}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{%- endif -%}"
    "{%- set f = m.tool_calls[0].function -%}"
    "<|start|>assistant<|channel|>{{ f.name }}<|message|>{{ f.arguments | tojson }}<|end|>"
    "{%- else -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{%- endif -%}{% endgeneration %}"
    "{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
UNMARKED_DROPPING = DROPPING.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("source", [DROPPING, UNMARKED_DROPPING])
def test_text_beside_a_call_that_the_rest_of_the_row_hides_is_refused(open_template, source):
    """gpt-oss: the text was neither shown nor trained, in silence, although the template shows it elsewhere."""
    template = open_template(source, HARMONY_TOKENS)
    calling = turn("assistant", "I add.", tool_calls=[CALL])
    shown = Conversation(messages=[turn("user", "q"), calling, turn("tool", "r")], tools=None)
    assert "I add." in "".join(trained(template.render(shown)))
    followed = Conversation(messages=[*shown.messages, turn("assistant", "I add.")], tools=None)
    with pytest.raises(RowFault, match="does not show the text beside the calls of turn 2, because of what follows"):
        template.render(followed)
    without = Conversation(messages=[turn("user", "q"), CALLING.messages[1], *followed.messages[2:]], tools=None)
    assert "I add." in "".join(trained(template.render(without)))


def test_the_end_of_a_turn_before_a_message_that_moves_to_the_front(open_template):
    """Command R+ writes all system messages first: a place in one rendering was used in another."""
    source = (
        "{% for m in messages if m.role == 'system' %}<|start|>system<|message|>{{ m.content * 40 }}<|end|>{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|channel|><|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
    )
    template = open_template(source, HARMONY_TOKENS)
    rows = chat("q", "a", "q2", "b")
    moved = Conversation(messages=[*rows.messages[:2], turn("system", "s"), *rows.messages[2:]], tools=None)
    assert trained(template.render(moved)) == ["a<|channel|><|end|>", "b<|channel|><|end|>"]
    assert trained(template.render(rows)) == ["a<|channel|><|end|>", "b<|channel|><|end|>"]


@pytest.mark.parametrize("source, control", [(HARMONY, HARMONY_TOKENS), (QWEN, ("<|im_start|>", "<|im_end|>"))])
def test_no_header_between_two_answers_is_trained(open_template, source, control):
    """One span over the token that begins the second of two turns in a row."""
    roles = ("user", "assistant", "assistant", "user", "assistant")
    messages = [turn(role, text) for role, text in zip(roles, "qabrc", strict=True)]
    segments = open_template(source, control).render(Conversation(messages=messages, tools=None))
    assert len(trained(segments)) == 3
    assert all("start" not in text for text in trained(segments))


# As DiffusionGemma's: a result has the name of its call, and earlier reasoning is left out.
NAMED_RESULTS = (
    "{%- set ns = namespace(name='') -%}{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "response:{{ ns.name }}{value:<|channel>{{ m.content }}<channel|>}"
    "{%- else -%}{{ '<|turn>' + m.role + '\n' }}{% if m.thinking and loop.last %}{{ m.thinking }}<channel|>{% endif %}"
    "{% for c in m.tool_calls or () %}{% set ns.name = c.function.name %}"
    "<|tool_call>call:{{ c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>{% endfor %}"
    "{{ m.content }}{% if not m.tool_calls %}<turn|>\n{% endif %}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn>assistant\n' }}{%- endif -%}"
)


@pytest.mark.parametrize("arguments", [{}, {"x": 1}])
def test_the_name_of_a_call_in_its_result_is_not_trained(open_template, arguments):
    """A call without arguments is found by its name, which stands in the result too: both were one span."""
    call = {"type": "function", "function": {"name": "quotes", "arguments": arguments}}
    messages = [turn("user", "q"), turn("assistant", "", tool_calls=[call], thinking="t")]
    messages += [turn("tool", "r"), turn("assistant", "a")]
    segments = open_template(NAMED_RESULTS, GEMMA_TOKENS).render(Conversation(messages=messages, tools=None))
    assert trained(segments)[1].rstrip() == "a<turn|>"
    assert trained(segments)[0] == f"<|tool_call>call:quotes{json.dumps(arguments)}<tool_call|>"


# As Apriel's and Hy3's: no generation prompt behind an answer, which is closed once another one follows.
CLOSED_LATER = (
    "{%- for m in messages -%}{{ '<|turn>' + m.role + '\n' + m.content }}"
    "{% if m.role == 'assistant' and not loop.last %}<turn|>\n{% endif %}{%- endfor -%}"
    "{%- if add_generation_prompt and messages and messages[-1].role != 'assistant' -%}"
    "{{ '<|turn>assistant\n' }}{% endif %}"
)
# As GigaChat's: the header begins with a word, and a greeting follows nothing.
WORD_HEADER = (
    "Rules.<turn|>\n{% for m in messages %}{{ m.role }}<|channel>{{ m.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt and messages and messages[-1].role != 'assistant' %}assistant<|channel>{% endif %}"
)


@pytest.mark.parametrize("source", [CLOSED_LATER, WORD_HEADER])
def test_the_header_of_an_answer_without_a_generation_prompt_is_not_trained(open_template, source):
    """Where the template adds no generation prompt, the header was trained with the answer behind it."""
    roles = ("assistant", "user", "assistant", "assistant", "user", "assistant")
    messages = [turn(role, f"{text}.") for role, text in zip(roles, "gqabrc", strict=True)]
    found = trained(
        open_template(source, GEMMA_TOKENS, eos="<turn|>").render(Conversation(messages=messages, tools=None))
    )
    assert [text.partition("<turn|>")[0] for text in found] == ["g.", "a.", "b.", "c."]
    assert all("assistant" not in text for text in found)
