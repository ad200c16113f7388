"""Parsing of rows: orjson's result equals the standard library's for every row."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.row_block import RowBlock, to_payload

TEXT = st.text(st.sampled_from('a":, \t\\{}[]é\ud83d0123456789'), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


def lines(*rows: bytes) -> RowBlock:
    return RowBlock(kind="lines", payload=b"\n".join(rows) + b"\n", first_row=7)


@given(row=st.dictionaries(TEXT, JSON), ascii_only=st.booleans(), separators=st.sampled_from([None, (" ,", "\t: ")]))
@settings(max_examples=100, deadline=None)
def test_a_row_is_what_the_standard_library_reads(row, ascii_only, separators):
    """Orjson differs on integers past 64 bits, NaN, lone surrogates and unusual white space."""
    text = json.dumps(row, ensure_ascii=ascii_only, separators=separators)
    content = text.encode("utf-8", "replace")
    [found] = decode(lines(content))
    assert found.fault is None
    assert repr(found.value) == repr(json.loads(content))


PAIRS = st.lists(st.tuples(st.sampled_from(["a", "b", 'c":', "d: "]), st.integers(0, 9)), min_size=1, max_size=4)


@given(pairs=PAIRS, inner=PAIRS, space=st.sampled_from(["", " ", "\t"]))
@settings(max_examples=100, deadline=None)
def test_a_key_that_comes_twice_is_always_found(pairs, inner, space):
    """Whichever value were used, the other would be silently lost."""

    def write(pairs, more=""):
        written = [f"{json.dumps(key)}{space}:{value}" for key, value in pairs]
        return "{" + ",".join([*written, *([more] if more else [])]) + "}"

    row = write(pairs, f'"z":[{write(inner)}]')
    [found] = decode(lines(row.encode()))
    is_double = any(len(dict(some)) < len(some) for some in (pairs, inner))
    assert (found.fault is not None and "comes twice in one object" in found.fault) == is_double


def test_lines_are_numbered_with_the_empty_ones_between_them():
    found = [(row.number, row.line, row.value) for row in decode(lines(b'{"a": 1}', b"", b" \r", b'{"a": 2}\r'))]
    assert found == [(7, 8, {"a": 1}), (10, 11, {"a": 2})]


DOUBLED = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([1, 2])], names=["a", "a"])
UNREADABLE = {
    "a time beyond the years": (pa.array([0, 2**62]).cast(pa.timestamp("us")), [None, "out of range"]),
    "a day beyond the years": (pa.array([0, 2**30], pa.int32()).cast(pa.date32()), [None, "days=1073741824"]),
    "an unknown time zone": (pa.array([None, 1]).cast(pa.timestamp("us", "Mars/Base")), [None, "("]),
    "a name twice in a struct": (DOUBLED, ["duplicate field names", "duplicate field names"]),
}


@pytest.mark.parametrize("column, faults", UNREADABLE.values(), ids=UNREADABLE)
def test_a_value_that_arrow_cannot_give_is_the_fault_of_its_row(column, faults):
    batch = pa.record_batch({"text": pa.array(["one", "two"]), "when": column})
    block = RowBlock(kind="arrow", payload=to_payload(batch), first_row=5)
    for place, (row, expected) in enumerate(zip(decode(block), faults, strict=True)):
        assert row.line == 6 + place
        if expected is None:
            assert row.fault is None and row.value is not None and row.value["text"] == "one"
        else:
            assert row.value is None and row.fault is not None
            assert row.fault.startswith("'when' has an unreadable value") and expected in row.fault
