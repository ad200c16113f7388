"""A corpus of malformed files: their content, good rows, and faults."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from lean_finetune.data.read.row_block import MAX_ROW_BYTES

GOOD = b'{"text": "good"}'
ARRAY_RULE = "the file must be one array of JSON objects"


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
    """Start of the refusal behind the file's name, for a file that cannot be read."""

    def bytes(self) -> bytes:
        return self.content() if callable(self.content) else self.content


def _line(row: bytes, fault: str) -> Malformed:
    """A bad row between two good ones."""
    return Malformed(file="rows.jsonl", content=b"\n".join([GOOD, row, GOOD, b""]), good=2, faults={2: fault})


def _fine(content: bytes, good: int, file: str = "rows.jsonl") -> Malformed:
    """Unusual but valid."""
    return Malformed(file=file, content=content, good=good)


def _array(content: bytes, error: str) -> Malformed:
    return Malformed(file="rows.json", content=content, error=error)


def _whole(file: str, content: bytes | Callable[[], bytes], error: str, good: int = 0) -> Malformed:
    return Malformed(file=file, content=content, error=error, good=good)


def parquet(rows: list[dict] | pa.Table) -> bytes:
    table = pa.Table.from_pylist(rows) if isinstance(rows, list) else rows
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def arrow(table: pa.Table, is_file: bool) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def _bad_text() -> pa.Table:
    """A column of text whose second cell is not UTF-8."""
    offsets = pa.py_buffer(b"".join(k.to_bytes(4, "little") for k in (0, 2, 4, 6)))
    return pa.table({"text": pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"ok\xff\xfeok"))})


def _array_with(row: bytes, fault: str, line: int = 2) -> Malformed:
    content = b"[" + GOOD + b",\n" + row + b",\n" + GOOD + b"]"
    return Malformed(file="rows.json", content=content, good=2, faults={line: fault})


def _table(file: str, content: bytes, good: int, line: int, fault: str) -> Malformed:
    return Malformed(file=file, content=content, good=good, faults={line: fault})


def _long_line() -> bytes:
    return GOOD + b'\n{"text": "' + b"x" * (MAX_ROW_BYTES + 1) + b'"}\n' + GOOD + b"\n"


LINES = {
    "cut row": _line(b'{"text": "a"', "not JSON (Expecting ',' delimiter at column 13)"),
    "open string": _line(b'{"text": "a', "not JSON (Unterminated string"),
    "no quotes": _line(b"{text: 1}", "not JSON (Expecting property name"),
    "single quotes": _line(b"{'text': 'a'}", "not JSON (Expecting property name"),
    "trailing comma": _line(b'{"text": "a",}', "not JSON (Expecting property name"),
    "two objects": _line(GOOD + GOOD, "not JSON (Extra data at column 17)"),
    "comma behind": _line(GOOD + b",", "not JSON (Extra data"),
    "plain words": _line(b"hello there", "not JSON (Expecting value at column 1)"),
    "comment": _line(b"// a comment", "not JSON"),
    "array": _line(b"[1]", "a row must be a JSON object, got an array"),
    "string": _line(b'"a"', "a row must be a JSON object, got a string"),
    "number": _line(b"1", "a row must be a JSON object, got a number"),
    "not a number": _line(b"NaN", "a row must be a JSON object, got a number"),
    "boolean": _line(b"true", "a row must be a JSON object, got a boolean"),
    "null": _line(b"null", "a row must be a JSON object, got null"),
    "broken UTF-8": _line(b'{"text": "\xff"}', "not UTF-8 (byte 11)"),
    "cut UTF-8": _line(b'{"text": "\xe4\xb8"}', "not UTF-8 (byte 11)"),
    "Latin-1": _line('{"text": "naïve"}'.encode("latin-1"), "not UTF-8 (byte 13)"),
    "encoded surrogate": _line(b'{"text": "\xed\xa0\x80"}', "not UTF-8 (byte 11)"),
    "overlong UTF-8": _line(b'{"text": "\xc0\xaf"}', "not UTF-8 (byte 11)"),
    "raw NUL": _line(b'{"text": "a\0b"}', "not JSON (Invalid control character"),
    "only NULs": _line(b"\0" * 9, "not JSON"),
    "raw tab": _line(b'{"text": "a\tb"}', "not JSON (Invalid control character"),
    "bad escape": _line(b'{"text": "\\x41"}', "not JSON (Invalid \\escape"),
    "duplicate key": _line(b'{"text": "a", "text": "b"}', "the key 'text' comes twice in one object"),
    "spaced duplicate key": _line(b'{"text" : "a", "text": "b"}', "the key 'text' comes twice in one object"),
    "hidden duplicate key": _line(b'{"text" : "\\":", "text" : "b"}', "the key 'text' comes twice in one object"),
    "escaped duplicate key": _line(b'{"text": "a", "te\\u0078t": "b"}', "the key 'text' comes twice in one object"),
    "inner duplicate key": _line(b'{"a": [[{"b": 1, "b": 2}]]}', "the key 'b' comes twice in one object"),
    "too many digits": _line(b'{"a": ' + b"9" * 5000 + b"}", "has an integer of more than 4300 digits"),
    "too deep": _line(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "JSON nested too deep"),
    "BOM inside": _line(b"\xef\xbb\xbf" + GOOD, "not JSON (Expecting value at column 1)"),
    "no-break spaces": _line("\u00a0\u00a0".encode(), "not JSON"),
    "line of 64 MiB": Malformed(
        file="rows.jsonl", content=_long_line, good=2, faults={2: "the row is longer than 64 MiB; shorten or remove it"}
    ),
    "pretty-printed object": _fine(b'{\n "text": "a",\n "data": []\n}\n', 1, "rows.json"),
    "pretty-printed objects": _fine(b'{\n "text": "}{"\n}\n\n{\n "text": "b"\n}{"text": "c"}\n', 3, "rows.jsonl"),
    "text between objects": _whole(
        "rows.json", b'{\n "text": "a"\n},\n{\n "text": "b"\n}\n', ":3: not JSON (unexpected ',' between rows)", good=1
    ),
    "pretty-printed object cut short": _whole("rows.json", b'{\n "text": "a"\n', ":1: not JSON (the file ends inside"),
    "rows inside an object": _fine(b'{"data": [\n {"text": "a"},\n {"text": "b"}\n]}\n', 2, "rows.json"),
    "rows inside an object behind others": _fine(
        b'{"version": "v\\"2", "n": 1.5e3, "ok": null,\n"data":\n[{"text": "a"}], "end": true}', 1, "rows.json"
    ),
    "two lists inside an object": _whole(
        "rows.json",
        b'{"train": [{"text": "a"}],\n"test": [{"text": "b"}]}',
        ":1: the object holds 'test' beside",
    ),
    "an object of rows that is not closed": _whole(
        "rows.json", b'{"data": [{"text": "a"}]\n', ":1: not JSON (the object that"
    ),
    "lines of objects with such a key": _fine(b'{"data": [{"text": "a"}]}\n{"data": [{"text": "b"}]}\n', 2),
    "a first line that is cut off": Malformed(
        file="rows.jsonl", content=b'{"text": ["a",\n' + GOOD + b"\n", good=1, faults={1: "not JSON"}
    ),
    "a table with semicolons": _whole("rows.csv", b"prompt;completion\nQ;A\n", ":1: the header is one column"),
    "old Mac line ends": Malformed(file="rows.jsonl", content=GOOD + b"\r" + GOOD, faults={1: "not JSON (Extra"}),
    "BOM": _fine(b"\xef\xbb\xbf" + GOOD + b"\n", 1),
    "CRLF and blank lines": _fine(GOOD + b"\r\n\r\n  \r\n" + GOOD, 2),
    "escaped NUL": _fine(b'{"text": "a\\u0000b"}\n', 1),
    "lone surrogate": _fine(b'{"text": "\\ud800"}\n', 1),
    "surrogate pair": _fine(b'{"text": "\\ud83d\\ude00"}\n', 1),
    "half-open number": _fine(b'{"text": "a", "score": NaN, "high": -Infinity}\n', 1),
    "nested nulls": _fine(b'{"messages": [null, {"role": null}]}\n', 1),
    "right to left": _fine('{"text": "\u202eשלום مرحبا"}\n'.encode(), 1),
    "one long word": _fine(b'{"text": "' + b"a" * 1_000_000 + b'"}\n', 1),
    "only white space": _fine(b" \n\t\n\r\n", 0),
    "mixed schemas": _fine(b'{"text": "a"}\n{"prompt": 1}\n{}\n', 3),
}
ARRAYS = {
    "value in an array": _array_with(b"7", "a row must be a JSON object, got a number"),
    "string in an array": _array_with(b'"a]}{[,b"', "a row must be a JSON object, got a string"),
    "list in an array": _array_with(b"[1]", "a row must be a JSON object, got an array"),
    "word in an array": _array_with(b"nothing", "not JSON (Expecting value"),
    "bad row in an array": _array_with(b'{"text":\n\nb}', "not JSON (Expecting value at column 1)", line=4),
    "broken UTF-8 in an array": _array_with(b'{"text":\n"\xff"}', "not UTF-8 (byte 11)", line=3),
    "duplicate key in an array": _array_with(b'{"a": 1, "a": 2}', "the key 'a' comes twice"),
    "missing comma": _array(b"[" + GOOD + b"\n" + GOOD + b"]", ":2: not JSON (expecting ',' or ']'"),
    "missing comma after a value": _array(b"[1 " + GOOD + b"]", ":1: not JSON (expecting ',' or ']'"),
    "trailing comma in an array": _array(b"[" + GOOD + b",\n]", ":2: not JSON (unexpected ']')"),
    "two commas": _array(b"[" + GOOD + b",\n,", ":2: not JSON (unexpected ',')"),
    "open array": _array(b"[" + GOOD + b",\n" + GOOD + b"\n", ":3: not JSON (expecting ',' or ']'"),
    "open row in an array": _array(b"[\n" + GOOD + b',\n{"a": ', ":3: not JSON (the file ends inside the"),
    "open string in an array": _array(b'[\n{"a": "b}]', ":2: not JSON (the file ends inside a string"),
    "wrong closer": _array(b'[{"a": [1}]', ":1: not JSON (unexpected '}')"),
    "two arrays": _array(b"[" + GOOD + b"]\n[" + GOOD + b"]", ":2: not JSON (text after the array's end)"),
    "only a bracket": _array(b"[", ":1: not JSON (the file ends inside the array)"),
    "empty array": _fine(b"[ \n]\n", 0, "rows.json"),
}
TABLES = {
    "too few cells": Malformed(
        file="r.csv", content=b"a,b\n1,2\n1\n3,4\n", good=2, faults={3: "a row must have 2 cells"}
    ),
    "too many cells": Malformed(
        file="r.tsv", content=b"a\tb\n1\t2\t3\n", faults={2: "a row must have 2 cells as the head"}
    ),
    "text behind a quote": Malformed(
        file="r.csv", content=b'a,b\n"1"x,2\n3,4\n', good=1, faults={2: "not a row of the t"}
    ),
    "NUL in a cell": Malformed(
        file="r.csv", content=b"a,b\n1,\0\n3,4\n", good=1, faults={2: "not UTF-8 text, or it ha"}
    ),
    "broken UTF-8 in a cell": _table("r.csv", b"a,b\n1,\xff\n", 0, 2, "not UTF-8 text"),
    "quote never closed": _whole("r.csv", b'a,b\n1,2\n"3,4\n5,6\n', ":3: the file ends inside a quoted cell"),
    "two columns of a name": _whole("r.csv", b"a,a\n1,2\n", ":1: the first line must name the columns, each once"),
    "column without a name": _whole("r.csv", b"a,\n1,2\n", ":1: the first line must name the columns, each once"),
    "header that is not text": _whole("r.csv", b"\xff\n1\n", ":1: the first line must name the columns"),
    "table of blank lines": _whole("r.csv", b"\n\n", ":1: the first line must name the columns, each once"),
    "quoted line breaks": _fine(b'a,b\r\n"1\r\n2",3\r\n\r\n4,5\r\n', 2, "rows.csv"),
    "BOM of a table": _fine(b"\xef\xbb\xbfa\n1\n", 1, "rows.csv"),
    "broken UTF-8 in text": _table("r.txt", b"good\n\xff\n", 1, 2, "not UTF-8 (byte 1)"),
    "binary as text": _table("r.txt", b"good\n\0\1\n", 1, 2, "has a NUL byte"),
    "UTF-16 text": _whole("r.txt", "good\n".encode("utf-16"), ": is UTF-16 text; save it as UTF-8"),
    "UTF-16 lines": _whole("r.jsonl", '{"text": "a"}\n'.encode("utf-16"), ": is UTF-16 text; save it as UTF-8"),
}
BINARIES = {
    "no Parquet at all": _whole("r.parquet", b"PAR1", ": is damaged or no Parquet file ("),
    "text named Parquet": _whole("r.parquet", GOOD * 9, ": is damaged or no Parquet file ("),
    "cut Parquet": _whole("r.parquet", lambda: parquet([{"a": "b"}])[:-20], ": is damaged or no Parquet file ("),
    "no Arrow at all": _whole("r.arrow", b"ARROW1 and so on", ": is damaged or no Arrow file ("),
    "cut Arrow file": _whole("r.arrow", lambda: arrow(_bad_text(), True)[:-30], ": is damaged or no Arrow file ("),
    "cut Arrow stream": _whole("r.arrow", lambda: arrow(_bad_text(), False)[:-40], ": is damaged or no Arrow file ("),
    "broken UTF-8 in Arrow": Malformed(
        file="r.arrow", content=lambda: arrow(_bad_text(), True), good=2, faults={2: "not UTF-8 (byte 1)"}
    ),
    "broken UTF-8 in Parquet": Malformed(
        file="r.parquet", content=lambda: parquet(_bad_text()), good=2, faults={2: "not UTF-8 (byte 1)"}
    ),
    "two Arrow columns of a name": _whole(
        "r.arrow",
        lambda: arrow(pa.table([["x"], ["y"]], names=["a", "a"]), False),
        ": two columns are named 'a'; rename one",
    ),
    "cut gzip": _whole("r.jsonl.gz", gzip.compress(GOOD)[:-5], ": the compressed data is damaged or truncated ("),
    "not gzip": _whole("r.jsonl.gz", GOOD, ": the compressed data is damaged or truncated ("),
    "text behind gzip": _whole("r.json.gz", gzip.compress(GOOD) + b"more", ": the compressed data is damaged or"),
    "cut zstd": _whole("r.jsonl.zst", lambda: zstd(GOOD)[:-3], ": the compressed data is damaged or truncated ("),
    "not zstd": _whole("r.csv.zst", GOOD, ": the compressed data is damaged or truncated ("),
    "cut gzip of Parquet": _whole(
        "r.parquet.gz", lambda: gzip.compress(parquet([{"a": "b"}]))[:-9], ": the compressed data is damaged or"
    ),
}
MALFORMED = LINES | ARRAYS | TABLES | BINARIES
assert json.loads(GOOD) == {"text": "good"} and len(MALFORMED) == len(LINES) + len(ARRAYS) + len(TABLES) + len(BINARIES)
