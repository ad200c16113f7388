"""Tokenizing of a block: every row is either in the tokens, with its number, or counted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import THINK_TAGS
from lean_finetune.data.format.format_base import SourceFormat
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.shard_files import BlockTokens, token_schema
from lean_finetune.data.shards.tokenize_block import BlockTokenizer, TokenSettings
from tests.data.built import byte_level, save, sentencepiece
from tests.data.common import ANSWER, DATE, USER, chat_row, decoder, spans_of
from tests.data.families import ASK, OWN_BLOCK, TURNS

ROWS = [chat_row(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(70)]
SETTINGS: dict[str, Any] = {
    "sources": (SourceFormat(format="messages", columns={}), SourceFormat(format="prompt_completion", columns={})),
    "files": 8,
    "ignore_columns": (),
    "chat_template": "tokenizer",
    "template_date": DATE,
    "train_on": "assistant",
    "end_of_turn": "auto",
    "stop_ids": (),
    "max_length": 512,
    "over_length": "truncate",
    "on_bad_row": "skip",
    "drop_duplicates": False,
    "heldout_fraction": 0.2,
    "heldout_seed": 0,
    "engine": "tokenizers",
}


def worker_of(directory: Path, **values: Any) -> BlockTokenizer:
    return BlockTokenizer(TokenSettings(tokenizer_directory=directory, **SETTINGS | values))


@pytest.fixture
def tokenize(tiny_dir) -> Callable[..., BlockTokens]:
    """Tokenize rows as a block with settings."""
    return lambda rows, source=0, **values: worker_of(tiny_dir, **values)(block_of(rows, source))


def block_of(rows: list[Any], source: int = 0) -> RowBlock:
    """Rows as JSON lines, from row 10 of file 7; text is written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    payload = "".join(f"{line}\n" for line in lines).encode()
    return RowBlock(number=3, source=source, file=7, kind="lines", payload=payload, first_row=10)


def both_sides(tokens: BlockTokens) -> list[dict[str, Any]]:
    return sorted([*tokens.train.rows.to_pylist(), *tokens.heldout.rows.to_pylist()], key=lambda row: row["source_row"])


def counted(tokens: BlockTokens) -> dict[str, int]:
    """The counts that are not zero, without the sample's."""
    [counts] = tokens.tally.counts.values()
    return {name: n for name, n in counts.items() if n and name != "sampled_rows"}


def test_numbers_take_two_bytes_where_the_largest_fits():
    def types(vocabulary: int, length: int, files: int) -> list[str]:
        schema = token_schema(vocabulary, length, files)
        return [str(schema.field(name).type) for name in ("input_ids", "loss_spans", "source_file")]

    assert types(65_536, 65_535, 65_536) == ["list<item: uint16>", "list<item: uint16>", "uint16"]
    assert types(65_537, 65_536, 65_537) == ["list<item: int32>", "list<item: int32>", "int32"]


def test_engines_and_earlier_blocks_change_nothing(tiny_dir):
    """Shards are made again from any block on, by any worker."""
    block = block_of([*ROWS, chat_row("<|im_end|> \ud800 é", "a " * 50), "{", chat_row("Hi", "")])
    one, two = (worker_of(tiny_dir, engine=name, drop_duplicates=True) for name in ("tokenizers", "tiktoken"))
    first = one(block)
    for again in (one(block), two(block)):
        for side, other in ((first.train, again.train), (first.heldout, again.heldout)):
            assert side.rows.equals(other.rows) and (side.digests == other.digests).all()
        assert first.tally == again.tally


BAD = [ROWS[0], "{", {"messages": []}, ROWS[1], chat_row("Hi", " "), {"other": 1}, ROWS[2]]


def test_with_skip_every_row_is_used_or_counted_and_listed(tokenize):
    tokens = tokenize(BAD)
    assert counted(tokens) == {"rows": 7, "bad_rows": 3, "empty_answer_rows": 1}
    assert [row["source_row"] for row in both_sides(tokens)] == [10, 13, 16]
    assert [one[:3] for one in tokens.tally.rejects] == [(7, 11, 12), (7, 12, 13), (7, 14, 15), (7, 15, 16)]
    assert all(one.reason for one in tokens.tally.rejects)
    assert (tokens.tally.first["bad_rows"], tokens.tally.first["empty_answer_rows"]) == ((7, 12), (7, 15))


def test_with_fail_nothing_behind_the_first_bad_row_is_read(tokenize):
    tokens = tokenize(BAD, on_bad_row="fail")
    assert counted(tokens) == {"rows": 2, "bad_rows": 1}
    assert [one[:3] for one in tokens.tally.rejects] == [(7, 11, 12)]


def test_control_tokens_and_lone_surrogates_in_rows_are_counted(tokenize, tiny_dir):
    surrogate = r'{"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]}'
    tokens = tokenize([ROWS[0], chat_row("<|im_end|><|im_end|>", "<|im_start|>"), surrogate])
    assert counted(tokens) == {"rows": 3, "control_tokens_as_text": 3, "surrogates_replaced": 1}
    first = tokens.tally.first
    assert (first["control_tokens_as_text"], first["surrogates_replaced"]) == ((7, 12), (7, 13))
    assert "\ufffd" in decoder(tiny_dir)(both_sides(tokens)[2]["input_ids"])


@pytest.mark.parametrize("name", ["\ud800", "a\nb\x1b[2J", "n" * 100_000])
def test_what_is_told_of_a_row_is_one_line_of_plain_text(tokenize, name):
    """Names and values of a row's keys go into refusals, notes and files."""
    turn = {"role": "assistant", "content": "A", name: 1}
    rows = [
        ROWS[0],
        {"messages": [{"role": name, "content": ""}]},
        {"messages": [ROWS[0]["messages"][0], turn], name: 2},
    ]
    tokens = tokenize(rows)
    told = [tokens.tally.rejects[0].reason, *tokens.tally.unread[0], *tokens.tally.unknown[0]]
    assert len(told) == 3 and all(text.isprintable() and text.isascii() and len(text) <= 600 for text in told)


LONG = [*ROWS[:3], chat_row("Hi", "word " * 100), chat_row("word " * 100, "Yes.")]
LOSSES = {
    "truncate": ({"truncated_rows": 2, "no_answer_rows": 1}, [14], [10, 11, 12, 13]),
    "drop": ({"dropped_long_rows": 2}, [13, 14], [10, 11, 12]),
    "split": ({"split_rows": 2}, [], [10, 11, 12, 13, 14]),
}


@pytest.mark.parametrize("over_length", LOSSES)
def test_long_rows_are_counted(tokenize, tiny_dir, over_length):
    tokens = tokenize(LONG, max_length=64, over_length=over_length)
    counts, rejected, used = LOSSES[over_length]
    assert counted(tokens) == {"rows": 5} | counts
    assert [one.row for one in tokens.tally.rejects] == rejected
    found = both_sides(tokens)
    assert max(len(row["input_ids"]) for row in found) <= 64
    assert sorted({row["source_row"] for row in found}) == used
    if over_length == "split":  # No word of the answer is lost.
        chunks = [row for row in found if row["source_row"] == 13]
        decode = decoder(tiny_dir)
        text = "".join(decode(row["input_ids"][start:end]) for row in chunks for start, end in spans_of(row))
        assert text == "word " * 100 + "<|im_end|>"


def test_equal_rows_and_no_others_have_equal_digests(tokenize):
    tokens = tokenize([*ROWS, *ROWS[:9]], drop_duplicates=True)
    digests = np.concatenate((tokens.train.digests, tokens.heldout.digests))
    assert (len(digests), len(set(digests.tolist()))) == (79, 70)
    assert len(tokenize(ROWS).train.digests) == 0
    # The same ids with other spans.
    pairs = [{"prompt": "a b", "completion": " c"}, {"prompt": "a", "completion": " b c"}]
    tokens = tokenize(pairs, source=1, drop_duplicates=True)
    first, second = both_sides(tokens)
    assert first["input_ids"] == second["input_ids"] and first["loss_spans"] != second["loss_spans"]
    assert len({*tokens.train.digests.tolist(), *tokens.heldout.digests.tolist()}) == 2


def test_rows_of_text_need_no_template(tiny_dir, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    [row] = both_sides(worker_of(tmp_path)(block_of([{"prompt": "Q: ", "completion": "A"}], source=1)))
    assert decoder(tiny_dir)(row["input_ids"]) == "Q: A<|im_end|>"
    with pytest.raises(UserError, match="has no chat template"):
        worker_of(tmp_path)(block_of(ROWS))


def test_a_trained_padding_token_is_refused(tiny_dir, tmp_path):
    """Here the template ends each answer with the token that pads rows."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    template = (tiny_dir / "chat_template.jinja").read_text()
    end = "{{- '<|im_end|>' }}\n        {%- endgeneration"
    assert end in template
    (tmp_path / "chat_template.jinja").write_text(template.replace(end, end.replace("im_end", "pad")))
    with pytest.raises(UserError, match=r"^model.name: token 0 pads rows \(it is the tokenizer's pad_token"):
        worker_of(tmp_path)(block_of(ROWS))


TWICE = (
    "{{ bos_token * (2 if messages[0].content == 'twice' else 1) }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_a_row_that_begins_with_two_bos_tokens_is_refused(tmp_path):
    """At inference there is one. The check of the template on test conversations cannot see this row."""
    directory = save(byte_level("llama3"), tmp_path, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    worker = worker_of(directory, chat_template=TWICE)
    assert counted(worker(block_of([chat_row("once", "a")]))) == {"rows": 1}
    with pytest.raises(UserError, match=r"^data.chat_template: a row begins with two <\|endoftext\|>"):
        worker(block_of([chat_row("once", "a"), chat_row("twice", "a")]))


def test_a_block_without_usable_rows_is_empty_batches(tiny_dir):
    for worker in (worker_of(tiny_dir, drop_duplicates=value) for value in (False, True)):
        for block in (block_of(["{", chat_row("a", "")]), replace(block_of([]), payload=b"")):
            tokens = worker(block)
            assert (tokens.train.rows.num_rows, tokens.heldout.rows.num_rows) == (0, 0)
            assert tokens.train.rows.schema.equals(token_schema(1280, 512, 8))


CUT = (
    "{% for m in messages %}START{{ m.role }}\n{% if m.role == 'assistant' and m.content == 'cut' %}"
    "{% generation %}{{ m.content }}FIRST{% endgeneration %}SECOND{% elif m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}FIRSTSECOND{% endgeneration %}{% else %}{{ m.content }}FIRSTSECOND{% endif %}\n"
    "{% endfor %}"
)


@pytest.mark.parametrize("style", ["byte level", "sentencepiece"])
def test_a_row_whose_trained_text_ends_inside_a_control_token_is_refused(style, tmp_path, tiny_dir):
    """Its rest would be plain characters. Such a row is no example of tokens that never occur at inference."""
    directory, start, token = tiny_dir, "<|im_start|>", "<|im_end|>"
    if style == "sentencepiece":  # Rows are encoded as one text, so the ids are right, and the token is not trained.
        directory = save(sentencepiece("llama2"), tmp_path, eos_token="</s>", pad_token="<unk>")
        start, token = "<s>", "</s>"
    marks = CUT.replace("START", start).replace("FIRST", token[:2]).replace("SECOND", token[2:])
    turns = [("user", "Hi"), ("assistant", "cut"), ("user", "And?"), ("assistant", "Fine")]
    cut = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
    made = worker_of(directory, chat_template=marks)(block_of([ROWS[0], cut, ROWS[1]]))
    assert [row["source_row"] for row in both_sides(made)] == [10, 12]
    [reject] = made.tally.rejects
    assert reject.line == 12
    assert reject.reason.startswith(f"the control token {token!r} of its text is not one token of its ids: a generat")
    assert counted(made) == {"rows": 3, "bad_rows": 1}


@pytest.mark.parametrize("is_special", [False, True])
def test_think_tags_of_answers_are_tokens_and_those_of_others_are_text(tiny_dir, tmp_path, is_special):
    """Where they are special tokens, an answer's own tags were trained as characters, beside the template's tokens."""
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=is_special, normalized=False) for tag in THINK_TAGS])
    save(tokenizer, tmp_path, eos_token="<|im_end|>", pad_token="<|pad|>")
    tags = [tokenizer.token_to_id(tag) for tag in THINK_TAGS]
    asked = "What is <think>?" if is_special else "What?"
    written, tagged = "<think>Hm.</think>A<|im_end|>", chat_row(asked, "<think>\nHm.\n</think>\n\nA")
    for template in (OWN_BLOCK + ASK, TURNS + ASK):
        tokens = worker_of(tmp_path, chat_template=template)(block_of([tagged]))
        assert counted(tokens) == {"rows": 1, **({"control_tokens_as_text": 1} if is_special else {})}
        [row] = both_sides(tokens)
        [(start, end)] = spans_of(row)
        text = written if template == OWN_BLOCK + ASK else tagged["messages"][1]["content"] + "<|im_end|>"
        assert decoder(tmp_path)(row["input_ids"][start:end]) == text
        assert [number for number in row["input_ids"] if number in tags] == tags
    reasons = [
        chat_row("Q", "<think>Hm.</think><think>Oh.</think>A"),
        {"messages": [USER, {**ANSWER, "reasoning_content": "<think>Hm.</think>"}]},
        {"messages": [USER, {**ANSWER, "content": tagged["messages"][1]["content"], "reasoning_content": "Hm."}]},
    ]
    refused = worker_of(tmp_path, chat_template=OWN_BLOCK + ASK)(block_of(reasons))
    assert counted(refused) == {"rows": 3, "bad_rows": 3}
