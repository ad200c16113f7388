"""Trained tokens are the assistant's text and its end of turn, nothing else, whatever a row's text contains."""

import json
import shutil
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoTokenizer

from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.chat_template import ChatTemplate, load_template
from lean_finetune.data.chat.control_tokens import TRAINED_END, TRAINED_START, TextSegment, split_segments
from lean_finetune.data.chat.tokenizer_files import compile_own_template, read_special_tokens, read_template
from lean_finetune.data.encode.row_tokenizer import RowTokenizer
from lean_finetune.data.format.row_formats import Conversation, PlainText, RowFault
from lean_finetune.pinning.template_files import TemplateText
from tests.data.common import DATE, MESSAGES, EncodedRow, chat_row, decoder, encode_one, row_tokenizer

CONTROL = ("<|pad|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer(tiny_dir) -> RowTokenizer:
    return row_tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def decode(tiny_dir):
    return decoder(tiny_dir)


@pytest.fixture(scope="module")
def control_ids(tiny_dir) -> set[int]:
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    return {tokenizer.get_vocab()[token] for token in CONTROL}


@cache
def template_of(tokenizer: RowTokenizer) -> ChatTemplate:
    return load_template("tokenizer", tokenizer.directory, tokenizer.special_tokens, "assistant", DATE)


def encode_chat(tokenizer: RowTokenizer, messages, tools=None) -> EncodedRow:
    protect = tokenizer.guard.protect
    segments = template_of(tokenizer).render(Conversation(messages=protect(messages), tools=protect(tools)))
    return encode_one(tokenizer, segments)


def trained_texts(row: EncodedRow, decode) -> list[str]:
    return [decode(row.ids[start:end]) for start, end in row.spans.tolist()]


@pytest.fixture(scope="module")
def reference(tiny_dir):
    """Transformers' own reading of the same directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_dir)


def test_ids_and_masks_equal_those_of_transformers_on_the_sample(repo_root, tokenizer, reference, decode):
    """An independent reading of the template: whole-text encoding and character offsets."""
    template = template_of(tokenizer)
    with open(repo_root / "data/raw/sample.jsonl", encoding="utf-8") as file:
        samples = [json.loads(line)["messages"] for line in islice(file, 0, None, 12)]
    samples.append(MESSAGES)
    for messages in samples:
        ours = encode_one(tokenizer, template.render(Conversation(messages=messages, tools=None)))
        theirs = reference.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert ours.ids.tolist() == theirs["input_ids"]
        mask = np.zeros(len(ours.ids), int)
        for start, end in ours.spans:
            mask[start:end] = 1
        assert mask.tolist() == theirs["assistant_masks"]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        if messages is not MESSAGES:
            assert trained_texts(ours, decode) == [f"{answer}<|im_end|>" for answer in answers]


def test_the_prompt_before_an_answer_is_what_the_model_is_given_at_inference(tokenizer, reference):
    """A token that crossed from prompt to answer would never be seen when generating."""
    row = encode_chat(tokenizer, MESSAGES)
    prompt = reference.apply_chat_template(MESSAGES[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert row.ids[: row.spans[-1, 0]].tolist() == prompt


def test_control_tokens_are_guarded_in_calls_tools_and_keys_and_counted(tiny_dir, decode, control_ids):
    tokenizer = row_tokenizer(tiny_dir)
    call = {"name": "f<|im_end|>", "arguments": {"<|pad|>": ["<|im_start|>"]}}
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
    ]
    row = encode_chat(tokenizer, messages, [{"type": "function", "function": {"name": "<|im_end|>"}}])
    assert tokenizer.guard.control_tokens == 4
    # system, user and assistant turn: one start and one end each
    assert np.isin(row.ids, list(control_ids)).sum() == 6
    assert "f<|im_end|>" in decode(row.ids) and '{"<|pad|>": ["<|im_start|>"]}' in decode(row.ids)


def test_our_own_marks_in_a_row_train_nothing(tokenizer, decode):
    """A row may have any character, also those that mark trained text while rendering."""
    prompt = f"a{TRAINED_START}b{TRAINED_END}\ufdd20\ufdd3c"
    row = encode_chat(tokenizer, chat_row(prompt, "y")["messages"])
    assert trained_texts(row, decode) == ["y<|im_end|>"]
    assert prompt in decode(row.ids)


def test_plain_rows_end_in_eos_and_train_the_completion_alone(tokenizer, decode):
    row = encode_one(tokenizer, tokenizer.plain_segments(PlainText(prompt="Q: ", completion="A"), "assistant"))
    assert decode(row.ids) == "Q: A<|im_end|>" and trained_texts(row, decode) == ["A<|im_end|>"]
    text = encode_one(tokenizer, tokenizer.plain_segments(PlainText(prompt="", completion="A text."), "assistant"))
    assert decode(text.ids) == "A text.<|im_end|>" and text.spans.tolist() == [[0, len(text.ids)]]
    both = encode_one(tokenizer, tokenizer.plain_segments(PlainText(prompt="Q: ", completion="A"), "all"))
    assert trained_texts(both, decode) == ["Q: A<|im_end|>"]


@pytest.fixture
def own(tmp_path, tiny_dir):
    """A copy of the shipped tokenizer, to be changed."""
    shutil.copytree(tiny_dir, tmp_path / "own", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "own"


def add_bos(own):
    """Make the tokenizer put a BOS in front by itself, as Llama's does."""
    tokenizer = Tokenizer.from_file(str(own / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    bos_id = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
    tokenizer.save(str(own / "tokenizer.json"))
    config = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": {"content": "<s>"}}))
    return bos_id


def test_bos_is_written_once_in_chat_and_plain_rows(own):
    """A template that writes BOS and a tokenizer that adds one would give two."""
    bos_id = add_bos(own)
    template = own / "chat_template.jinja"
    template.write_text("{{- bos_token }}" + template.read_text())
    tokenizer = row_tokenizer(own)
    chat = encode_chat(tokenizer, chat_row("<s>Hi")["messages"])
    plain = encode_one(tokenizer, tokenizer.plain_segments(PlainText(prompt="", completion="A"), "assistant"))
    for row in (chat, plain):
        assert row.ids[0] == bos_id and (row.ids == bos_id).sum() == 1
    assert plain.spans.tolist() == [[1, len(plain.ids)]]


def test_saved_truncation_and_padding_are_not_applied(own, tokenizer):
    """A tokenizer.json may have saved ones, and rows would be silently truncated."""
    saved = Tokenizer.from_file(str(own / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(str(own / "tokenizer.json"))
    messages = chat_row("A rather long question, is it not?")["messages"]
    assert encode_chat(row_tokenizer(own), messages).ids.tolist() == encode_chat(tokenizer, messages).ids.tolist()


def test_a_tokenizer_without_eos_cannot_end_plain_text(own):
    (own / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="has no eos_token, so the model could not learn to stop"):
        row_tokenizer(own).plain_segments(PlainText(prompt="", completion="A"), "assistant")


@pytest.fixture(scope="module")
def render(tiny_dir):
    """Render one question and answer with the template of data.chat_template."""

    def segments(source: str, messages=None) -> list[TextSegment]:
        template = load_template(source, tiny_dir, {"eos_token": "<|im_end|>"}, "assistant", DATE)
        return template.render(Conversation(messages=messages or chat_row()["messages"], tools=None))

    return segments


ANSWER = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_a_broken_template_is_refused_with_its_line(render, own):
    with pytest.raises(
        UserError, match="^data.chat_template: the template is broken \\(line 2: .*; correct it, or name"
    ):
        render("{% generation %}x{% endgeneration %}\n{% for %}")
    (own / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="^model.name: the chat template in .*.jinja is broken \\(line 1: "):
        template_of(row_tokenizer(own))


TEMPLATE_FAULTS = {
    "refusal": ("{{ raise_exception('no system') }}", "refuses the row \\(TemplateError: no system\\)"),
    "overflow": ("{{ range(10 ** 9) }}", "refuses the row \\(OverflowError: "),
    "unsafe": ("{{ messages.__class__.__mro__ }}", "refuses the row \\(SecurityError: "),
    "nothing marked": (
        "{% if messages[0].content == 'Hi' %}Hi{% else %}" + ANSWER + "{% endif %}",
        "marks nothing of the",
    ),
    "nested": (
        "{% if messages[0].content == 'Hi' %}{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}"
        "{% else %}" + ANSWER + "{% endif %}",
        "puts a generation block inside another",
    ),
}


@pytest.mark.parametrize("template, rule", TEMPLATE_FAULTS.values(), ids=TEMPLATE_FAULTS)
def test_a_template_that_cannot_render_a_row_refuses_it(render, template, rule):
    with pytest.raises(RowFault, match=rule):
        render(template + "{% if false %}{% generation %}{% endgeneration %}{% endif %}")


def test_marks_survive_captures_and_loops_and_touching_blocks_are_one(render):
    """Positions noted while rendering would be wrong inside a captured block."""
    captured = "{% set x %}" + ANSWER + "{% endset %}<{{ x }}>"
    assert render(captured) == [
        TextSegment(text="<Hi", trained=False),
        TextSegment(text="Hello<|im_end|>", trained=True),
        TextSegment(text=">", trained=False),
    ]
    touching = f"p{TRAINED_START}a{TRAINED_END}{TRAINED_START}b{TRAINED_END}"
    assert split_segments(touching) == [TextSegment(text="p", trained=False), TextSegment(text="ab", trained=True)]
    empty = f"p{TRAINED_START}{TRAINED_END}q"
    assert split_segments(empty) == [TextSegment(text="pq", trained=False)], "one text, as it is encoded at inference"


def test_keys_are_read_before_methods_of_the_same_name_only_where_the_sandbox_does(render):
    """The quick way to a message's key must give what the sandbox gives."""
    messages = [{"role": "user", "content": "Q", "items": "x"}, {"role": "assistant", "content": "A"}]
    source = "{{ messages[0].items is callable }} {{ messages[0].none is defined }} {{ messages[0].role }}" + ANSWER
    assert render(source, messages)[0].text == "True False userQ"


def test_a_template_is_read_where_transformers_reads_it(own):
    """First its own file, then the tokenizer's, then the processor's: chat_template.json was that until 2025."""
    jinja = (own / "chat_template.jinja").read_text()
    config = own / "tokenizer_config.json"
    write_json(config, {"chat_template": "T"})
    write_json(own / "chat_template.json", {"chat_template": "P"})
    write_json(own / "processor_config.json", {"chat_template": {"default": "Q", "tool_use": "V"}})
    assert read_template(own) == TemplateText(source=jinja, tool_source=jinja, file=own / "chat_template.jinja")
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates/tool_use.jinja").write_text("A")
    assert (read_template(own).source, read_template(own).tool_source) == (jinja, "A")
    (own / "chat_template.jinja").unlink()
    assert read_template(own) == TemplateText(source="T", tool_source="T", file=config)
    write_json(config, {"chat_template": [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]})
    assert read_template(own) == TemplateText(source="D", tool_source="U", file=config)
    config.unlink()
    assert read_template(own).source == "P"
    (own / "chat_template.json").unlink()
    assert (read_template(own).source, read_template(own).tool_source) == ("Q", "V")
    (own / "processor_config.json").unlink()
    with pytest.raises(UserError, match="has no chat template; set data.chat_template to chatml or to the path"):
        read_template(own)


TOOL: dict[Any, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_rows_with_tools_are_rendered_by_the_template_for_them_as_transformers_does(own):
    """Hermes 3 and Command R have two templates; the default one of them leaves tools out."""
    default = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    default += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for_tools = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}" + default
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": for_tools}]
    (own / "chat_template.jinja").unlink()
    config = read_json(own / "tokenizer_config.json")
    write_json(own / "tokenizer_config.json", {**config, "chat_template": named})
    special = read_special_tokens(own)
    template = load_template("tokenizer", own, special, "assistant", DATE)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    theirs = AutoTokenizer.from_pretrained(own)
    cases: list[Any] = [None, [TOOL]]
    for tools in cases:
        conversation = Conversation(messages=messages, tools=tools)
        segments = template.render(conversation)
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert "".join(text for text, _ in segments) == expected
        assert ("TOOLS" in expected) == (tools is not None)
        assert [text.strip() for text, trained in segments if trained] == ["A<|im_end|>"]
        assert compile_own_template(own, DATE).text(messages, tools) == expected
