"""A block as rows, each with its line or with what is wrong with it. Runs in the workers: imports nothing heavy."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_block import Block, RawRow

NOT_UTF8 = "not UTF-8 (byte {}); save the file as UTF-8"
NOT_JSON = "not JSON ({}); a row must be one JSON object a line, or an element of one array"
NO_VALUE = "{!r} holds what is no value ({}); mend it, or leave that column out of the file"
LONG_NUMBER = f"holds an integer of more than {sys.get_int_max_str_digits()} digits; write it as text"
TOO_DEEP = "JSON nested too deep; make the row flatter"
# Any integer of 18 digits fits 64 bits; orjson reads one that does not as the nearest float, without a word.
EXACT_DIGITS = 18
_MAYBE_LARGE = b"0" * (EXACT_DIGITS + 1)
_SPACED_COLON = b" :"
# One pass makes every digit a 0 and every white space a blank, so that two searches find either.
_COARSE = bytes.maketrans(b"123456789\t\r\n", b"000000000   ")

# What Arrow raises for text that is not UTF-8, a time beyond Python's years, an unknown time zone, a struct with two
# fields of one name.
_UNREADABLE = (ValueError, OverflowError, pa.ArrowException)

Decoded = tuple[dict[str, Any] | None, str | None, int]
"""(value, fault, lines below the row's first at which the fault is)."""


def decode(block: Block) -> Iterator[RawRow]:
    """Yield every row of a block in order of its number; blank lines are no rows.

    Raises:
        UserError: the payload of an Arrow block is no record batch, which only a fault of memory can cause.
    """
    rows = _DECODERS[block.kind](block)
    if not block.faults:
        yield from rows
        return
    # Only blocks whose rows are numbered one by one hold both rows and faults.
    faults = {number: RawRow(number, line, None, fault) for number, line, fault in block.faults}
    number = block.first_row
    for row in rows:
        while number in faults:
            yield faults.pop(number)
            number += 1
        yield row._replace(number=number)
        number += 1
    yield from faults.values()


def _decode_lines(block: Block) -> Iterator[RawRow]:
    """JSON Lines."""
    parse = _parser(block.payload)
    for number, line in enumerate(block.payload.split(b"\n"), start=block.first_row):
        if line and not line.isspace():
            value, fault, _ = parse(line)
            yield RawRow(number, number + 1, value, fault)


def _decode_values(block: Block) -> Iterator[RawRow]:
    """Elements of a JSON array."""
    parse = _parser(block.payload)
    start = 0
    for k, end in enumerate(block.ends):
        value, fault, below = parse(block.payload[start:end])
        yield RawRow(block.first_row + k, block.lines[k] + below, value, fault)
        start = end


def _decode_text(block: Block) -> Iterator[RawRow]:
    """Plain text: a line is a row."""
    for number, line in enumerate(block.payload.split(b"\n"), start=block.first_row):
        if not line or line.isspace():
            continue
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            yield RawRow(number, number + 1, None, NOT_UTF8.format(error.start + 1))
            continue
        fault = "holds a NUL byte, which no text does; is the file text?" if "\0" in text else None
        yield RawRow(number, number + 1, None if fault else {"text": text}, fault)


def _decode_arrow(block: Block) -> Iterator[RawRow]:
    """A record batch."""
    try:
        batch = pa.ipc.open_stream(block.payload).read_next_batch()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"block {block.number}: is no record batch ({error}); check this machine's memory") from error
    lines = block.lines or range(block.first_row + 1, block.first_row + 1 + batch.num_rows)
    try:
        values = batch.to_pylist()
        faults: list[str | None] = [None] * len(values)
    except _UNREADABLE:
        values, faults = _row_by_row(batch)
    for k, (value, fault) in enumerate(zip(values, faults, strict=True)):
        yield RawRow(block.first_row + k, lines[k], value, fault)


def _row_by_row(batch: pa.RecordBatch) -> tuple[list[Any], list[str | None]]:
    """The rows of a batch in which something cannot be read, and what is wrong with each."""
    values: list[Any] = []
    faults: list[str | None] = []
    for k in range(batch.num_rows):
        row: dict[str, Any] = {}
        fault = None
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                row[name] = column.slice(k, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                fault = fault or NOT_UTF8.format(error.start + 1)
            except _UNREADABLE as error:
                fault = fault or NO_VALUE.format(name, error)
        values.append(None if fault else row)
        faults.append(fault)
    return values, faults


_DECODERS: dict[str, Callable[[Block], Iterator[RawRow]]] = {
    "lines": _decode_lines,
    "values": _decode_values,
    "text": _decode_text,
    "arrow": _decode_arrow,
}


def _parser(payload: bytes) -> Callable[[bytes], Decoded]:
    """What parses the rows of this payload: the fast way where it gives what the exact way gives.

    The fast parser keeps the last of several equal keys and rounds large integers, both in silence. Looking for what
    may be either costs little per payload; rows that hold such a thing are parsed the exact way.
    """
    coarse = payload.translate(_COARSE)
    is_odd = _MAYBE_LARGE in coarse or _SPACED_COLON in coarse

    def parse(row: bytes) -> Decoded:
        try:
            value = orjson.loads(row)
        except orjson.JSONDecodeError:
            return _parse_exactly(row)
        if type(value) is not dict:
            return None, f"a row must be a JSON object, got {_kind(value)}; make it one", 0
        if row.count(b'":') != _count_keys(value) or (is_odd and _is_odd(row)):
            return _parse_exactly(row)
        return value, None, 0

    return parse


def _is_odd(row: bytes) -> bool:
    """Whether keys cannot be counted by their colons, or an integer may be too large for the fast parser."""
    coarse = row.translate(_COARSE)
    return _MAYBE_LARGE in coarse or _SPACED_COLON in coarse


def _count_keys(value: dict[str, Any]) -> int:
    """Keys of an object and of all objects in it."""
    keys = len(value)
    for inner in value.values():
        if type(inner) is dict:
            keys += _count_keys(inner)
        elif type(inner) is list:
            keys += _count_keys_in(inner)
    return keys


def _count_keys_in(values: list[Any]) -> int:
    """Keys of all objects in an array."""
    keys = 0
    for inner in values:
        if type(inner) is dict:
            keys += _count_keys(inner)
        elif type(inner) is list:
            keys += _count_keys_in(inner)
    return keys


class _DuplicateKey(ValueError):
    """An object names a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs.

    Raises:
        _DuplicateKey: a key comes twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for k, key in enumerate(keys) if key in keys[:k]))
    return value


_EXACT = json.JSONDecoder(object_pairs_hook=_unique)


def _parse_exactly(row: bytes) -> Decoded:
    """As the standard library reads it: NaN, lone surrogates and integers of any size are taken as they are."""
    try:
        value = _EXACT.decode(row.decode("utf-8"))
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
    if not isinstance(value, dict):
        return None, f"a row must be a JSON object, got {_kind(value)}; make it one", 0
    return value, None, 0


def _kind(value: Any) -> str:
    """JSON's name for a Python value's type."""
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
