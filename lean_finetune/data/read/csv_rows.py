"""CSV and TSV files, parsed by the csv module into columns of text."""

import csv
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.arrow_batches import from_texts
from lean_finetune.data.read.json_values import complete_lines
from lean_finetune.data.read.row_block import MAX_ROW_BYTES, Read, RowBlock, to_payload

# The csv module stores up to four bytes a character: a cell takes at most MAX_ROW_BYTES.
MAX_CELL_CHARACTERS = MAX_ROW_BYTES // 4
OTHER_DELIMITERS = (";", "\t", ",", "|")
# Faulty rows add no bytes to a block, so their number is limited too: memory stays bounded in a file of faults.
MAX_FAULTS = 4096
# NUL, and what bytes that are not UTF-8 are decoded to.
_NOT_TEXT = re.compile("[\0\udc80-\udcff]")


class _TextLines:
    """Iterator over the lines of a file as text, with their line ends."""

    def __init__(self, read: Read, name: str, block_bytes: int):
        self.has_bad_text = False
        """Whether anything so far was not UTF-8, or NUL."""
        self._read, self._name, self._block_bytes = read, name, block_bytes

    def __iter__(self) -> Iterator[str]:
        number = 0
        for content in complete_lines(self._read, self._block_bytes):
            if content is None:
                raise UserError(
                    f"{self._name}:{number + 1}: a line is longer than {MAX_ROW_BYTES >> 20} MiB; "
                    "is it a table with one row a line?"
                )
            try:
                text = content.decode("utf-8")
                self.has_bad_text |= "\0" in text
            except UnicodeDecodeError:
                text = content.decode("utf-8", "surrogateescape")
                self.has_bad_text = True
            # Not splitlines, which also splits at form feeds and other separators.
            for line in text.removesuffix("\n").split("\n"):
                number += 1
                yield f"{line}\n"


def read_table(read: Read, name: str, delimiter: str, block_bytes: int) -> Iterator[RowBlock]:
    """Blocks of text columns named by the header, with about `block_bytes` characters each.

    A row with too few or too many cells, or that is not text, is a fault. Blank lines are not rows. Raises UserError if
    there is no usable header, or a quote is never closed.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    text_lines = _TextLines(read, name, block_bytes)
    records = _records(csv.reader(text_lines, delimiter=delimiter, strict=True), name)
    header = _header(next(records, None), name)
    schema = pa.schema([(column, pa.string()) for column in header])
    rows: list[list[str]] = []
    lines: list[int] = []
    faults: list[tuple[int, int, str]] = []
    first_row = size = 0

    def block() -> RowBlock:
        columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
        payload = to_payload(pa.record_batch([from_texts(column) for column in columns], schema=schema))
        return RowBlock(kind="arrow", payload=payload, first_row=first_row, lines=tuple(lines), faults=tuple(faults))

    for line, record in records:
        fault = _fault(record, header, text_lines.has_bad_text)
        if isinstance(record, str) or fault is not None:
            faults.append((first_row + len(rows) + len(faults), line, str(fault)))
        else:
            rows.append(record)
            lines.append(line)
            size += sum(map(len, record))
        if size >= block_bytes or len(faults) >= MAX_FAULTS:
            yield block()
            first_row += len(rows) + len(faults)
            rows, lines, faults, size = [], [], [], 0
    if rows or faults:
        yield block()


def _records(reader: Any, name: str) -> Iterator[tuple[int, list[str] | str]]:
    """(first line, cells) of each record, or (first line, fault)."""
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader, None)
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise UserError(
                    f"{name}:{line}: the file ends inside a quoted cell of the row that starts here; close the quote"
                ) from None
            yield line, f"not a row of the table ({error}); quote cells with quotes or line breaks in them"
            continue
        if record is None:
            return
        if record:
            yield line, record


def _header(first: tuple[int, list[str] | str] | None, name: str) -> list[str]:
    """The names of the columns, from the first record."""
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
        raise UserError(f"{name}:{line}: {rule}; got {unusable[0]!r} in {names}; add or correct the header")
    return names


def _fault(record: list[str] | str, header: list[str], has_bad_text: bool) -> str | None:
    if isinstance(record, str):
        return record
    if (cells := len(header)) != len(record):
        return f"a row must have {cells} cells as the header has; got {len(record)}; quote cells that contain commas"
    if has_bad_text and any(map(_NOT_TEXT.search, record)):
        return "not UTF-8 text, or it has a NUL; save the file as UTF-8"
    return None
