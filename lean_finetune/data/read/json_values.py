"""JSON values of a file, cut apart by counting brackets; they are parsed later, by someone else.

The values are the elements of an array, of an array inside an object such as {"data": […]}, or objects that follow each
other, each over several lines.
"""

import json
import re
from collections.abc import Iterator
from typing import Literal

from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_range import MAX_ROW_BYTES, TOO_LONG, Read, Stretch

QUOTE = ord('"')
CLOSERS = {ord("{"): ord("}"), ord("["): ord("]")}
_SPACE = re.compile(rb"[ \t\r\n]*+")
# Inside an element only brackets matter; between elements commas do too. Whole strings are passed over.
_TO_BRACKET = re.compile(rb'[^{}\[\]"]*+(?:"[^"]*+"[^{}\[\]"]*+)*+')
# Where rows are inside one object: the key that holds them may follow others that hold single values.
_WRAPPED = re.compile(
    rb'\s*+\{\s*+(?:"[^"\\]*+"\s*+:\s*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\w.+-]++)\s*+,\s*+)*'
    rb'"(?:data|rows|train|examples|instances)"\s*+:\s*+\[(?=\s*+\{)'
)
FILE_RULE = 'the file must be one array of JSON objects, {"data": […]}, or one object a line'
# Bytes of the file's start that tell its form, and bytes that may follow the array inside an object.
FORM_BYTES = 1 << 16
TAIL_BYTES = 1 << 20
Form = Literal["lines", "array", "wrapped", "objects"]


def json_form(start: bytes) -> tuple[Form, int]:
    """(how rows are in a JSON file that begins with `start`, the bytes in front of the first).

    lines: one object a line | array | wrapped: an array inside one object | objects: one after another, over several
    lines each, as pretty-printers write them.
    """
    text = start.lstrip()
    if text[:1] == b"[":
        return "array", 0
    first, _, rest = text.partition(b"\n")
    following = rest.lstrip()
    if (match := _WRAPPED.match(start)) and not (following and _is_json(first)):
        return "wrapped", match.end()
    # A line that was cut off is followed by another row.
    is_open = first.rstrip().endswith((b"{", b"[", b",")) and not _is_json(first)
    return ("objects" if is_open and following and following[:1] != b"{" else "lines"), 0


def _is_json(line: bytes) -> bool:
    """Whether a line is JSON by itself."""
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


_TO_COMMA = re.compile(rb'[^,{}\[\]"]*+(?:"[^"]*+"[^,{}\[\]"]*+)*+')


class _Text:
    """The piece of the file at hand, a place in it, and the line of that place."""

    def __init__(self, read: Read, name: str, block_bytes: int, before: bytes):
        self.name, self.piece, self.at = name, b"", 0
        self.bare = b""
        """The piece with escapes blanked out: each quote in it starts or ends a string."""
        self._read, self._block_bytes, self._cut_escape = read, block_bytes, b""
        self._line, self._counted = 1 + before.count(b"\n"), 0

    def more(self) -> bool:
        """Drop what lies before the place and read on; False at the file's end."""
        self.line()
        read = self._read(self._block_bytes)
        piece = self.piece[self.at :] + self._cut_escape + read
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._cut_escape = b"\\" if read and backslashes % 2 else b""
        self.piece, self.at, self._counted = piece[: len(piece) - len(self._cut_escape)], 0, 0
        self.bare = self.piece.replace(rb"\\", b"__").replace(rb"\"", b"__")
        return bool(read)

    def line(self) -> int:
        """The line of the place; each line break is counted once."""
        self._line += self.piece.count(b"\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def peek(self) -> bytes:
        """The next byte that is not white space, or b"" at the file's end."""
        while True:
            self.at = _SPACE.match(self.piece, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.piece) or not self.more():
                return self.piece[self.at : self.at + 1]

    def rest(self) -> bytes:
        """What is left of the file, up to about TAIL_BYTES."""
        parts = [self.piece[self.at :]]
        while sum(map(len, parts)) < TAIL_BYTES and (part := self._read(self._block_bytes)):
            parts.append(part)
        return b"".join(parts)

    def fault(self, rule: str) -> UserError:
        """A `UserError` at the place."""
        return UserError(f"{self.name}:{self.line()}: not JSON ({rule}); {FILE_RULE}")


def cut_values(read: Read, name: str, block_bytes: int, form: Form, before: int) -> Iterator[Stretch]:
    """Whole values of about `block_bytes`, each with its line; `form` and `before` are what `json_form` said.

    Raises:
        UserError: the brackets do not match, or something else than commas stands between elements.
    """
    text = _Text(read, name, block_bytes, read(before))
    if form == "array":
        text.peek()
        text.at += 1
    values_with_lines = _objects(text) if form == "objects" else _elements(text, form)
    number = 0
    values: list[bytes] = []
    lines: list[int] = []
    held_bytes = 0

    def held() -> Stretch:
        ends, end = [], 0
        for value in values:
            end += len(value)
            ends.append(end)
        return Stretch("values", b"".join(values), number, tuple(ends), tuple(lines))

    for line, value in values_with_lines:
        if value is None or held_bytes >= block_bytes:
            if values:
                yield held()
            number += len(values)
            values, lines, held_bytes = [], [], 0
        if value is None:
            yield Stretch("values", b"", number, faults=((number, line, TOO_LONG),))
            number += 1
            continue
        values.append(value)
        lines.append(line)
        held_bytes += len(value)
    if values:
        yield held()


def _objects(text: _Text) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each object up to the file's end; None for one that is too long."""
    while opener := text.peek():
        if opener != b"{":
            raise text.fault(f"unexpected {opener.decode('utf-8', 'replace')!r} between rows")
        line = text.line()
        yield line, _next_element(text, line)


def _elements(text: _Text, form: Form) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each element of an array whose bracket was read; None for one that is too long."""
    if text.peek() != b"]":
        while True:
            opener = text.peek()
            if not opener:
                raise text.fault("the file ends inside the array")
            if opener in b"]},:":
                raise text.fault(f"unexpected {opener.decode()!r}")
            line = text.line()
            yield line, _next_element(text, line)
            separator = text.peek()
            if separator == b"]":
                break
            if separator != b",":
                raise text.fault("expecting ',' or ']' after a row")
            text.at += 1
    text.at += 1
    if form == "wrapped":
        _check_tail(text)
    elif text.peek():
        raise text.fault("text after the array's end")


def _check_tail(text: _Text) -> None:
    """What follows the array inside an object must close it, after no more than single values.

    Raises:
        UserError: there is something else, such as a second list of rows.
    """
    try:
        others = json.loads(b'{"": 0' + text.rest())
    except ValueError:
        raise text.fault("the object that holds the rows is not closed behind them") from None
    if lists := [key for key, value in others.items() if isinstance(value, list | dict) and value]:
        raise UserError(
            f"{text.name}:{text.line()}: the object holds {lists[0]!r} beside the rows; put each into a file of its own"
        )


def _next_element(text: _Text, line: int) -> bytes | None:
    """The element that starts here. Each byte is looked at once, however the file was cut into pieces."""
    parts: list[bytes] = []
    held_bytes, start = 0, text.at
    closers = bytearray()
    in_string = False
    while True:
        if in_string:
            end = text.bare.find(b'"', text.at)
        else:
            end = (_TO_BRACKET if closers else _TO_COMMA).match(text.bare, text.at).end()  # type: ignore[union-attr]
        text.at = len(text.bare) if end < 0 else end
        if text.at == len(text.bare):
            parts.append(text.piece[start : text.at])
            held_bytes, start = held_bytes + len(parts[-1]), 0
            if held_bytes > MAX_ROW_BYTES:
                parts.clear()
            if not text.more():
                raise _never_closed(text, line, in_string)
            continue
        byte = text.bare[text.at]
        if byte == QUOTE:  # A string that is cut by the piece's end was not passed over: this is where it starts.
            in_string = not in_string
        elif byte in CLOSERS:
            if not closers and held_bytes + text.at - start:
                raise text.fault("expecting ',' or ']' after a row")
            closers.append(CLOSERS[byte])
        elif not closers:
            break  # What ends a plain value is no part of it.
        elif closers.pop() != byte:
            raise text.fault(f"unexpected {chr(byte)!r}")
        text.at += 1
        if byte != QUOTE and not closers:
            break
    parts.append(text.piece[start : text.at])
    return None if held_bytes + len(parts[-1]) > MAX_ROW_BYTES else b"".join(parts).rstrip()


def _never_closed(text: _Text, line: int, in_string: bool) -> UserError:
    """The fault of a row that the file's end cuts."""
    what = "a string" if in_string else "the array"
    return UserError(
        f"{text.name}:{line}: not JSON (the file ends inside {what}, in the row that starts here); {FILE_RULE}"
    )
