"""Parsing of a block into rows, each with its line and value or fault. Runs in the workers, so imports stay light."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import orjson
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_block import MAX_DEPTH, RawRow, RowBlock, from_payload

NOT_UTF8 = "not UTF-8 (byte {}); save the file as UTF-8"
NOT_JSON = "not JSON ({}); a row must be one JSON object a line, or an element of one array"
NO_VALUE = "{!r} has an unreadable value ({}); correct it, or leave that column out of the file"
LONG_NUMBER = f"has an integer of more than {sys.get_int_max_str_digits()} digits; write it as text"
TOO_DEEP = f"JSON nested too deep; make the row flatter than {MAX_DEPTH} levels"
# Any integer of 18 digits fits 64 bits. orjson silently reads a larger one as the nearest float.
EXACT_DIGITS = 18
_MAYBE_LARGE = b"0" * (EXACT_DIGITS + 1)
_SPACED_COLON = b" :"
# Maps every digit to 0 and white space to a blank, so that two searches find both cases.
_SIMPLIFY = bytes.maketrans(b"123456789\t\r\n", b"000000000   ")

# Arrow raises these for text that is not UTF-8, a time outside Python's range, an unknown time zone (with pytz a
# KeyError), and a struct with two fields of one name.
_UNREADABLE = (ValueError, OverflowError, KeyError, pa.ArrowException)

_LISTS = (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray, pa.ListViewArray, pa.LargeListViewArray)

Parsed = tuple[dict[str, Any] | None, str | None, int]
"""(value, fault, line of the fault counted from the row's first)."""


def decode(block: RowBlock) -> Iterator[RawRow]:
    """Yield the rows of a block in order, up to its limit. Blank lines are not rows.

    Raises UserError if the payload of an Arrow block is damaged, which only faulty memory can cause.
    """
    rows = _DECODERS[block.kind](block)
    return islice(_with_faults(block, rows) if block.faults else rows, block.limit)


def _with_faults(block: RowBlock, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    """The rows and the block's faults, numbered one by one."""
    faults = {number: RawRow(number, line, None, fault) for number, line, fault in block.faults}
    number = block.first_row
    for row in rows:
        while number in faults:
            yield faults.pop(number)
            number += 1
        yield row._replace(number=number)
        number += 1
    yield from faults.values()


def _filled_lines(block: RowBlock) -> Iterator[tuple[int, bytes]]:
    """(number, line) of each line that is not blank."""
    lines = enumerate(block.payload.split(b"\n"), start=block.first_row)
    return ((number, line) for number, line in lines if line and not line.isspace())


def _decode_lines(block: RowBlock) -> Iterator[RawRow]:
    """See `RowBlock.kind`."""
    for number, line in _filled_lines(block):
        value, fault, _ = parse_line(line)
        yield RawRow(number, number + 1, value, fault)


def _decode_values(block: RowBlock) -> Iterator[RawRow]:
    start = 0
    for k, end in enumerate(block.ends):
        value, fault, below = parse_line(block.payload[start:end])
        yield RawRow(block.first_row + k, block.lines[k] + below, value, fault)
        start = end


def _decode_text(block: RowBlock) -> Iterator[RawRow]:
    for number, line in _filled_lines(block):
        value, fault = None, None
        try:
            value = {"text": line.removesuffix(b"\r").decode("utf-8")}
        except UnicodeDecodeError as error:
            fault = NOT_UTF8.format(error.start + 1)
        if b"\0" in line and value:
            value, fault = None, "has a NUL byte; is the file text?"
        yield RawRow(number, number + 1, value, fault)


def _decode_arrow(block: RowBlock) -> Iterator[RawRow]:
    try:
        batch = from_payload(block.payload)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"block {block.number}: is not a record batch ({error}); check this machine's memory"
        ) from error
    lines = block.lines or range(block.first_row + 1, block.first_row + 1 + batch.num_rows)
    try:
        rows: list[tuple[Any, str | None]] = [(value, None) for value in batch.to_pylist()]
    except _UNREADABLE:
        rows = [_read_row(batch, k) for k in range(batch.num_rows)]
    padded = [name for name, column in zip(batch.schema.names, batch.columns, strict=True) if _has_padding(column)]
    for k, (value, fault) in enumerate(rows):
        if value is not None:
            value |= {name: _without_padding(value[name]) for name in padded}
        yield RawRow(block.first_row + k, lines[k], value, fault)


def _has_padding(array: pa.Array) -> bool:
    """Whether a field of a struct inside the array is null anywhere.

    Arrow gives every struct all fields, null where the writer's object had none.
    """
    if isinstance(array, pa.StructArray):
        return any(field.null_count or _has_padding(field) for field in array.flatten())
    return isinstance(array, _LISTS) and _has_padding(array.values)


def _without_padding(value: Any) -> Any:
    """A value without the null fields of its structs, so that a row gives the same tokens in every file format."""
    if isinstance(value, dict):
        return {key: _without_padding(item) for key, item in value.items() if item is not None}
    return [_without_padding(item) for item in value] if isinstance(value, list) else value


def _read_row(batch: pa.RecordBatch, k: int) -> tuple[dict[str, Any] | None, str | None]:
    """(value, fault) of a row of a batch with an unreadable value somewhere."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column.slice(k, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            return None, NOT_UTF8.format(error.start + 1)
        except _UNREADABLE as error:
            return None, NO_VALUE.format(name, error)
    return row, None


_DECODERS: dict[str, Callable[[RowBlock], Iterator[RawRow]]] = {
    "lines": _decode_lines,
    "values": _decode_values,
    "text": _decode_text,
    "arrow": _decode_arrow,
}


def parse_line(row: bytes) -> Parsed:
    """A row, parsed by orjson where it is exact, else by the standard library.

    orjson silently keeps the last of several equal keys and rounds large integers. Rows that may have either are found
    by cheap searches and parsed by the standard library.
    """
    try:
        value = orjson.loads(row)
        if type(value) is dict and (row.count(b'":') != _count_keys(value) or _may_be_inexact(row)):
            return _parse_exactly(row)
    except orjson.JSONDecodeError:
        return _parse_exactly(row)
    except RecursionError:
        return None, TOO_DEEP, 0
    return _object(value)


def _object(value: Any) -> Parsed:
    if type(value) is dict:
        return value, None, 0
    return None, f"a row must be a JSON object, got {_kind(value)}; make it one", 0


def _may_be_inexact(content: bytes) -> bool:
    """Whether an integer may exceed 64 bits, or a space before a colon prevents counting keys by `":`."""
    simplified = content.translate(_SIMPLIFY)
    return _MAYBE_LARGE in simplified or _SPACED_COLON in simplified


def _count_keys(value: dict[str, Any] | list[Any], room: int = MAX_DEPTH) -> int:
    """Keys of all objects in a JSON value. Raises RecursionError if it is nested deeper than `room`."""
    if not room:
        raise RecursionError
    is_object = type(value) is dict
    keys = len(value) if is_object else 0
    for inner in value.values() if is_object else value:  # type: ignore[union-attr]
        if type(inner) is dict or type(inner) is list:
            keys += _count_keys(inner, room - 1)
    return keys


class _DuplicateKey(ValueError):
    """A key comes twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for k, key in enumerate(keys) if key in keys[:k]))
    return value


_EXACT = json.JSONDecoder(object_pairs_hook=_unique)


def _parse_exactly(row: bytes) -> Parsed:
    """The standard library's reading: it accepts NaN, lone surrogates and integers of any size."""
    try:
        value = _EXACT.decode(row.decode("utf-8"))
        if type(value) is dict:
            _count_keys(value)  # Refuses deep nesting.
    except UnicodeDecodeError as error:
        return None, NOT_UTF8.format(error.start + 1), row.count(b"\n", 0, error.start)
    except json.JSONDecodeError as error:
        return None, NOT_JSON.format(f"{error.msg} at column {error.colno}"), error.lineno - 1
    except _DuplicateKey as error:
        return None, f"the key {str(error)!r} comes twice in one object; remove one", 0
    except ValueError:
        return None, LONG_NUMBER, 0
    except RecursionError:
        return None, TOO_DEEP, 0
    return _object(value)


def _kind(value: Any) -> str:
    """JSON's name for a Python value's type."""
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
