"""CSV and TSV: the csv module's reading of them, shipped as columns of strings."""

import csv
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.arrow_arrays import from_texts
from lean_finetune.data.read.row_range import MAX_ROW_BYTES, Read, Stretch, to_payload

# The csv module holds a cell at four bytes a character: no more than MAX_ROW_BYTES.
MAX_CELL_CHARACTERS = MAX_ROW_BYTES // 4
OTHER_DELIMITERS = (";", "\t", ",", "|")
# Rows that are faults weigh nothing in a block: their number is bounded, so that the memory of a hopeless file is.
MAX_FAULTS = 4096
# What no text holds: NUL, and what bytes that are not UTF-8 become.
_NOT_TEXT = re.compile("[\0\udc80-\udcff]")


class _Lines:
    """Lines of a file as text, their ends kept."""

    def __init__(self, read: Read, name: str, block_bytes: int):
        self.is_suspect = False
        """Whether anything read so far is not text."""
        self._read, self._name, self._block_bytes = read, name, block_bytes

    def __iter__(self) -> Iterator[str]:
        held: list[bytes] = []
        held_bytes = number = 0
        while chunk := self._read(self._block_bytes):
            end = chunk.rfind(b"\n") + 1
            held.append(chunk[:end] if end else chunk)
            held_bytes += len(held[-1])
            if not end and held_bytes > MAX_ROW_BYTES:
                raise UserError(
                    f"{self._name}:{number + 1}: a line is longer than {MAX_ROW_BYTES >> 20} MiB; "
                    "is it a table with one row a line?"
                )
            if end:
                lines = self._decode(b"".join(held))
                number += len(lines)
                yield from lines
                held, held_bytes = [chunk[end:]], len(chunk) - end
        yield from self._decode(b"".join(held))

    def _decode(self, content: bytes) -> list[str]:
        try:
            text = content.decode("utf-8")
            self.is_suspect |= "\0" in text
        except UnicodeDecodeError:
            text = content.decode("utf-8", "surrogateescape")
            self.is_suspect = True
        # Not splitlines: that would also split at form feeds and the like.
        lines = text.split("\n")
        last = lines.pop()
        return [f"{line}\n" for line in lines] + ([last] if last else [])


def cut_cells(read: Read, name: str, delimiter: str, block_bytes: int) -> Iterator[Stretch]:
    """Rows as string columns named by the header, about `block_bytes` of characters together.

    A row with too few or too many cells, or that is not text, is a fault; blank lines are no rows.

    Raises:
        UserError: there is no usable header, or a quote is never closed.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    lines = _Lines(read, name, block_bytes)
    records = _records(csv.reader(lines, delimiter=delimiter, strict=True), name)
    header = _header(next(records, None), name)
    schema = pa.schema([(column, pa.string()) for column in header])
    rows: list[list[str]] = []
    places: list[int] = []
    faults: list[tuple[int, int, str]] = []
    first_row = held = 0
    for line, record in records:
        fault = record if isinstance(record, str) else _fault(record, header, lines.is_suspect)
        if isinstance(record, str) or fault is not None:
            faults.append((first_row + len(rows) + len(faults), line, str(fault)))
        else:
            rows.append(record)
            places.append(line)
            held += sum(map(len, record))
        if held >= block_bytes or len(faults) >= MAX_FAULTS:
            yield Stretch("arrow", _payload(rows, schema), first_row, lines=tuple(places), faults=tuple(faults))
            first_row += len(rows) + len(faults)
            rows, places, faults, held = [], [], [], 0
    if rows or faults:
        yield Stretch("arrow", _payload(rows, schema), first_row, lines=tuple(places), faults=tuple(faults))


def _payload(rows: list[list[str]], schema: pa.Schema) -> bytes:
    """Rows as an IPC stream of string columns."""
    columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
    return to_payload(pa.record_batch([from_texts(column) for column in columns], schema=schema))


def _records(reader: Any, name: str) -> Iterator[tuple[int, list[str] | str]]:
    """(first line, cells) of each record, or (first line, what is wrong with it)."""
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise UserError(
                    f"{name}:{line}: the file ends inside a quoted cell of the row that starts here; close the quote"
                ) from None
            yield (
                line,
                f"not a row of the table ({error}); quote cells with quotes or line breaks in them",
            )
            continue
        if record is None:
            return
        if record:
            yield line, record


def _header(first: tuple[int, list[str] | str] | None, name: str) -> list[str]:
    """The names of the columns."""
    rule = "the first line must name the columns, each once"
    if first is None:
        raise UserError(f"{name}:1: {rule}; the file has no line")
    line, names = first
    if isinstance(names, str):
        raise UserError(f"{name}:{line}: {rule}; got a line that is {names}")
    other = next((mark for mark in OTHER_DELIMITERS if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        raise UserError(
            f"{name}:{line}: the header is one column, {names[0]!r}: its cells are separated by {other!r}; save the "
            "table with commas as .csv, or with tabs as .tsv"
        )
    if _NOT_TEXT.search("".join(names)):
        raise UserError(f"{name}:{line}: {rule}; got bytes that are not UTF-8 text; save the file as UTF-8")
    unusable = [column for k, column in enumerate(names) if not column.strip() or column in names[:k]]
    if unusable:
        raise UserError(f"{name}:{line}: {rule}; got {unusable[0]!r} in {names}; add or mend the header")
    return names


def _fault(record: list[str], header: list[str], is_suspect: bool) -> str | None:
    """What is wrong with a record."""
    if len(record) != len(header):
        return f"a row must have {len(header)} cells as the header has; got {len(record)}; quote cells that hold commas"
    if is_suspect and any(map(_NOT_TEXT.search, record)):
        return "not UTF-8 text, or it holds a NUL; save the file as UTF-8"
    return None
