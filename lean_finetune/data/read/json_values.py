"""JSON and text files, split into blocks of rows without parsing them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Literal

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_block import MAX_ROW_BYTES, TOO_LONG, Read, RowBlock


def read_lines(read: Read, kind: Literal["lines", "text"], block_bytes: int) -> Iterator[RowBlock]:
    """Blocks of complete lines of about `block_bytes`. A line longer than MAX_ROW_BYTES is skipped and is a fault."""
    number = 0
    for content in complete_lines(read, block_bytes):
        faults = ((number, number + 1, TOO_LONG),) if content is None else ()
        yield RowBlock(kind=kind, payload=content or b"", first_row=number, faults=faults)
        number += 1 if content is None else content.count(b"\n")


def complete_lines(read: Read, block_bytes: int) -> Iterator[bytes | None]:
    """Complete lines of about `block_bytes` together, each with its line end; None for a line over MAX_ROW_BYTES."""
    parts: list[bytes] = []
    parts_bytes = 0
    is_too_long = False
    while chunk := read(block_bytes):
        first_end = chunk.find(b"\n")
        if parts_bytes + (len(chunk) if first_end < 0 else first_end) > MAX_ROW_BYTES:
            is_too_long, parts, parts_bytes = True, [], 0
        if first_end < 0:
            if not is_too_long:
                parts.append(chunk)
                parts_bytes += len(chunk)
            continue
        if is_too_long:
            yield None
            is_too_long, chunk = False, chunk[first_end + 1 :]
        end = chunk.rfind(b"\n") + 1
        parts.append(chunk[:end])
        if content := b"".join(parts):
            yield content
        parts, parts_bytes = [chunk[end:]], len(chunk) - end
    if is_too_long:
        yield None
    elif content := b"".join(parts):
        yield content + b"\n"


# JSON files that are not one object a line: split into values without parsing them, so that workers can parse.
#
# The values are the elements of an array, of an array inside an object such as {"data": […]}, or objects that follow
# each other, each over several lines. Streaming parsers such as ijson give neither the bytes nor the line of a value,
# which workers and refusals need; they also refuse NaN and keep the last of two equal keys.

LAYOUT_BYTES = 1 << 16
"""Bytes at the file's start that `json_layout` needs."""
TAIL_BYTES = 1 << 20
"""Bytes that may follow the rows inside an object."""
MOST_BRACKETS = 1 << 17
"""Brackets inside each other in one row. Rows of fewer are refused one by one; a compressed file can have billions."""
Layout = Literal["lines", "array", "wrapped", "objects"]
FILE_RULE = 'the file must be one array of JSON objects, {"data": […]}, or one object a line'
_QUOTE = ord('"')
_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
_SPACE = re.compile(rb"[ \t\r\n]*+")
# Python 3.11.2, that of Debian 12, does not step back to the last whole string with `*+`; an atomic group does.
_STEPS_BACK = re.compile(rb'(?:"[^"]*+")*+').match(b'"x').end() == 0  # type: ignore[union-attr]
_REPEATED = rb"(?:%b)*+" if _STEPS_BACK else rb"(?>(?:%b)*)"
# Up to the next bracket, or up to the next bracket or comma; complete strings are skipped.
_TO_BRACKET = re.compile(rb'[^{}\[\]"]*+' + _REPEATED % rb'"[^"]*+"[^{}\[\]"]*+')
_TO_BRACKET_OR_COMMA = re.compile(rb'[^,{}\[\]"]*+' + _REPEATED % rb'"[^"]*+"[^,{}\[\]"]*+')
# The start of an object whose key for the rows may follow keys with single values.
_WRAPPED = re.compile(
    rb'\s*+\{\s*+(?:"[^"\\]*+"\s*+:\s*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\w.+-]++)\s*+,\s*+)*'
    rb'"(?:data|rows|train|examples|instances)"\s*+:\s*+\[(?=\s*+\{)'
)


def json_layout(start: bytes) -> tuple[Layout, int]:
    """Find how the rows of a JSON file that begins with `start` are arranged, and the bytes before the first row.

    lines: one object a line | array | wrapped: an array inside an object | objects: one after another, over several
    lines each, as pretty-printers write them.
    """
    text = start.lstrip()
    if text[:1] == b"[":
        return "array", 0
    first, _, rest = text.partition(b"\n")
    following = rest.lstrip()
    if (match := _WRAPPED.match(start)) and not (following and _is_json(first)):
        return "wrapped", match.end()
    # After an incomplete line, another row means a damaged line, and anything else a pretty-printed object.
    is_open = first.rstrip().endswith((b"{", b"[", b",")) and not _is_json(first)
    return ("objects" if is_open and following and following[:1] != b"{" else "lines"), 0


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


class _Window:
    """The part of the file in memory, with a position in it and that position's line."""

    def __init__(self, read: Read, name: str, block_bytes: int, before: bytes):
        self.name, self.content, self.position = name, b"", 0
        self.unescaped = b""
        """`content` with escape sequences blanked out, so that every quote starts or ends a string."""
        self._read, self._block_bytes, self._split_escape = read, block_bytes, b""
        self._line, self._counted = 1 + before.count(b"\n"), 0

    def read_more(self) -> bool:
        """Drop what lies before the position and append a block of the file; False at the file's end."""
        self.line()
        block = self._read(self._block_bytes)
        content = self.content[self.position :] + self._split_escape + block
        # A backslash at the end may escape the first byte of the next block: it waits for that block.
        backslashes = len(content) - len(content.rstrip(b"\\"))
        self._split_escape = b"\\" if block and backslashes % 2 else b""
        self.content, self.position, self._counted = content[: len(content) - len(self._split_escape)], 0, 0
        self.unescaped = self.content.replace(rb"\\", b"__").replace(rb"\"", b"__")
        return bool(block)

    def line(self) -> int:
        """Line of the position, from 1. Each line break is counted once."""
        self._line += self.content.count(b"\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def peek(self) -> bytes:
        """The next byte that is not white space, without passing it; b"" at the file's end."""
        while True:
            self.position = _SPACE.match(self.content, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.content) or not self.read_more():
                return self.content[self.position : self.position + 1]

    def rest(self) -> bytes:
        """The rest of the file, up to about TAIL_BYTES."""
        parts = [self.content[self.position :]]
        while sum(map(len, parts)) < TAIL_BYTES and (part := self._read(self._block_bytes)):
            parts.append(part)
        return b"".join(parts)

    def error(self, rule: str, line: int | None = None) -> UserError:
        """The refusal of the file at the position, or at another line."""
        return UserError(f"{self.name}:{line or self.line()}: not JSON ({rule}); {FILE_RULE}")


def read_json_values(read: Read, name: str, block_bytes: int, layout: Layout, before: int) -> Iterator[RowBlock]:
    """Blocks of complete values of about `block_bytes`, each value with its line; for the layouts except lines.

    Raises UserError if the brackets do not match, or there is something else than a comma between two values.
    """
    window = _Window(read, name, block_bytes, read(before))
    if layout == "array":
        window.peek()
        window.position += 1
    number = 0
    values: list[bytes] = []
    lines: list[int] = []

    def block() -> RowBlock:
        ends = tuple(accumulate(map(len, values)))
        return RowBlock(kind="values", payload=b"".join(values), first_row=number, ends=ends, lines=tuple(lines))

    size_bytes = 0
    for line, value in _objects(window) if layout == "objects" else _elements(window, layout):
        if values and (value is None or size_bytes >= block_bytes):
            yield block()
            number, size_bytes, values, lines = number + len(values), 0, [], []
        if value is None:
            yield replace(block(), faults=((number, line, TOO_LONG),))
            number += 1
        else:
            size_bytes += len(value)
            values.append(value)
            lines.append(line)
    if values:
        yield block()


def _objects(window: _Window) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each object up to the file's end; None for one that is too long."""
    while first := window.peek():
        if first != b"{":
            raise window.error(f"unexpected {first.decode('utf-8', 'replace')!r} between rows")
        line = window.line()
        yield line, _next_value(window, line)


def _elements(window: _Window, layout: Layout) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each element of an array, from behind its bracket; None for one that is too long."""
    separator = window.peek()
    while separator != b"]":
        first = window.peek()
        if not first:
            raise window.error("the file ends inside the array")
        if first in b"]},:":
            raise window.error(f"unexpected {first.decode()!r}")
        line = window.line()
        yield line, _next_value(window, line)
        separator = window.peek()
        if separator not in (b",", b"]"):
            raise window.error("expecting ',' or ']' after a row")
        if separator == b",":
            window.position += 1
    window.position += 1
    if layout == "wrapped":
        _check_end_of_wrapper(window)
    elif window.peek():
        raise window.error("text after the array's end")


def _check_end_of_wrapper(window: _Window) -> None:
    """Refuse an object with more rows behind its first array, or without its closing bracket."""
    try:
        others = json.loads(b'{"": 0' + window.rest())
    except ValueError:
        raise window.error("the object that holds the rows is not closed behind them") from None
    if lists := [key for key, value in others.items() if isinstance(value, list | dict) and value]:
        raise UserError(
            f"{window.name}:{window.line()}: the object holds {lists[0]!r} beside the rows; put each into its own file"
        )


def _next_value(window: _Window, line: int) -> bytes | None:
    """The value at the position; None if it is too long.

    Goes from bracket to bracket and remembers which closing brackets are due. Every byte is visited once, in however
    many blocks the value is read, and a value that is too long is not collected.
    """
    parts: list[bytes] = []
    size_bytes, start = 0, window.position
    due = bytearray()  # Closing brackets that must follow, the next one last.
    in_string = False  # Only of a string that reaches into the next block; the patterns skip the others.
    while True:
        if in_string:
            end = window.unescaped.find(b'"', window.position)
        else:
            pattern = _TO_BRACKET if due else _TO_BRACKET_OR_COMMA
            end = pattern.match(window.unescaped, window.position).end()  # type: ignore[union-attr]
        window.position = len(window.unescaped) if end < 0 else end
        if window.position == len(window.unescaped):
            parts.append(window.content[start : window.position])
            size_bytes, start = size_bytes + len(parts[-1]), 0
            if size_bytes > MAX_ROW_BYTES:
                parts.clear()
            if not window.read_more():
                what = "a string" if in_string else "the array"
                raise window.error(f"the file ends inside {what}, in the row that starts here", line)
            continue
        byte = window.unescaped[window.position]
        if byte == _QUOTE:
            in_string = not in_string
        elif byte in _CLOSING:
            if not due and size_bytes + window.position - start:
                raise window.error("expecting ',' or ']' after a row")
            due.append(_CLOSING[byte])
            if len(due) > MOST_BRACKETS:
                raise window.error(
                    f"more than {MOST_BRACKETS} brackets inside each other, in the row that starts here", line
                )
        elif not due:
            break  # The comma or bracket behind a number or a string is not part of it.
        elif due.pop() != byte:
            raise window.error(f"unexpected {chr(byte)!r}")
        window.position += 1
        if byte != _QUOTE and not due:
            break
    parts.append(window.content[start : window.position])
    return None if size_bytes + len(parts[-1]) > MAX_ROW_BYTES else b"".join(parts).rstrip()
