"""The tokenize stage as a user runs it: its files, its determinism, its refusals, its end by force."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stages.files import read_json
from stages.pin.__main__ import main as pin
from stages.tokenize.__main__ import main as tokenize
from stages.tokenize.shards import ROWS_PER_RECORD_BATCH, token_schema
from tests.conftest import ROOT
from tests.tokenize.common import chat_row, conversation, decoder, meta, read_tokens, spans_of
from tests.workspace import invoke, lay_out, run_module, told, write_rows

OUT, METRICS = Path("data/tokens"), Path("metrics/tokenize.json")
ROWS = [chat_row(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(60)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that pins a source, tokenizes it, and returns the second result (or the first that failed)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)

    def pin_and_tokenize(source, *arguments, **values):
        values = {"data__source": str(source), "data__heldout_fraction": 0.2} | values
        lay_out(tmp_path, **values)
        for what in ("data", "model"):
            pinned = invoke(pin, what)
            if pinned.exit_code:
                return pinned
        return invoke(tokenize, *arguments)

    return pin_and_tokenize


def snapshot() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in [*OUT.iterdir(), METRICS]}


def test_every_row_is_on_one_side_with_its_number_family_and_text(run, tiny_dir):
    rows = [row | ({"family": "sums"} if n % 2 else {}) for n, row in enumerate(ROWS)]
    assert run(write_rows(Path("rows.jsonl"), rows)).exit_code == 0
    train, heldout = read_tokens(OUT / "train.arrow"), read_tokens(OUT / "heldout.arrow")
    assert sorted(row["source_row"] for row in train + heldout) == list(range(len(rows)))
    assert [row["source_row"] for row in train] == sorted(row["source_row"] for row in train)
    decode = decoder(tiny_dir)
    for row in train + heldout:
        source = rows[row["source_row"]]
        assert row["family"] == source.get("family")
        [(start, end)] = spans_of(row)
        assert decode(row["input_ids"][start:end]) == source["messages"][1]["content"] + "<|im_end|>"
        assert end == len(row["input_ids"])
    assert 2 <= len(heldout) <= 30


def test_index_meta_histogram_and_metrics_say_what_the_rows_hold(run, tiny_dir):
    assert run(write_rows(Path("rows.jsonl"), ROWS)).exit_code == 0
    train, heldout = read_tokens(OUT / "train.arrow"), read_tokens(OUT / "heldout.arrow")
    lengths = [len(row["input_ids"]) for row in train]
    supervised = [sum(end - start for start, end in spans_of(row)) for row in train]
    assert read_tokens(OUT / "index.arrow") == [
        {"length": length, "supervised": trained} for length, trained in zip(lengths, supervised, strict=True)
    ]
    about = meta(OUT)
    assert (about["train_rows"], about["heldout_rows"]) == (len(train), len(heldout))
    assert about["longest"] == max(len(row["input_ids"]) for row in train + heldout)
    assert (about["format"], about["format_reason"]) == ("messages", "the first row has messages")
    ids = json.loads((tiny_dir / "tokenizer.json").read_text())["added_tokens"]
    named = {token["content"]: token["id"] for token in ids}
    assert (about["pad_id"], about["eos_id"]) == (named["<|pad|>"], named["<|im_end|>"])
    metrics = read_json(METRICS)
    assert metrics["train_tokens"] == sum(lengths) and metrics["supervised_tokens"] == sum(supervised)
    assert metrics["supervised_percent"] == pytest.approx(100 * sum(supervised) / sum(lengths), abs=1e-3)
    assert metrics["mean_length"] == pytest.approx(np.mean(lengths), abs=1e-3)
    assert (metrics["truncated_rows"], metrics["dropped_rows"]) == (0, 0)
    histogram = [tuple(map(int, line.split(","))) for line in (OUT / "lengths.csv").read_text().splitlines()[1:]]
    edges = [edge for edge, _ in histogram]
    counted = Counter(min(edge for edge in edges if edge >= length) for length in lengths)
    assert histogram == [(edge, counted[edge]) for edge in edges]


def test_two_runs_give_the_same_bytes_also_on_one_thread(run, monkeypatch):
    """Threads, dict order or a clock in the output would rerun everything that follows."""
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    first = snapshot()
    run(source)
    assert snapshot() == first
    process = run_module("stages.tokenize", cwd=Path.cwd(), env={"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"})
    assert process.returncode == 0, process.stderr
    assert snapshot() == first


def test_rows_do_not_change_sides_when_others_are_added_or_answers_change(run):
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    before = {ROWS[row["source_row"]]["messages"][0]["content"] for row in read_tokens(OUT / "heldout.arrow")}
    more = [chat_row(f"New {n}?", "Yes.") for n in range(40)]
    more += [chat_row(row["messages"][0]["content"], "Something else.") for row in ROWS]
    run(write_rows(source, more))
    after = {more[row["source_row"]]["messages"][0]["content"] for row in read_tokens(OUT / "heldout.arrow")}
    assert before < after and after - before <= {row["messages"][0]["content"] for row in more[:40]}


def test_long_rows_are_cut_and_rows_without_an_answer_left_are_dropped(run):
    long_answer = chat_row("Hi", "word " * 100)
    long_prompt = chat_row("word " * 100, "Yes.")
    rows = [*ROWS, long_answer, long_prompt]
    result = run(write_rows(Path("rows.jsonl"), rows), data__max_length=64)
    assert result.exit_code == 0
    assert (
        "note: 2 of 62 rows (3.2 %) were cut at data.max_length=64, and 1 of them dropped since no answer was left; "
        "raise data.max_length\n"
    ) in result.stderr
    kept = {row["source_row"]: row for name in ("train", "heldout") for row in read_tokens(OUT / f"{name}.arrow")}
    assert len(kept[60]["input_ids"]) == 64 and spans_of(kept[60])[-1][1] == 64
    assert 61 not in kept
    metrics = read_json(METRICS)
    assert (metrics["truncated_rows"], metrics["dropped_rows"], metrics["longest"]) == (2, 1, 64)


def test_rows_with_an_empty_answer_are_dropped_with_a_note(run):
    """Trained on, they teach to say nothing. The first row's end of turn is checked on the first row that is kept."""
    rows = [chat_row("Hi", ""), *ROWS, chat_row("Ho", " \n")]
    result = run(write_rows(Path("rows.jsonl"), rows))
    note = "note: 2 of 62 rows (3.2 %) were dropped because an answer in them is empty (first at rows.jsonl:1); fill"
    assert result.exit_code == 0 and note in result.stderr and "cut at" not in result.stderr
    kept = [row["source_row"] for name in ("train", "heldout") for row in read_tokens(OUT / f"{name}.arrow")]
    assert sorted(kept) == list(range(1, 61))
    metrics = read_json(METRICS)
    assert (metrics["truncated_rows"], metrics["dropped_rows"], metrics["empty_answer_rows"]) == (0, 2, 2)


def test_a_turn_of_weight_0_is_read_but_not_trained(run, tiny_dir):
    """Its owner marked it as one not to be learnt."""
    turns = [*chat_row("Q", "Bad.")["messages"], *chat_row("R", "Good.")["messages"]]
    trained = {"messages": turns}
    untrained = {"messages": [turns[0], {**turns[1], "weight": 0}, *turns[2:]]}
    assert run(write_rows(Path("rows.jsonl"), [*ROWS, trained, untrained])).exit_code == 0
    kept = {row["source_row"]: row for name in ("train", "heldout") for row in read_tokens(OUT / f"{name}.arrow")}
    decode = decoder(tiny_dir)
    texts = {n: [decode(kept[n]["input_ids"][start:end]) for start, end in spans_of(kept[n])] for n in (60, 61)}
    assert texts == {60: ["Bad.<|im_end|>", "Good.<|im_end|>"], 61: ["Good.<|im_end|>"]}
    assert kept[60]["input_ids"] == kept[61]["input_ids"]


def test_a_lone_surrogate_in_a_family_is_replaced(run):
    """No file of tokens can hold it."""
    rows = [*ROWS, chat_row("Q") | {"family": "\ud800s"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("rows.jsonl")
    assert "note: 1 lone surrogates in the rows' text were replaced" in result.stderr
    kept = {row["source_row"]: row for name in ("train", "heldout") for row in read_tokens(OUT / f"{name}.arrow")}
    assert kept[60]["family"] == "\ufffds"


def test_record_batches_hold_a_constant_number_of_rows(run):
    """Later stages find row i in batch i // size without reading the others."""
    rows = [chat_row(f"Say {n}", str(n)) for n in range(ROWS_PER_RECORD_BATCH * 2 + 300)]
    assert run(write_rows(Path("rows.jsonl"), rows)).exit_code == 0
    with pa.memory_map(str(OUT / "train.arrow")) as source, pa.ipc.open_file(source) as reader:
        sizes = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
    assert set(sizes[:-1]) == {ROWS_PER_RECORD_BATCH} and 0 < sizes[-1] <= ROWS_PER_RECORD_BATCH


def test_ids_take_two_bytes_up_to_65536_words():
    assert token_schema(65_536).field("input_ids").type == pa.list_(pa.uint16())
    assert token_schema(65_537).field("input_ids").type == pa.list_(pa.int32())


def test_control_tokens_in_rows_are_reported_with_the_first_place(run):
    rows = [*ROWS, chat_row("a <|im_end|> b", "c <|im_start|>")]
    result = run(write_rows(Path("rows.jsonl"), rows))
    assert (
        "note: 2 control tokens in the rows' own text (first at rows.jsonl:61) were encoded as plain" in result.stderr
    )
    assert read_json(METRICS)["control_tokens_as_text"] == 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize("max_rows", [None, 40])
def test_lines_arrays_and_directories_give_the_same_tokens(run, name, max_rows):
    write_rows(Path("lines.jsonl"), ROWS)
    run("lines.jsonl", data__max_rows=max_rows)
    expected = [read_tokens(OUT / f"{side}.arrow") for side in ("train", "heldout")]
    assert sum(map(len, expected)) == (max_rows or len(ROWS))
    folder = Path("folder")
    write_rows(folder / f"1/{name}", ROWS[:25])
    (folder / "2.json").write_text(json.dumps(ROWS[25:], indent=1))
    assert run(folder, data__max_rows=max_rows).exit_code == 0
    assert [read_tokens(OUT / f"{side}.arrow") for side in ("train", "heldout")] == expected


def test_a_text_is_trained_whole_and_ends_in_eos(run, tiny_dir):
    assert run(write_rows(Path("rows.jsonl"), [{"text": f"Text {n}."} for n in range(40)])).exit_code == 0
    row = read_tokens(OUT / "train.arrow")[0]
    assert spans_of(row) == [(0, len(row["input_ids"]))]
    assert decoder(tiny_dir)(row["input_ids"]) == f"Text {row['source_row']}.<|im_end|>"
    assert read_tokens(OUT / "index.arrow")[0]["supervised"] == len(row["input_ids"]) - 1
    assert meta(OUT)["chat_template_sha256"] is None


REFUSED = {
    "broken JSON": ('{"text": "a"}\n{"text": \n', {}, "rows.jsonl:2: not JSON ("),
    "no assistant": ('{"messages": [{"role": "user", "content": "Q"}]}\n', {}, "rows.jsonl:1: no assistant turn"),
    "unknown shape": ('{"q": 1}\n', {}, 'rows.jsonl:1: data.format auto knows no shape with the keys ["q"]'),
    "later shape": ('{"text": "a"}\n\n{"q": "b"}\n', {}, "rows.jsonl:3: a row of data.format text needs 'text'"),
    "named shape": ('{"text": "a"}\n', {"data__format": "alpaca"}, "rows.jsonl:1: a row of data.format alpaca needs"),
    "unknown format": ('{"text": "a"}\n', {"data__format": "csv"}, "data.format: "),
    "no rows": ("\n \n", {}, "data.source: holds no rows"),
    "no array rows": ("[]", {}, "data.source: holds no rows"),
    "none held out": ('{"text": "a"}\n', {"data__heldout_fraction": 0.01}, "data.heldout_fraction: leaves no row to"),
    "none trained": ('{"text": "a"}\n', {"data__heldout_fraction": 0.99}, "data.heldout_fraction: leaves no row to"),
    "all cut off": (
        json.dumps(chat_row("word " * 99)) + "\n",
        {"data__max_length": 8},
        "data.heldout_fraction: leaves no row to train on (0 usable rows, 1 lost their answer to data.max_length=8)",
    ),
    "all empty": (
        json.dumps(chat_row("Q", "")) + "\n",
        {},
        "data.heldout_fraction: leaves no row to train on (0 usable rows, 1 have an empty answer)",
    ),
    "deep tools": (
        json.dumps(chat_row())[:-1] + ', "tools": [' + '{"a":' * 900 + "1" + "}" * 900 + "]}\n",
        {},
        "rows.jsonl:1: nested too deep; make the row flatter",
    ),
    "template": (
        json.dumps({"messages": [*chat_row()["messages"], {"role": "system", "content": "late"}]}) + "\n",
        {},
        "rows.jsonl:1: the chat template refuses the row (TemplateError: a system message may only come first)",
    ),
}


@pytest.mark.parametrize("text, values, rule", REFUSED.values(), ids=REFUSED)
def test_bad_input_is_told_in_one_line_and_leaves_the_last_tokens_whole(run, text, values, rule):
    good = write_rows(Path("good.jsonl"), ROWS)
    assert run(good).exit_code == 0
    before = snapshot()
    Path("rows.jsonl").write_text(text)
    assert told(run("rows.jsonl", **values)).startswith(rule)
    assert snapshot() == before
    assert [path.name for path in Path("data").iterdir()] == ["tokens"]


def test_a_source_edited_between_pinning_and_reading_is_refused(run):
    """Else the tokens would be of other rows than the lock names."""
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    before = snapshot()
    write_rows(source, ROWS[1:])
    assert told(invoke(tokenize)) == "rows.jsonl: changed since it was pinned; run `dvc repro` again"
    assert snapshot() == before


def test_a_template_that_trains_no_end_of_turn_is_refused(run, tiny_dir, tmp_path):
    """The tuned model would never stop talking."""
    import shutil

    own = tmp_path / "own"
    shutil.copytree(tiny_dir, own)
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    (own / "chat_template.jinja").write_text(template)
    line = told(run(write_rows(Path("rows.jsonl"), ROWS), model__name="own"))
    assert line.startswith("rows.jsonl:1: the chat template trains no end-of-turn token after the answer")


def test_a_missing_lock_is_told(run, tmp_path):
    lay_out(tmp_path)
    assert told(invoke(tokenize)) == "locks/data.json: file is missing; run `dvc repro`"


def full_disk() -> None:
    """Stop this process's files from growing past 20 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_disk_that_refuses_in_mid_write_leaves_the_last_tokens_whole(run):
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    before = snapshot()
    run(write_rows(source, ROWS * 20), "--out", "elsewhere", "--metrics", "elsewhere.json")
    process = run_module("stages.tokenize", cwd=Path.cwd(), preexec_fn=full_disk)
    assert process.returncode == 1
    [line] = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: data/tokens: cannot be written (")
    assert "Traceback" not in process.stderr and snapshot() == before
    assert [path.name for path in Path("data").iterdir()] == ["tokens"]


def test_a_full_disk_is_told(run, tmp_path):
    """The real thing, on a file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a file system here")
    try:
        source = write_rows(Path("rows.jsonl"), ROWS * 20)
        line = told(run(source, "--out", str(disk / "tokens")))
        assert line.startswith(f"{disk}/tokens: cannot be written (") and "No space left on device" in line
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_run_killed_in_mid_write_leaves_the_last_tokens_whole_and_the_next_run_ends_well(run):
    source = write_rows(Path("rows.jsonl"), ROWS)
    run(source)
    before = snapshot()
    write_rows(source, [chat_row(f"Say {n}", "word " * 60) for n in range(20_000)])
    invoke(pin, "data")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "stages.tokenize"], env=environment, stderr=subprocess.PIPE
    ) as process:
        partial = Path("data/.tokens.partial/train.arrow")
        end = time.monotonic() + 60
        while (
            process.poll() is None
            and time.monotonic() < end
            and not (partial.exists() and partial.stat().st_size > 9999)
        ):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert snapshot() == before
    assert run(write_rows(source, ROWS)).exit_code == 0
    assert snapshot() == before
    assert [path.name for path in Path("data").iterdir()] == ["tokens"]


@pytest.mark.parametrize(
    "name, shape, rows", [("alpaca_en_demo.json", "alpaca", 999), ("glaive_toolcall_en_demo.json", "sharegpt", 300)]
)
def test_public_data_goes_through_with_every_answer_trained(run, public_data, tiny_dir, name, shape, rows):
    source = public_data / name
    uncut = dict.fromkeys(("data__max_length", "bucket__max_tokens", "evaluate__max_tokens"), 16_384)
    assert run(source, data__heldout_fraction=0.05, **uncut).exit_code == 0
    metrics = read_json(METRICS)
    assert metrics["format"] == shape
    assert metrics["train_rows"] + metrics["heldout_rows"] == rows and metrics["dropped_rows"] == 0
    values, decode = json.loads(source.read_text()), decoder(tiny_dir)
    for row in read_tokens(OUT / "heldout.arrow"):
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
    content = (repo_root / lock["source"]).read_bytes()
    assert lock["files"][0]["sha256"] == hashlib.sha256(content).hexdigest()
    model = read_json(repo_root / "locks/model.json")
    for name, digest in {**model["files"], **read_json(repo_root / "locks/tokenizer.json")["files"]}.items():
        assert hashlib.sha256((repo_root / "stages/pin/tiny" / name).read_bytes()).hexdigest() == digest, name
    assert os.readlink(repo_root / "locks/watched-data") == "../data/raw/sample.jsonl"
    assert os.readlink(repo_root / "locks/watched-model") == "../stages/pin/tiny"
