"""Messages in the form that a template renders: arguments as text, contents as parts, one think block an answer."""

import pytest

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.format.format_base import Conversation
from tests.data.common import DATE
from tests.data.families import ASK, OWN_BLOCK, TURNS, chat, trained, turn

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é", "n": None}}}
CALLED = '<call>f{"x": "é", "n": null}<|im_end|>'
CALLS = "{% for c in m.tool_calls or () %}<call>{{ c.function.name }}ARGUMENTS{% endfor %}<|im_end|>"
JOINED = {
    "DeepSeek-V3's way: text is required": "{{ '' + c.function.arguments }}",
    "joined as Python writes it": "{{ '' ~ c.function.arguments }}",
    "JSON of an object": "{{ c.function.arguments | tojson }}",
    "functionary's way": "{{ c.function.arguments.strip() }}",
    "the keys of an object": '{"x": "{{ c.function.arguments["x"] }}", "n": null}',
}


@pytest.fixture
def open_template(tiny_dir):
    """A ChatML template whose content is rendered by an expression, with more behind it."""

    def load(source: str) -> ChatTemplate:
        return load_template("{{ ' ' }}" + source + ASK, tiny_dir, {}, "assistant", DATE)

    return load


@pytest.mark.parametrize("arguments", JOINED.values(), ids=JOINED)
def test_arguments_of_calls_are_objects_or_text_as_the_template_needs_them(open_template, arguments):
    template = open_template(TURNS.replace("<|im_end|>", CALLS.replace("ARGUMENTS", arguments)))
    calling = Conversation(messages=[turn("user", "Q"), turn("assistant", "", tool_calls=[CALL])], tools=None)
    assert trained(template.render(calling)) == [CALLED]
    assert calling.messages[1]["tool_calls"][0] is CALL and isinstance(CALL["function"]["arguments"], dict)


@pytest.mark.parametrize(
    "content", ["{{ m.content[0].text }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"], ids=["refused", "lost"]
)
def test_a_template_for_parts_gets_parts(open_template, content):
    """As Idefics 3's and LLaVA's, which show nothing of a plain text, or refuse it."""
    template = open_template(TURNS.replace("{{ m.content }}", content))
    assert trained(template.render(chat("Q", "A", "R", "B"))) == ["A<|im_end|>", "B<|im_end|>"]


TAGGED = "<think>\nHm.\n</think>\n\nA"


def test_a_think_block_in_content_takes_the_place_of_the_templates_own(open_template):
    template = open_template(OWN_BLOCK)
    assert trained(template.render(chat("Q", TAGGED, "R", TAGGED))) == ["<think>Hm.</think>A<|im_end|>"] * 2
    assert trained(template.render(chat("Q", "Hm.</think>A"))) == ["<think>Hm.</think>A<|im_end|>"]
    assert trained(template.render(chat("Q", "A"))) == ["<think></think>A<|im_end|>"]
    for answer in (f"First. {TAGGED}", f"{TAGGED}{TAGGED}"):
        with pytest.raises(RowFault, match="turn 2 has text before its <think> block or several blocks, and the chat"):
            template.render(chat("Q", answer))


def test_a_think_block_stays_in_content_where_the_template_writes_none(open_template):
    assert trained(open_template(TURNS).render(chat("Q", TAGGED))) == [f"{TAGGED}<|im_end|>"]
    prompted = open_template("Write <think>…</think> first. " + TURNS)
    assert trained(prompted.render(chat("Q", TAGGED))) == [f"{TAGGED}<|im_end|>"]


def test_two_think_blocks_are_refused(open_template):
    silent = open_template(OWN_BLOCK.replace("{{ m.reasoning_content }}", ""))
    with pytest.raises(RowFault, match="turn 2 has a <think> block in 'content', and the chat template writes another"):
        silent.render(chat("Q", TAGGED))
    with pytest.raises(RowFault, match="turn 2 has reasoning in 'reasoning_content' and in <think> tags of 'content'"):
        open_template(OWN_BLOCK).render(chat("Q", TAGGED, reasoning_content="Hm."))
    with pytest.raises(RowFault, match="turn 2 begins with <think>, which nothing ends, and the chat template writes"):
        open_template(OWN_BLOCK).render(chat("Q", "<think>Hm.", "R", "A"))
    with pytest.raises(RowFault, match="turn 2 has <think> tags in 'reasoning_content', and the chat template writes"):
        open_template(OWN_BLOCK).render(chat("Q", "A", reasoning_content="<think>Hm.</think>"))
    assert trained(open_template(TURNS).render(chat("Q", "<think>Hm."))) == ["<think>Hm.<|im_end|>"]


# As Qwen 3's: what stands before the last block is dropped, and the last thought is shown again.
SPLIT = TURNS.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content and loop.last %}<think>"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] }}</think>{% endif %}{{ m.content.split('</think>')[-1] }}",
)


@pytest.mark.parametrize(
    "answers, fault",
    [
        (["First. <think>Hm.</think>A"], "does not show the text beside the <think> block of turn 2"),
        (["First. <think>Hm.</think>A", "R", "B"], "does not show the text beside the <think> block of turn 2"),
        (["<think>Hm.</think><think>Oh.</think>A"], "turn 2 has several <think> blocks"),
    ],
)
def test_text_that_a_template_drops_beside_a_think_block_is_refused(open_template, answers, fault):
    template = open_template(SPLIT)
    with pytest.raises(RowFault, match=fault):
        template.render(chat("Q", *answers))
    shown = chat("Q", "<think>Hm.</think>A", "R", "Hm.</think> B")
    assert trained(template.render(shown)) == ["A<|im_end|>", "<think>Hm.</think> B<|im_end|>"]
    assert trained(open_template(TURNS).render(chat("Q", *answers)))[0] == f"{answers[0]}<|im_end|>"


@pytest.mark.parametrize(
    "message, part",
    [
        (turn("assistant", "", tool_calls=[CALL, CALL]), "a second call in one message"),
        (turn("assistant", "Wait.", tool_calls=[CALL]), "text in a message with calls"),
    ],
)
def test_a_part_of_calls_that_the_template_omits_is_a_fault_of_the_row(open_template, message, part):
    """gpt-oss' shows one call, Llama 3.1's no text beside it: the rest would be lost without a word."""
    template = open_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    with pytest.raises(RowFault, match=f"does not show '{part}', which the row has"):
        template.render(Conversation(messages=[turn("user", "Q"), message], tools=None))
    one = turn("assistant", "", tool_calls=[CALL])
    assert trained(template.render(Conversation(messages=[turn("user", "Q"), one], tools=None)))


def test_a_template_that_starts_another_answer_in_any_case_is_refused(tiny_dir):
    """As one of Cohere's: the start would be trained as the end of the last answer."""
    header = "{{ '<|im_start|>' if m.role == 'assistant' else '<|pad|>' }}"
    source = "{% for m in messages %}" + header + "{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    with pytest.raises(
        UserError, match=r"writes <\|im_start\|>, with which an answer begins, behind the last answer t"
    ):
        load_template(source, tiny_dir, {}, "assistant", DATE)
    template = load_template(source, tiny_dir, {"eos_token": "<|im_end|>"}, "assistant", DATE)
    assert trained(template.render(chat("Q", "A"))) == ["A<|im_end|>"]
