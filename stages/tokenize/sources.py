"""Rows of pinned .jsonl and .json files, one at a time, in bounded memory, hashed as they are read."""

import codecs
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stages.errors import UserError
from stages.pin.locate import new_digest

BLOCK_BYTES = 1 << 20
# A JSON fault this close to the end of what was read may only be a value cut in two (the longest token that
# json reports at its start is a \uXXXX escape).
CUT_CHARACTERS = 16
# json reports this at the string's start, however far back, so it always may be a cut.
UNTERMINATED = "Unterminated string"
# All that json reports by a plain ValueError: Python bounds the digits it turns into an integer.
_LONG_NUMBER = f"a row holds an integer of more than {sys.get_int_max_str_digits()} digits"
WHITESPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the source."""

    place: str
    """file:line of the row's first character."""
    number: int
    """0-based in the whole stream."""
    value: dict[str, Any]


def read_rows(
    files: list[tuple[str, Path, dict[str, Any]]], max_rows: int | None, progress: Callable[[int], Any]
) -> Iterator[Row]:
    """Yield the first `max_rows` rows (None: all) of files given as (name to show, path, entry in the data lock).

    `progress` is told the bytes read since its last call.

    Raises:
        UserError: a file is gone, is not what was pinned, or holds something else than JSON objects.
    """
    number = 0
    for name, path, pinned in files:
        if number == max_rows:
            return
        with _open(name, path) as file:
            source = _PinnedFile(file, name, pinned, progress)
            values = _read_array(source) if source.starts_with_bracket else _read_lines(source)
            for line, value in values:
                if not isinstance(value, dict):
                    raise UserError(f"{name}:{line}: a row must be a JSON object, got {_kind(value)}; make it one")
                yield Row(place=f"{name}:{line}", number=number, value=value)
                number += 1
                if number == max_rows:
                    break
            source.check_unchanged()


def _open(name: str, path: Path) -> BinaryIO:
    """Open a source file, or say in one line why not."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read any more ({error.strerror}); put it back or run `dvc repro` again"
        ) from error


class _PinnedFile:
    """A file whose bytes are hashed as they are read, to be compared with the lock at the end."""

    def __init__(self, file: BinaryIO, name: str, pinned: Mapping[str, Any], progress: Callable[[int], Any]):
        self.name = name
        self._file, self._progress = file, progress
        self._expected = pinned["sha256"] if "sha256" in pinned else pinned["blob_id"]
        self._digest = new_digest(self._expected, pinned["bytes"])
        # Only the first block is looked at, so white space longer than it hides a bracket; JSON Lines then says so.
        self._ahead = self._read(BLOCK_BYTES).removeprefix(codecs.BOM_UTF8)
        self.starts_with_bracket = self._ahead.lstrip()[:1] == b"["

    def _read(self, size_bytes: int) -> bytes:
        try:
            block = self._file.read(size_bytes)
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read ({error.strerror}); check its disk, then rerun") from error
        self._digest.update(block)
        self._progress(len(block))
        return block

    def blocks(self, size_bytes: Callable[[], int]) -> Iterator[bytes]:
        """The content without its byte order mark; `size_bytes()` is asked before each block."""
        if self._ahead:
            yield self._ahead
        self._ahead = b""
        while block := self._read(size_bytes()):
            yield block

    def check_unchanged(self) -> None:
        """Read what is left and compare the hash of the whole file with the lock.

        Raises:
            UserError: the file is not what was pinned.
        """
        while self._read(BLOCK_BYTES):
            pass
        if self._digest.hexdigest() != self._expected:
            raise UserError(f"{self.name}: changed since it was pinned; run `dvc repro` again")


def _read_lines(source: _PinnedFile) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each non-empty line of JSON Lines."""
    for number, line in enumerate(_lines(source), start=1):
        if line.strip():
            yield number, _parse_line(source.name, number, line)


def _lines(source: _PinnedFile) -> Iterator[bytes]:
    """Lines without their end; only the current one is held, however many blocks it spans."""
    pieces: list[bytes] = []
    for block in source.blocks(lambda: BLOCK_BYTES):
        first, *rest = block.split(b"\n")
        pieces.append(first)
        for piece in rest:
            yield b"".join(pieces)
            pieces = [piece]
    if last := b"".join(pieces):
        yield last


def _parse_line(name: str, number: int, line: bytes) -> Any:
    """One line's JSON value."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{name}:{number}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        form = "each line must be one JSON object"
        if name.endswith(".json"):
            form = f"a .json file must be one array of JSON objects, or {form}"
        raise UserError(f"{name}:{number}: not JSON ({error.msg} at column {error.colno}); {form}") from None
    except ValueError as error:
        raise UserError(f"{name}:{number}: {_LONG_NUMBER}; write it as text") from error
    except RecursionError:
        raise UserError(f"{name}:{number}: JSON nested too deep; make the row flatter") from None


class _Text:
    """The part of a file's text that is not parsed yet, with the number of the line it starts on."""

    def __init__(self, source: _PinnedFile):
        self.name, self.text, self.at, self.ended = source.name, "", 0, False
        self._line, self._counted = 1, 0
        # Reading as much again as is held keeps the work linear for a row of many megabytes.
        self._blocks = source.blocks(lambda: max(BLOCK_BYTES, len(self.text) - self.at))
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def more(self) -> None:
        """Drop what is parsed and read on."""
        self.line()
        self.text, self.at, self._counted = self.text[self.at :], 0, 0
        block = next(self._blocks, b"")
        self.ended = not block
        try:
            self.text += self._decode(block, final=self.ended)
        except UnicodeDecodeError:
            raise UserError(f"{self.name}: not UTF-8 after line {self._line}; save the file as UTF-8") from None

    def line(self) -> int:
        """The line number here; each line break is counted once."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def peek(self) -> str:
        """The next character that is not white space, or "" at the file's end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in WHITESPACE:
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def fault(self, rule: str, position: int | None = None) -> UserError:
        """A `UserError` at a position (default: here)."""
        line = self.line()
        ahead = 0 if position is None else self.text.count("\n", self.at, position)
        return UserError(f"{self.name}:{line + ahead}: not JSON ({rule}); the file must be one array of JSON objects")


def _read_array(source: _PinnedFile) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each element of a JSON array, holding little more than one element."""
    text = _Text(source)
    text.peek()
    text.at += 1
    if text.peek() != "]":
        while True:
            opener = text.peek()
            line = text.line()
            # Objects alone end in a character of their own, so a value cut in two can be told from a whole one.
            yield line, _next_object(text) if opener == "{" else _refuse_non_object(text, opener)
            separator = text.peek()
            if separator == "]":
                break
            if separator != ",":
                raise text.fault("expecting ',' or ']' after a row")
            text.at += 1
    text.at += 1
    if text.peek():
        raise text.fault("text after the array's end")


def _next_object(text: _Text) -> Any:
    """Parse the object that starts here, reading on while it may only be cut in two."""
    decoder = json.JSONDecoder()
    while True:
        try:
            value, text.at = decoder.raw_decode(text.text, text.at)
            return value
        except json.JSONDecodeError as error:
            cut = error.msg.startswith(UNTERMINATED) or error.pos >= len(text.text) - CUT_CHARACTERS
            if text.ended or not cut:
                raise text.fault(error.msg, error.pos) from None
        except ValueError as error:
            raise UserError(f"{text.name}:{text.line()}: {_LONG_NUMBER}; write it as text") from error
        except RecursionError:
            raise text.fault("nested too deep") from None
        text.more()


def _refuse_non_object(text: _Text, opener: str) -> Any:
    """Say what stands where a row should."""
    if not opener:
        raise text.fault("the file ends inside the array")
    if opener in "]},:":
        raise text.fault(f"unexpected {opener!r}")
    raise UserError(
        f"{text.name}:{text.line()}: a row must be a JSON object, got a value starting with {opener!r}; make it one"
    )


def _kind(value: Any) -> str:
    """JSON's name for a Python value's type."""
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
