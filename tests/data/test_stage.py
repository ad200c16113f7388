"""The tokenize stage as a user runs it: its files, its determinism, its refusals."""

import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from lean_finetune.core.atomic_files import read_json
from lean_finetune.data.shards import tokenize_run
from lean_finetune.data.shards.tokenize_run import make_shards
from stages.tokenize import main as tokenize
from tests.data.common import chat_row, contents, conversation, decoder, meta, read_tokens, spans_of
from tests.workspace import error, invoke, run_module, write_rows

OUT, FIGURES = Path("data/tokens"), Path("data/tokens/figures.json")
ROWS = [chat_row(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(60)]


def snapshot() -> dict[str, bytes]:
    return contents(OUT, FIGURES)


def test_rows_index_meta_histogram_and_figures_agree(run, tiny_dir):
    rows = [row | ({"family": "sums"} if n % 2 else {}) for n, row in enumerate(ROWS)]
    assert run(write_rows(Path("rows.jsonl"), rows)).exit_code == 0
    train, heldout = read_tokens(OUT / "train"), read_tokens(OUT / "heldout")
    numbers = [[row["source_row"] for row in side] for side in (train, heldout)]
    assert sorted(sum(numbers, [])) == list(range(len(ROWS))) and numbers == [sorted(side) for side in numbers]
    assert 2 <= len(heldout) <= 30
    decode = decoder(tiny_dir)
    for row in train + heldout:
        [(start, end)] = spans_of(row)
        given = rows[row["source_row"]]
        assert (row["family"], row["source_file"]) == (given.get("family"), 0)
        answer = given["messages"][1]["content"]
        assert decode(row["input_ids"][start:end]) == f"{answer}<|im_end|>" and end == len(row["input_ids"])
    lengths = [len(row["input_ids"]) for row in train]
    supervised = [sum(end - start for start, end in spans_of(row)) for row in train]
    assert read_tokens(OUT / "train-index.arrow") == [
        {"length": length, "supervised": trained, "source": 0, "dropped": False}
        for length, trained in zip(lengths, supervised, strict=True)
    ]
    assert len(read_tokens(OUT / "heldout-index.arrow")) == len(heldout)
    about = meta(OUT)
    [source] = about["sources"]
    named = {token["content"]: token["id"] for token in read_json(tiny_dir / "tokenizer.json")["added_tokens"]}
    expected = {
        "schema": 2,
        "shards": 1,
        "files": ["rows.jsonl"],
        "train_rows": len(train),
        "heldout_rows": len(heldout),
        "longest": max(len(row["input_ids"]) for row in train + heldout),
        "chat_template_method": "marks",
        "pad_id": named["<|pad|>"],
        "eos_id": named["<|im_end|>"],
    }
    assert {name: about[name] for name in expected} == expected
    assert (source["format"], source["format_reason"]) == ("messages", "the first row has messages")
    assert source["train_tokens"] == sum(lengths)
    figures = read_json(FIGURES)
    assert figures["train_tokens"] == sum(lengths) and figures["supervised_tokens"] == sum(supervised)
    assert figures["supervised_percent"] == pytest.approx(100 * sum(supervised) / sum(lengths), abs=1e-3)
    assert figures["mean_length"] == pytest.approx(np.mean(lengths), abs=1e-3)
    assert (figures["truncated_rows"], figures["dropped_rows"]) == (0, 0)


def test_questions_and_answers_under_usual_names_are_conversations(run, tiny_dir):
    """They ended with the names of all formats, none of which said what to write."""
    rows = [{"question": f"Is it {n}?", "answer": "No."} for n in range(20)]
    assert run(write_rows(Path("rows.jsonl"), rows)).exit_code == 0
    [source] = meta(OUT)["sources"]
    assert (source["format"], source["format_reason"]) == ("alpaca", "the first row has question and answer")
    row = read_tokens(OUT / "train")[0]
    [(start, end)] = spans_of(row)
    decode = decoder(tiny_dir)
    assert "Is it" in decode(row["input_ids"][:start]) and decode(row["input_ids"][start:end]) == "No.<|im_end|>"


def test_rows_do_not_change_sides_when_others_are_added_or_answers_change(run):
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    before = {ROWS[row["source_row"]]["messages"][0]["content"] for row in read_tokens(OUT / "heldout")}
    more = [chat_row(f"New {n}?", "Yes.") for n in range(40)]
    more += [chat_row(row["messages"][0]["content"], "Something else.") for row in ROWS]
    run(write_rows(source, more))
    after = {more[row["source_row"]]["messages"][0]["content"] for row in read_tokens(OUT / "heldout")}
    assert before < after and after - before <= {row["messages"][0]["content"] for row in more[:40]}


def test_rows_that_were_left_out_or_truncated_are_counted_in_notes(run):
    rows = [chat_row("Hi", ""), *ROWS, chat_row("Hi", "word " * 100), chat_row("word " * 100, "Yes.")]
    result = run(write_rows(Path("rows.jsonl"), rows), data__max_length=64)
    assert result.exit_code == 0
    assert (
        "note: 2 of 63 rows (3.2 %) were truncated at data.max_length=64; raise data.max_length\n"
        "note: 1 of 63 rows (1.6 %) were dropped because no answer was left within data.max_length=64 (first at "
        "rows.jsonl:63); raise data.max_length\n"
        "note: 1 of 63 rows (1.6 %) were dropped because an answer in them is empty (first at rows.jsonl:1); fill"
    ) in result.stderr
    used = {row["source_row"]: row for name in ("train", "heldout") for row in read_tokens(OUT / name)}
    assert sorted(used) == list(range(1, 62))
    assert len(used[61]["input_ids"]) == 64 and spans_of(used[61])[-1][1] == 64
    figures = read_json(FIGURES)
    names = ("truncated_rows", "dropped_rows", "empty_answer_rows", "longest")
    assert [figures[name] for name in names] == [2, 2, 1, 64]


@pytest.mark.parametrize("over_length, compared", [("truncate", "rows"), ("split", "rows and chunks of split rows")])
def test_duplicates_are_counted_by_what_was_compared(run, over_length, compared):
    """Chunks of a split row are dropped one by one, so there may be more duplicates than rows."""
    path = write_rows(Path("rows.jsonl"), [*ROWS, *[chat_row("Hi", "word " * 400)] * 2])
    result = run(path, data__max_length=64, data__over_length=over_length, data__drop_duplicates=True)
    assert result.exit_code == 0
    figures = read_json(FIGURES)
    duplicates, used = figures["duplicate_rows"], figures["train_rows"] + figures["heldout_rows"]
    assert (figures["split_rows"], duplicates > 3) == ((2, True) if over_length == "split" else (0, False))
    note = f"note: {duplicates} of {duplicates + used} {compared} were dropped because their tokens equal"
    assert note in result.stderr


REFUSED = {
    "broken JSON": ('{"text": "a"}\n{"text": \n', {}, "rows.jsonl:2: not JSON ("),
    "unknown format of a row": ('{"q": 1}\n', {}, 'rows.jsonl:1: data.format auto knows no format with the keys ["q"]'),
    "another format later": (
        '{"text": "a"}\n\n{"q": "b"}\n',
        {},
        "rows.jsonl:3: a row of data.format text needs 'text'",
    ),
    "none to read": ("{]\n\n}\n", {"data__on_bad_row": "skip"}, "rows.jsonl:1: not JSON ("),
    "no rows": ("\n \n", {}, "data.source: rows.jsonl holds no rows"),
    "none trained": ('{"text": "a"}\n', {"data__heldout_fraction": 0.99}, "data.heldout_fraction: leaves no row to"),
    "no answer left": (
        json.dumps(chat_row("word " * 99)) + "\n",
        {"data__max_length": 8},
        "data.source: none of 1 row is",
    ),
    "all skipped": ('{"q": 1}\n' * 3, {"data__format": "alpaca", "data__on_bad_row": "skip"}, "data.source: none"),
    "deep tools": (
        json.dumps(chat_row())[:-1] + ', "tools": [' + '{"a":' * 900 + "1" + "}" * 900 + "]}\n",
        {},
        "rows.jsonl:1: JSON nested too deep; make the row flatter",
    ),
    "template": (
        json.dumps({"messages": [*chat_row()["messages"], {"role": "system", "content": "late"}]}) + "\n",
        {},
        "rows.jsonl:1: the chat template refuses the row (TemplateError: a system message may only come first)",
    ),
}


@pytest.mark.parametrize("text, values, rule", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_in_one_line(run, text, values, rule):
    Path("rows.jsonl").write_text(text)
    assert error(run("rows.jsonl", **values)).startswith(rule)
    assert not OUT.exists()


def test_a_refusal_leaves_the_last_tokens_unchanged(run):
    source = write_rows(Path("rows.jsonl"), ROWS)
    assert run(source).exit_code == 0
    before = snapshot()
    Path("bad.jsonl").write_text("{")
    assert error(run("bad.jsonl")).startswith("bad.jsonl:1: not JSON")
    assert snapshot() == before and [path.name for path in Path("data").iterdir()] == ["tokens"]
    run(source)
    write_rows(source, ROWS[1:])
    assert error(invoke(tokenize)) == "rows.jsonl: changed since it was pinned; run `dvc repro` again"
    assert snapshot() == before


def test_a_tokenizer_that_changes_meanwhile_is_refused_and_its_shards_are_made_again(run, tiny_dir, monkeypatch):
    """Workers may read it later than the stage that compared it with its pinned hash."""
    shutil.copytree(tiny_dir, "own")

    def make(*given):
        made = make_shards(*given)
        os.utime("own/tokenizer.json")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(tokenize_run, "make_shards", make)
        line = error(run(write_rows(Path("rows.jsonl"), ROWS), model__name="own"))
    assert line == "model.name: own/tokenizer.json changed while it was read; run `dvc repro` again"
    assert not OUT.exists() and not list(Path("scratch").rglob("*.json"))
    assert invoke(tokenize).exit_code == 0


def test_a_template_file_is_pinned_with_the_rows(run, tmp_path):
    """A template that changed after the pin would give tokens that no lock names."""
    source = write_rows(Path("rows.jsonl"), ROWS)
    template = Path("mine.jinja")
    template.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    assert run(source, data__chat_template="mine.jinja").exit_code == 0
    assert Path("locks/watched-files/template").resolve() == template.resolve()
    template.write_text("{# other #}" + template.read_text())
    line = error(invoke(tokenize))
    assert line == "data.chat_template: mine.jinja changed since it was pinned; run `dvc repro` again"
    assert "no such file: 'none.jinja'" in error(run(source, data__chat_template="none.jinja"))


def full_disk() -> None:
    """Stop this process's files from growing past 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_tokens_unchanged(run):
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    before = snapshot()
    run(write_rows(source, ROWS * 20), "--out", "elsewhere")
    process = run_module("stages.tokenize", cwd=Path.cwd(), preexec_fn=full_disk)
    assert process.returncode == 1
    [line] = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: scratch/tokenize/") and ": cannot be written (" in line
    assert "Traceback" not in process.stderr and snapshot() == before
    assert [path.name for path in Path("data").iterdir()] == ["tokens"]
    assert list(Path("scratch/tokenize").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shape, rows", [("alpaca_en_demo.json", "alpaca", 999), ("glaive_toolcall_en_demo.json", "sharegpt", 300)]
)
def test_public_data_goes_through_with_every_answer_trained(run, public_data, tiny_dir, name, shape, rows):
    source = public_data / name
    limits = dict.fromkeys(("data__max_length", "bucket__max_tokens", "evaluate__max_tokens"), 16_384)
    assert run(source, data__heldout_fraction=0.05, **limits).exit_code == 0
    figures = read_json(FIGURES)
    assert figures["format"] == shape
    assert figures["train_rows"] + figures["heldout_rows"] == rows and figures["dropped_rows"] == 0
    values, decode = json.loads(source.read_text()), decoder(tiny_dir)
    for row in read_tokens(OUT / "heldout"):
        messages = conversation(values[row["source_row"]], shape).messages
        turns = [message for message in messages if message["role"] == "assistant"]
        texts = [decode(row["input_ids"][start:end]) for start, end in spans_of(row)]
        assert len(texts) == len(turns)
        for text, turn in zip(texts, turns, strict=True):
            if "tool_calls" in turn:
                assert json.loads(text.split("<tool_call>")[1].split("</tool_call>")[0])["name"]
            else:
                assert text == turn["content"] + "<|im_end|>"


def test_the_sample_lock_names_the_sample(repo_root):
    """The committed pin must be of the committed file, or the first run of a clone would start with a change."""
    lock = read_json(repo_root / "locks/data.json")
    [source] = lock["sources"]
    content = (repo_root / source["source"]).read_bytes()
    assert source["files"][0]["sha256"] == hashlib.sha256(content).hexdigest()
    model = read_json(repo_root / "locks/model.json")
    for name, digest in {**model["files"], **read_json(repo_root / "locks/tokenizer.json")["files"]}.items():
        assert hashlib.sha256((repo_root / "lean_finetune/tiny" / name).read_bytes()).hexdigest() == digest, name
    assert os.readlink(repo_root / "locks/watched-data") == "../data/raw/sample.jsonl"
    assert os.readlink(repo_root / "locks/watched-model") == "README.md"
