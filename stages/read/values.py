"""JSON arrays, cut between their elements by counting brackets; the elements are parsed later, by someone else."""

import re
from collections.abc import Iterator

from stages.errors import UserError
from stages.read.stretch import MAX_ROW_BYTES, TOO_LONG, Read, Stretch

QUOTE = ord('"')
CLOSERS = {ord("{"): ord("}"), ord("["): ord("]")}
_SPACE = re.compile(rb"[ \t\r\n]*+")
# Inside an element only brackets matter; between elements commas do too. Whole strings are passed over.
_TO_BRACKET = re.compile(rb'[^{}\[\]"]*+(?:"[^"]*+"[^{}\[\]"]*+)*+')
_TO_COMMA = re.compile(rb'[^,{}\[\]"]*+(?:"[^"]*+"[^,{}\[\]"]*+)*+')


class _Text:
    """The piece of the file at hand, a place in it, and the line of that place."""

    def __init__(self, read: Read, name: str, block_bytes: int):
        self.name, self.piece, self.at = name, b"", 0
        self.bare = b""
        """The piece with escapes blanked out: each quote in it starts or ends a string."""
        self._read, self._block_bytes, self._cut_escape = read, block_bytes, b""
        self._line, self._counted = 1, 0

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

    def fault(self, rule: str) -> UserError:
        """A `UserError` at the place."""
        return UserError(f"{self.name}:{self.line()}: not JSON ({rule}); the file must be one array of JSON objects")


def cut_values(read: Read, name: str, block_bytes: int) -> Iterator[Stretch]:
    """Whole elements of about `block_bytes`, each with its line; the file's first byte after white space is a bracket.

    Raises:
        UserError: the brackets do not match, or something else than commas stands between elements.
    """
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

    for line, value in _elements(_Text(read, name, block_bytes)):
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


def _elements(text: _Text) -> Iterator[tuple[int, bytes | None]]:
    """(line, bytes) of each element; None for one that is too long."""
    text.peek()
    text.at += 1
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
    if text.peek():
        raise text.fault("text after the array's end")


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
        f"{text.name}:{line}: not JSON (the file ends inside {what}, in the row that starts here); the file must be "
        "one array of JSON objects"
    )
