"""Malformed files: each row is read or has a fault with its line, or one line refuses the file."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.data.read import arrow_batches, source_blocks
from lean_finetune.data.read.row_block import MAX_ROW_BYTES
from tests.data.read.common import arrow, blocks_of, lock_of, parquet, rows_of, source, zstd

GOOD = b'{"text": "good"}'


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A file and the expected result of reading it."""

    file: str
    content: bytes | Callable[[], bytes]
    good: int = 0
    """Rows without a fault."""
    faults: dict[int, str] = field(default_factory=dict)
    """Start of the fault by line."""
    error: str = ""
    """Start of the refusal after the file's name, for a file that cannot be read."""


def _line(row: bytes, fault: str) -> Malformed:
    """A bad row between two good ones."""
    return _faulty("rows.jsonl", b"\n".join([GOOD, row, GOOD, b""]), 2, 2, fault)


def _valid(content: bytes, good: int, file: str = "rows.jsonl") -> Malformed:
    """Unusual but valid."""
    return Malformed(file=file, content=content, good=good)


def _refused(file: str, content: bytes | Callable[[], bytes], error: str) -> Malformed:
    return Malformed(file=file, content=content, error=error)


def _faulty(file: str, content: bytes | Callable[[], bytes], good: int, line: int, fault: str) -> Malformed:
    return Malformed(file=file, content=content, good=good, faults={line: fault})


def _element(row: bytes, fault: str, line: int = 2) -> Malformed:
    """A bad row of an array between two good ones."""
    return _faulty("rows.json", b"[" + GOOD + b",\n" + row + b",\n" + GOOD + b"]", 2, line, fault)


def _bad_text() -> pa.Table:
    """A column of text whose second cell is not UTF-8."""
    offsets = pa.py_buffer(b"".join(k.to_bytes(4, "little") for k in (0, 2, 4, 6)))
    return pa.table({"text": pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"ok\xff\xfeok"))})


def _bad_offsets() -> pa.Table:
    """A text that is not UTF-8, and behind it one of negative length, which validation of text does not reach."""
    offsets = pa.py_buffer(b"".join(k.to_bytes(4, "little", signed=True) for k in (0, 4, -9, 4)))
    damaged = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"four"))
    return _bad_text().append_column("damaged", damaged)


def _long_row(start: bytes, separator: bytes, end: bytes) -> bytes:
    """A row of more than 64 MiB between two good ones."""
    return start + separator.join((GOOD, b'{"text": "' + b"x" * MAX_ROW_BYTES + b'"}', GOOD)) + end


HEADER_RULE = ":1: the first line must name the columns, each once"
NO_ARROW, NO_PARQUET = ": is damaged or no Arrow file (", ": is damaged or no Parquet file ("
BAD_COMPRESSION = ": the compressed data is damaged or truncated ("
LINES = {
    "incomplete row": _line(b'{"text": "a"', "not JSON (Expecting ',' delimiter at column 13)"),
    "no quotes": _line(b"{text: 1}", "not JSON (Expecting property name"),
    "trailing comma": _line(b'{"text": "a",}', "not JSON (Expecting property name"),
    "comma behind": _line(GOOD + b",", "not JSON (Extra data"),
    "array": _line(b"[1]", "a row must be a JSON object, got an array"),
    "not a number": _line(b"NaN", "a row must be a JSON object, got a number"),
    "boolean": _line(b"true", "a row must be a JSON object, got a boolean"),
    "null": _line(b"null", "a row must be a JSON object, got null"),
    "broken UTF-8": _line(b'{"text": "\xff"}', "not UTF-8 (byte 11)"),
    "encoded surrogate": _line(b'{"text": "\xed\xa0\x80"}', "not UTF-8 (byte 11)"),
    "raw NUL": _line(b'{"text": "a\0b"}', "not JSON (Invalid control character"),
    "raw tab": _line(b'{"text": "a\tb"}', "not JSON (Invalid control character"),
    "bad escape": _line(b'{"text": "\\x41"}', "not JSON (Invalid \\escape"),
    "duplicate key": _line(b'{"text": "a", "text": "b"}', "the key 'text' comes twice in one object"),
    "hidden duplicate key": _line(b'{"text" : "\\":", "text" : "b"}', "the key 'text' comes twice in one object"),
    "escaped duplicate key": _line(b'{"text": "a", "te\\u0078t": "b"}', "the key 'text' comes twice in one object"),
    "inner duplicate key": _line(b'{"a": [[{"b": 1, "b": 2}]]}', "the key 'b' comes twice in one object"),
    "too many digits": _line(b'{"a": ' + b"9" * 5000 + b"}", "has an integer of more than 4300 digits"),
    "too deep": _line(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "JSON nested too deep"),
    "rather deep": _line(b'{"a":' * 900 + b"1" + b"}" * 900, "JSON nested too deep; make the row flatter than 200"),
    "deep list of large numbers": _line(b'{"a":' + b"[" * 300 + b"9" * 30 + b"]" * 300 + b"}", "JSON nested too deep"),
    "not too deep": _valid(b'{"a":' * 150 + b"1" + b"}" * 150, 1),
    "BOM inside": _line(b"\xef\xbb\xbf" + GOOD, "not JSON (Expecting value at column 1)"),
    "no-break spaces": _line("\u00a0\u00a0".encode(), "not JSON"),
    "line of 64 MiB": _faulty(
        "rows.jsonl", lambda: _long_row(b"", b"\n", b"\n"), 2, 2, "the row is longer than 64 MiB; shorten or remove it"
    ),
    "pretty-printed object": _valid(b'{\n "text": "a",\n "data": []\n}\n', 1, "rows.json"),
    "pretty-printed objects": _valid(b'{\n "text": "}{"\n}\n\n{\n "text": "b"\n}{"text": "c"}\n', 3, "rows.jsonl"),
    "text between objects": _refused(
        "rows.json", b'{\n "text": "a"\n},\n{\n "text": "b"\n}\n', ":3: not JSON (unexpected ',' between rows)"
    ),
    "pretty-printed object without end": _refused(
        "rows.json", b'{\n "text": "a"\n', ":1: not JSON (the file ends inside"
    ),
    "rows inside an object": _valid(b'{"data": [\n {"text": "a"},\n {"text": "b"}\n]}\n', 2, "rows.json"),
    "rows inside an object behind others": _valid(
        b'{"version": "v\\"2", "n": 1.5e3, "ok": null,\n"data":\n[{"text": "a"}], "end": true}', 1, "rows.json"
    ),
    "two lists inside an object": _refused(
        "rows.json", b'{"train": [{"text": "a"}],\n"test": [{"text": "b"}]}', ":1: the object holds 'test' beside"
    ),
    "an object of rows that is not closed": _refused(
        "rows.json", b'{"data": [{"text": "a"}]\n', ":1: not JSON (the object that"
    ),
    "lines of objects with such a key": _valid(b'{"data": [{"text": "a"}]}\n{"data": [{"text": "b"}]}\n', 2),
    "a truncated first line": _faulty("rows.jsonl", b'{"text": ["a",\n' + GOOD + b"\n", 1, 1, "not JSON"),
    "a table with semicolons": _refused("rows.csv", b"prompt;completion\nQ;A\n", ":1: the header is one column"),
    "old Mac line ends": _faulty("rows.jsonl", GOOD + b"\r" + GOOD, 0, 1, "not JSON (Extra"),
    "BOM": _valid(b"\xef\xbb\xbf" + GOOD + b"\n", 1),
    "CRLF and blank lines": _valid(GOOD + b"\r\n\r\n  \r\n" + GOOD, 2),
    "lone surrogate": _valid(b'{"text": "\\ud800"}\n', 1),
    "half-open number": _valid(b'{"text": "a", "score": NaN, "high": -Infinity}\n', 1),
    "one long word": _valid(b'{"text": "' + b"a" * 1_000_000 + b'"}\n', 1),
    "only white space": _valid(b" \n\t\n\r\n", 0),
    "mixed schemas": _valid(b'{"text": "a"}\n{"prompt": 1}\n{}\n', 3),
}
ARRAYS = {
    "value in an array": _element(b"7", "a row must be a JSON object, got a number"),
    "string in an array": _element(b'"a]}{[,b"', "a row must be a JSON object, got a string"),
    "bad row in an array": _element(b'{"text":\n\nb}', "not JSON (Expecting value at column 1)", line=4),
    "broken UTF-8 in an array": _element(b'{"text":\n"\xff"}', "not UTF-8 (byte 11)", line=3),
    "duplicate key in an array": _element(b'{"a": 1, "a": 2}', "the key 'a' comes twice"),
    "missing comma after a value": _refused("rows.json", b"[1 " + GOOD + b"]", ":1: not JSON (expecting ',' or ']'"),
    "trailing comma in an array": _refused("rows.json", b"[" + GOOD + b",\n]", ":2: not JSON (unexpected ']')"),
    "open array": _refused("rows.json", b"[" + GOOD + b",\n" + GOOD + b"\n", ":3: not JSON (expecting ',' or ']'"),
    "open row in an array": _refused(
        "rows.json", b"[\n" + GOOD + b',\n{"a": ', ":3: not JSON (the file ends inside the"
    ),
    "open string in an array": _refused("rows.json", b'[\n{"a": "b}]', ":2: not JSON (the file ends inside a string"),
    "too many brackets": _refused("rows.json", b"[\n" + b"[" * (3 << 17), ":2: not JSON (more than 131072 brackets"),
    "wrong closer": _refused("rows.json", b'[{"a": [1}]', ":1: not JSON (unexpected '}')"),
    "two arrays": _refused(
        "rows.json", b"[" + GOOD + b"]\n[" + GOOD + b"]", ":2: not JSON (text after the array's end)"
    ),
    "only a bracket": _refused("rows.json", b"[", ":1: not JSON (the file ends inside the array)"),
    "row of 64 MiB in an array": _faulty(
        "rows.json", lambda: _long_row(b"[", b",\n", b"]"), 2, 2, "the row is longer than 64 MiB; shorten or remove it"
    ),
    "empty array": _valid(b"[ \n]\n", 0, "rows.json"),
}
TABLES = {
    "too few cells": _faulty("r.csv", b"a,b\n1,2\n1\n3,4\n", 2, 3, "a row must have 2 cells"),
    "too many cells": _faulty("r.tsv", b"a\tb\n1\t2\t3\n", 0, 2, "a row must have 2 cells as the head"),
    "text behind a quote": _faulty("r.csv", b'a,b\n"1"x,2\n3,4\n', 1, 2, "not a row of the t"),
    "NUL in a cell": _faulty("r.csv", b"a,b\n1,\0\n3,4\n", 1, 2, "not UTF-8 text, or it ha"),
    "broken UTF-8 in a cell": _faulty("r.csv", b"a,b\n1,\xff\n", 0, 2, "not UTF-8 text"),
    "quote never closed": _refused("r.csv", b'a,b\n1,2\n"3,4\n5,6\n', ":3: the file ends inside a quoted cell"),
    "two columns of a name": _refused("r.csv", b"a,a\n1,2\n", HEADER_RULE),
    "header that is not text": _refused("r.csv", b"\xff\n1\n", HEADER_RULE),
    "quoted line breaks": _valid(b'a,b\r\n"1\r\n2",3\r\n\r\n4,5\r\n', 2, "rows.csv"),
    "BOM of a table": _valid(b"\xef\xbb\xbfa\n1\n", 1, "rows.csv"),
    "broken UTF-8 in text": _faulty("r.txt", b"good\n\xff\n", 1, 2, "not UTF-8 (byte 1)"),
    "binary as text": _faulty("r.txt", b"good\n\0\1\n", 1, 2, "has a NUL byte"),
    "UTF-16 text": _refused("r.txt", "good\n".encode("utf-16"), ": is UTF-16 text; save it as UTF-8"),
}


BINARIES = {
    "no Parquet at all": _refused("r.parquet", b"PAR1", NO_PARQUET),
    "text named Parquet": _refused("r.parquet", GOOD * 9, NO_PARQUET),
    "truncated Parquet": _refused("r.parquet", lambda: parquet([{"a": "b"}])[:-20], NO_PARQUET),
    "no Arrow at all": _refused("r.arrow", b"ARROW1 and so on", NO_ARROW),
    "truncated Arrow file": _refused("r.arrow", lambda: arrow(_bad_text(), True)[:-30], NO_ARROW),
    "truncated Arrow stream": _refused("r.arrow", lambda: arrow(_bad_text(), False)[:-40], NO_ARROW),
    "broken UTF-8 before bad offsets": _refused("r.arrow", lambda: arrow(_bad_offsets(), True), NO_ARROW),
    "name of a column that is not UTF-8": _refused(
        "r.arrow",
        lambda: arrow(pa.table({"text": ["a"]}), True).replace(b"text", b"te\xff\xfe"),
        ": the name of a column is not",
    ),
    "name of a Parquet column that is not UTF-8": _refused(
        "r.parquet", lambda: parquet([{"text": "a"}]).replace(b"text", b"te\xff\xfe"), ": the name of a column is not"
    ),
    "broken UTF-8 in Arrow": _faulty("r.arrow", lambda: arrow(_bad_text(), True), 2, 2, "not UTF-8 (byte 1)"),
    "broken UTF-8 in Parquet": _faulty("r.parquet", lambda: parquet(_bad_text()), 2, 2, "not UTF-8 (byte 1)"),
    "two Arrow columns of a name": _refused(
        "r.arrow", lambda: arrow(pa.table([["x"], ["y"]], names=["a", "a"]), False), ": two columns are named 'a'"
    ),
    "truncated gzip": _refused("r.jsonl.gz", gzip.compress(GOOD)[:-5], BAD_COMPRESSION),
    "not gzip": _refused("r.jsonl.gz", GOOD, BAD_COMPRESSION),
    "not zstd": _refused("r.csv.zst", GOOD, BAD_COMPRESSION),
    "truncated gzip of Parquet": _refused(
        "r.parquet.gz", lambda: gzip.compress(parquet([{"a": "b"}]))[:-9], BAD_COMPRESSION
    ),
}


def _repeated(megabytes: int, rows: int, is_dictionary: bool) -> bytes:
    """A Parquet file of some kilobytes, in which every row has the same long text."""
    texts: Any = pa.array(["b" * (megabytes << 20)], pa.large_string())
    indices = pa.array([0] * rows, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, texts) if is_dictionary else texts.take(indices)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, dictionary_pagesize_limit=1 << 30)
    assert sink.tell() < 1 << 20
    return sink.getvalue().to_pybytes()


def test_a_small_parquet_file_cannot_fill_the_memory(tmp_path, monkeypatch):
    """A file of 500 KB can have rows of 40 GB. A table with dictionaries is decoded in parts."""
    monkeypatch.setattr(arrow_batches, "BATCH_BYTES", 16 << 20)
    monkeypatch.setattr(arrow_batches, "DECODED_BYTES", 4 << 20)
    plain, parts = tmp_path / "rows.parquet", tmp_path / "parts.parquet"
    plain.write_bytes(_repeated(2, 48, is_dictionary=False))
    parts.write_bytes(_repeated(1, 40, is_dictionary=True))
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # As the stage does; another pool may have reserved addresses before.
    try:
        with pytest.raises(UserError, match="rows.parquet: one batch of its rows needs more than"):
            rows_of(plain)
        assert [len(block.payload) < 3 << 20 for block in blocks_of(lock_of(source(parts)))] == [True] * 40
    finally:
        pa.set_memory_pool(pool)


BLANK = gzip.compress(b"\n" * (1 << 20))
"""A MiB of line ends in a KiB; gzip files may follow each other."""
BOMBS = {
    "rows.jsonl.gz": BLANK * 4000,
    "rows.json.gz": gzip.compress(b"[") + gzip.compress(b" " * (1 << 20)) * 4000,
    "rows.csv.gz": gzip.compress(b"text\n") + BLANK * 4000,
    "rows.txt.gz": BLANK * 4000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_four_gigabytes_of_blank_lines_end_in_a_line(tmp_path, name):
    """A limit of rows that nothing reaches: hours for a file of a few megabytes."""
    (tmp_path / name).write_bytes(BOMBS[name])
    with pytest.raises(UserError, match=rf"{name}: has more than 8 MiB of blank lines in a row; remove them"):
        blocks_of(lock_of(source(tmp_path / name)))


def test_a_file_that_decompresses_without_end_is_refused(tmp_path, monkeypatch):
    """A terabyte of equal rows in a few megabytes."""
    monkeypatch.setattr(source_blocks, "MOST_UNPACKED_BYTES", 1 << 20)
    (tmp_path / "rows.jsonl.zst").write_bytes(zstd((GOOD + b"\n") * 200_000))
    (tmp_path / "few.jsonl.zst").write_bytes(zstd((GOOD + b"\n") * 50_000))
    with pytest.raises(UserError, match=r"rows.jsonl.zst: has more than \d+ bytes, 500 times as many as compressed"):
        blocks_of(lock_of(source(tmp_path / "rows.jsonl.zst")))
    assert len(rows_of(tmp_path / "few.jsonl.zst")) == 50_000


MALFORMED = LINES | ARRAYS | TABLES | BINARIES


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_gives_rows_and_faults_or_a_refusal(tmp_path, case):
    content = case.content() if callable(case.content) else case.content
    path = tmp_path / case.file
    path.write_bytes(content)
    for block_bytes in (1 << 20, max(7, len(content) // 1000)):
        if case.error:
            with pytest.raises(UserError) as refusal:
                rows_of(path, block_bytes=block_bytes)
            assert str(refusal.value).startswith(f"{path}{case.error}")
            assert "\n" not in str(refusal.value)
            continue
        rows = rows_of(path, block_bytes=block_bytes)
        found = {row.line: row.fault for row in rows if row.fault is not None}
        assert found.keys() == case.faults.keys()
        for line, fault in case.faults.items():
            assert found[line].startswith(fault) and "\n" not in found[line]
        assert len([row for row in rows if row.value is not None]) == case.good == len(rows) - len(case.faults)
        numbers = [row.number for row in rows]
        assert numbers == sorted(set(numbers))
