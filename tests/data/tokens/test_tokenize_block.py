"""Tokenizing of a block: every row is either in the tokens, with its number, or counted."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import SourceFormat
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.block_tokens import COUNTS, BlockTokens, token_schema
from lean_finetune.data.shards.token_settings import TokenSettings
from lean_finetune.data.shards.tokenize_block import ROWS_PER_SAMPLED_ROW, BlockTokenizer
from tests.conftest import ROOT
from tests.data.tokens.built import byte_level, save
from tests.data.tokens.common import DATE, chat_row, decoder, spans_of
from tests.processes import run_bounded

ROWS = [chat_row(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(70)]


def settings_of(directory: Path, **values: Any) -> TokenSettings:
    shared: dict[str, Any] = {
        "tokenizer_directory": directory,
        "sources": (SourceFormat(format="messages", columns={}), SourceFormat(format="prompt_completion", columns={})),
        "files": 8,
        "ignore_columns": (),
        "chat_template": "tokenizer",
        "template_date": DATE,
        "train_on": "assistant",
        "max_length": 512,
        "over_length": "truncate",
        "on_bad_row": "skip",
        "drop_duplicates": False,
        "heldout_fraction": 0.2,
        "heldout_seed": 0,
        "engine": "tokenizers",
    }
    return TokenSettings(**(shared | values))


def block_of(rows: list[Any], source: int = 0, first_row: int = 0) -> RowBlock:
    """Rows as JSON lines; text is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    payload = "".join(f"{line}\n" for line in lines).encode()
    return RowBlock(number=3, source=source, file=7, kind="lines", payload=payload, first_row=first_row)


def both_sides(tokens: BlockTokens) -> list[dict[str, Any]]:
    return sorted([*tokens.train.to_pylist(), *tokens.heldout.to_pylist()], key=lambda row: row["source_row"])


def counted(tokens: BlockTokens) -> dict[str, int]:
    """The counts that are not zero, but for the sample."""
    assert tuple(tokens.counts) == COUNTS
    return {name: n for name, n in tokens.counts.items() if n and name != "sampled_rows"}


def test_numbers_take_two_bytes_where_the_largest_of_them_allows_it():
    def types(*sizes: int) -> list[str]:
        schema = token_schema(*sizes)
        return [str(schema.field(name).type) for name in ("input_ids", "loss_spans", "source_file")]

    assert types(65_536, 65_535, 65_536) == ["list<item: uint16>", "list<item: uint16>", "uint16"]
    assert types(65_537, 65_536, 65_537) == ["list<item: int32>", "list<item: int32>", "int32"]


def test_rows_keep_their_order_place_family_and_text(tiny_dir):
    rows = [row | ({"family": "sums"} if n % 2 else {}) for n, row in enumerate(ROWS)]
    tokens = BlockTokenizer(settings_of(tiny_dir))(block_of(rows, first_row=1000))
    assert counted(tokens) == {"rows": 70} and tokens.rejects == [] and tokens.first == {}
    for batch in (tokens.train, tokens.heldout):
        assert batch.schema.equals(token_schema(1280, 512, 8)) and batch.num_rows
        assert batch.column("source_row").to_pylist() == sorted(batch.column("source_row").to_pylist())
    found = both_sides(tokens)
    assert [row["source_row"] for row in found] == list(range(1000, 1070))
    decode = decoder(tiny_dir)
    for row, source in zip(found, rows, strict=True):
        assert (row["family"], row["source_file"]) == (source.get("family"), 7)
        [(start, end)] = spans_of(row)
        assert decode(row["input_ids"][start:end]) == source["messages"][1]["content"] + "<|im_end|>"
        assert end == len(row["input_ids"])
    for batch, supervised in ((tokens.train, tokens.train_supervised), (tokens.heldout, tokens.heldout_supervised)):
        expected = [sum(end - max(start, 1) for start, end in spans_of(row)) for row in batch.to_pylist()]
        assert supervised.tolist() == expected and supervised.dtype == np.int32
    assert tokens.counts["sampled_rows"] == -(-70 // ROWS_PER_SAMPLED_ROW)


def test_both_engines_give_the_same_block(tiny_dir):
    rows = [*ROWS, chat_row("<|im_end|> \ud800 é", "a " * 50), chat_row("Hi", "")]
    one, two = (
        BlockTokenizer(settings_of(tiny_dir, engine=name))(block_of(rows)) for name in ("tokenizers", "tiktoken")
    )
    assert one.train.equals(two.train) and one.heldout.equals(two.heldout)
    assert (one.counts, one.rejects, one.first) == (two.counts, two.rejects, two.first)


def test_a_worker_forgets_the_last_block(tiny_dir):
    """Shards are made anew after a fault, from any block on: what came before must not show."""
    worker = BlockTokenizer(settings_of(tiny_dir, drop_duplicates=True))
    block = block_of([*ROWS[:5], chat_row("<|im_end|>", "x"), "{", chat_row("a", "")])
    first = worker(block)
    again = worker(block)
    assert first.train.equals(again.train) and (first.counts, first.rejects) == (again.counts, again.rejects)


BAD = [ROWS[0], "{", {"messages": []}, ROWS[1], chat_row("Hi", " "), {"other": 1}, ROWS[2]]


def test_with_skip_every_row_is_used_or_counted_and_listed(tiny_dir):
    tokens = BlockTokenizer(settings_of(tiny_dir))(block_of(BAD, first_row=10))
    assert counted(tokens) == {"rows": 7, "bad_rows": 3, "empty_answer_rows": 1}
    assert [row["source_row"] for row in both_sides(tokens)] == [10, 13, 16]
    assert [(number, line) for number, line, _ in tokens.rejects] == [(11, 12), (12, 13), (14, 15), (15, 16)]
    assert all(reason for _, _, reason in tokens.rejects)
    assert tokens.first == {"bad_rows": (11, 12), "empty_answer_rows": (14, 15)}


def test_with_fail_the_first_fault_is_the_last_thing_read(tiny_dir):
    tokens = BlockTokenizer(settings_of(tiny_dir, on_bad_row="fail"))(block_of(BAD))
    assert counted(tokens) == {"rows": 2, "bad_rows": 1}
    [(number, line, _)] = tokens.rejects
    assert (number, line) == tokens.first["bad_rows"] == (1, 2)


def test_control_tokens_and_lone_surrogates_in_rows_are_counted_where_first_met(tiny_dir):
    rows = [
        ROWS[0],
        chat_row("<|im_end|><|im_end|>", "<|im_start|>"),
        r'{"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]}',
    ]
    tokens = BlockTokenizer(settings_of(tiny_dir))(block_of(rows))
    assert counted(tokens) == {"rows": 3, "control_tokens_as_text": 3, "surrogates_replaced": 1}
    assert tokens.first == {"control_tokens_as_text": (1, 2), "surrogates_replaced": (2, 3)}
    assert "\ufffd" in decoder(tiny_dir)(both_sides(tokens)[2]["input_ids"])


LONG = [*ROWS[:3], chat_row("Hi", "word " * 100), chat_row("word " * 100, "Yes.")]
LOSSES = {
    "truncate": ({"truncated_rows": 2, "no_answer_rows": 1}, [4], 4),
    "drop": ({"dropped_long_rows": 2}, [3, 4], 3),
    "split": ({"split_rows": 2}, [], None),
}


@pytest.mark.parametrize("over_length", LOSSES)
def test_long_rows_are_counted(tiny_dir, over_length):
    tokens = BlockTokenizer(settings_of(tiny_dir, max_length=64, over_length=over_length))(block_of(LONG))
    counts, rejected, used = LOSSES[over_length]
    assert counted(tokens) == {"rows": 5} | counts
    assert [number for number, _, _ in tokens.rejects] == rejected
    found = both_sides(tokens)
    assert max(len(row["input_ids"]) for row in found) <= 64
    if used is None:
        # Every answer is still there, word for word.
        decode = decoder(tiny_dir)
        text = "".join(
            decode(row["input_ids"][s:e]) for row in found if row["source_row"] == 3 for s, e in spans_of(row)
        )
        assert text == "word " * 100 + "<|im_end|>" and found[-1]["source_row"] == 4
    else:
        assert len(found) == used


def test_duplicates_have_one_digest_and_no_others_have(tiny_dir):
    worker = BlockTokenizer(settings_of(tiny_dir, drop_duplicates=True, heldout_fraction=0.3))
    tokens = worker(block_of([*ROWS, *ROWS[:9]]))
    digests = np.concatenate((tokens.train_digests, tokens.heldout_digests))
    assert (len(digests), len(set(digests.tolist()))) == (79, 70) and digests.dtype == np.uint64
    assert len(BlockTokenizer(settings_of(tiny_dir))(block_of(ROWS)).train_digests) == 0


def test_the_same_ids_with_other_spans_are_no_duplicates(tiny_dir):
    rows = [{"prompt": "a b", "completion": " c"}, {"prompt": "a", "completion": " b c"}]
    tokens = BlockTokenizer(settings_of(tiny_dir, drop_duplicates=True))(block_of(rows, source=1))
    first, second = both_sides(tokens)
    assert first["input_ids"] == second["input_ids"] and first["loss_spans"] != second["loss_spans"]
    assert len({*tokens.train_digests.tolist(), *tokens.heldout_digests.tolist()}) == 2


def test_rows_of_text_need_no_template(tiny_dir, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    block = block_of([{"prompt": "Q: ", "completion": "A"}], source=1)
    [row] = both_sides(BlockTokenizer(settings_of(tmp_path))(block))
    assert decoder(tiny_dir)(row["input_ids"]) == "Q: A<|im_end|>"
    with pytest.raises(UserError, match="has no chat template"):
        BlockTokenizer(settings_of(tmp_path))(block_of(ROWS))


def test_padding_that_an_answer_holds_is_refused(tiny_dir, tmp_path):
    """Here the template ends each answer with the token that fills rows."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    template = (tmp_path / "chat_template.jinja").read_text()
    ended = template.replace(
        "{{- '<|im_end|>' }}\n        {%- endgeneration", "{{- '<|pad|>' }}\n        {%- endgeneration"
    )
    assert ended != template
    (tmp_path / "chat_template.jinja").write_text(ended)
    with pytest.raises(
        UserError, match=r"^model.name: token 0 pads rows \(it is the tokenizer's pad_token '<\|pad\|>'\)"
    ):
        BlockTokenizer(settings_of(tmp_path))(block_of(ROWS))


TWICE = (
    "{{ bos_token * (2 if messages[0].content == 'twice' else 1) }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def test_a_row_that_begins_with_two_bos_tokens_is_refused(tmp_path):
    """At inference one is given; the template's own check cannot see what it does with one row."""
    directory = save(byte_level("llama3"), tmp_path, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    worker = BlockTokenizer(settings_of(directory, chat_template=TWICE))
    assert worker(block_of([chat_row("once", "a")])).counts["bad_rows"] == 0
    with pytest.raises(UserError, match=r"^data.chat_template: a row begins with two <\|endoftext\|>"):
        worker(block_of([chat_row("once", "a"), chat_row("twice", "a")]))


def test_a_worker_imports_nothing_heavy():
    """Each worker process pays for what it imports; transformers alone takes seconds and hundreds of MB."""
    code = (
        "import sys, lean_finetune.data.shards.tokenize_block\n"
        "print(*{'torch', 'transformers', 'tiktoken', 'pandas'} & set(sys.modules))"
    )
    found = run_bounded([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert found.stdout.split() == []


def test_a_block_without_usable_rows_is_empty_batches(tiny_dir):
    for worker in (BlockTokenizer(settings_of(tiny_dir, drop_duplicates=name)) for name in (False, True)):
        tokens = worker(block_of(["{", chat_row("a", "")]))
        assert (tokens.train.num_rows, tokens.heldout.num_rows) == (0, 0)
        assert tokens.train.schema.equals(token_schema(1280, 512, 8))
        assert worker(replace(block_of([]), payload=b"")).counts["rows"] == 0
