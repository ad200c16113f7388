"""Reading rows: every row once, with its line, in bounded memory, from exactly the bytes that were pinned."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.errors import UserError
from stages.files import sha256_file
from stages.tokenize import sources
from stages.tokenize.sources import Row, read_rows


def entry(path: Path) -> dict:
    return {"path": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}


def read(path: Path, max_rows: int | None = None) -> list[Row]:
    return list(read_rows([("rows", path, entry(path))], max_rows, lambda read_bytes: None))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=5)


@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), block=st.integers(6, 40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_array_read_in_blocks_equals_the_array_read_whole(tmp_path, monkeypatch, rows, indent, ascii_only, block):
    """A value or a character cut in two by a block's end must neither be lost nor be taken for a fault."""
    # The first block is where the reader looks for the bracket: behind the mark and two blanks it is byte 6.
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    path = tmp_path / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(b"\xef\xbb\xbf\n " + text.encode("utf-8", "surrogatepass") + b"\n")
    assert [row.value for row in read(path)] == rows


@given(rows=ROWS, block=st.integers(5, 40), end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]), last=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_read_in_blocks_equal_the_lines(tmp_path, monkeypatch, rows, block, end, last):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines) + (end if last else b""))
    assert [row.value for row in read(path)] == rows
    stride = end.count(b"\n")
    assert [row.place for row in read(path)] == [f"rows:{1 + stride * k}" for k in range(len(rows))]


def test_rows_of_an_array_are_placed_on_their_first_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n  {"a":\n 1},\n\n  {"a": 2}, {"a": 3}\n]\n')
    assert [(row.place, row.number) for row in read(path)] == [("rows:2", 0), ("rows:5", 1), ("rows:5", 2)]


FAULTS = {
    "line": ('{"a": 1}\n{"a": 2\n{"a": 3}\n', "rows:2: not JSON (Expecting ',' delimiter at column 8)"),
    "list in a line": ('{"a": 1}\n[1]\n', "rows:2: a row must be a JSON object, got an array"),
    "string in a line": ('"a"\n', "rows:1: a row must be a JSON object, got a string"),
    "null in a line": ("null\n", "rows:1: a row must be a JSON object, got null"),
    "in an array": ('[\n{"a": 1},\n{"a": b}\n]' + " " * 99, "rows:3: not JSON (Expecting value)"),
    "colon": ('[{"a": 1},\n{"a" 2}]', "rows:2: not JSON (Expecting ':' delimiter)"),
    "missing comma": ('[{"a": 1}\n{"a": 2}]', "rows:2: not JSON (expecting ',' or ']' after a row)"),
    "open string": ('[{"a": 1},\n{"a": "b}]', "rows:2: not JSON (Unterminated string starting at)"),
    "line break in a string": ('[{"a": "b\nc"}]' + " " * 99, "rows:1: not JSON (Invalid control character at)"),
    "open array": ('[{"a": 1},\n{"a": 2}\n', "rows:3: not JSON (expecting ',' or ']' after a row)"),
    "open row": ('[{"a": 1},\n{"a": ', "rows:2: not JSON (Expecting value)"),
    "open list of rows": ('[{"a": 1},\n', "rows:2: not JSON (the file ends inside the array)"),
    "nothing after a bracket": ("[", "rows:1: not JSON (the file ends inside the array)"),
    "trailing comma": ('[{"a": 1},\n]', "rows:2: not JSON (unexpected ']')"),
    "second array": ('[{"a": 1}]\n[{"a": 2}]', "rows:2: not JSON (text after the array's end)"),
    "number in an array": ('[{"a": 1},\n 7]', "rows:2: a row must be a JSON object, got a value starting with '7'"),
    "list in an array": ("[[1]]", "rows:1: a row must be a JSON object, got a value starting with '['"),
    "long number": (
        '[{"a": 1},\n{"a": ' + "9" * 5000 + "}]",
        "rows:2: a row holds an integer of more than 4300 d",
    ),
    "long number in a line": ('{"a": ' + "9" * 5000 + "}", "rows:1: a row holds an integer of more than 4300 digits"),
    "too deep": ("[" + '{"a":' * 100_000, "rows:1: not JSON (nested too deep)"),
    "too deep line": ('{"a":' * 100_000, "rows:1: JSON nested too deep"),
}


@pytest.mark.parametrize("text, rule", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("block", [5, 1 << 20])
def test_a_fault_is_told_with_its_line_however_the_file_was_cut(tmp_path, monkeypatch, text, rule, block):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError) as fault:
        read(path)
    assert str(fault.value).startswith(rule)


@pytest.mark.parametrize("text", [b'{"a": "\xff"}\n', b'[{"a": "\xff"}]', b'[{"a": 1}\n, {"a": "\xe4'])
def test_bytes_that_are_not_utf8_are_told(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match="rows.*: not UTF-8"):
        read(path)


def test_an_object_in_a_json_file_is_told_that_an_array_is_expected(tmp_path):
    """`each line must be one JSON object` alone sends its owner the wrong way."""
    path = tmp_path / "rows.json"
    path.write_text('{\n  "data": []\n}\n')
    with pytest.raises(UserError, match="^rows.json:1: not JSON .*; a .json file must be one array of JSON"):
        list(read_rows([("rows.json", path, entry(path))], None, lambda read_bytes: None))


def test_a_source_that_cannot_be_read_any_more_is_told_by_its_name():
    """Told by whoever writes the tokens, it would read as a full disk. A process's own memory begins unreadable."""
    memory = Path("/proc/self/mem")
    if not memory.exists():
        pytest.skip("this system shows no process's memory as a file")
    pinned = {"path": "mem", "bytes": 1, "sha256": "0" * 64}
    with pytest.raises(UserError, match="^shown: cannot be read \\(Input/output error\\)"):
        list(read_rows([("shown", memory, pinned)], None, lambda read_bytes: None))


def test_a_fault_early_in_a_large_array_is_told_without_reading_it_all(tmp_path, monkeypatch):
    """A fault must not be mistaken for a value cut in two: that would read the whole file into memory."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    path = tmp_path / "rows.json"
    path.write_text("[" + ",\n".join(['{"a": "word"}'] * 50 + ['{"a": word}'] + ['{"a": "word"}'] * 5000) + "]")
    seen: list[int] = []
    with pytest.raises(UserError, match="rows:51: not JSON"):
        list(read_rows([("rows", path, entry(path))], None, seen.append))
    assert sum(seen) <= 3000


def test_a_row_of_megabytes_costs_time_in_step_with_its_size(tmp_path, monkeypatch):
    """Parsing again from the row's start after every block would be quadratic."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"a": "x" * 1_000_000}, {"b": 1}]))
    reads: list[int] = []
    rows = list(read_rows([("rows", path, entry(path))], None, reads.append))
    assert [len(row.value) for row in rows] == [1, 1] and len(rows[0].value["a"]) == 1_000_000
    assert len(reads) < 40


@pytest.mark.parametrize(
    "name, text", [("r.jsonl", '{"a": 1}\n{"a": 2}\n{"a": 3}\n'), ("r.json", '[{"a": 1}, {"a": 2}]')]
)
@pytest.mark.parametrize("max_rows", [None, 1])
def test_a_file_that_changed_since_it_was_pinned_is_refused(tmp_path, name, text, max_rows):
    """Even where only its first rows are read, and only its end changed."""
    path = tmp_path / name
    path.write_text(text)
    pinned = entry(path)
    path.write_text(text + " \n")
    with pytest.raises(UserError, match="^shown: changed since it was pinned; run `dvc repro` again$"):
        list(read_rows([("shown", path, pinned)], max_rows, lambda read_bytes: None))
    path.unlink()
    with pytest.raises(UserError, match="^shown: cannot be read any more"):
        list(read_rows([("shown", path, pinned)], max_rows, lambda read_bytes: None))


def test_a_file_pinned_by_gits_blob_id_is_checked_too(tmp_path):
    """The hub names small files so."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "hello"}\n')
    blob_id = subprocess.run(["git", "hash-object", path], capture_output=True, text=True, check=True).stdout.strip()
    pinned = {"path": "rows.jsonl", "bytes": path.stat().st_size, "blob_id": blob_id}
    assert len(list(read_rows([("rows", path, pinned)], None, lambda read_bytes: None))) == 1
    path.write_bytes(b'{"text": "jello"}\n')
    with pytest.raises(UserError, match="changed since it was pinned"):
        list(read_rows([("rows", path, pinned)], None, lambda read_bytes: None))


def test_max_rows_counts_over_all_files_and_opens_none_beyond(tmp_path):
    paths = [tmp_path / f"{k}.jsonl" for k in range(3)]
    for path in paths:
        path.write_text('{"a": 1}\n{"a": 2}\n')
    files = [(path.name, path, entry(path)) for path in paths]
    paths[2].unlink()
    rows = list(read_rows(files, 3, lambda read_bytes: None))
    assert [(row.place, row.number) for row in rows] == [("0.jsonl:1", 0), ("0.jsonl:2", 1), ("1.jsonl:1", 2)]
    assert [row.number for row in read_rows(files[:2], 4, lambda read_bytes: None)] == [0, 1, 2, 3]
