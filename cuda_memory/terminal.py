"""Print text that others wrote: a terminal shows it, and obeys none of it."""

import codecs
import io
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

import click

KEPT = "\n\t"
NOT_SHOWN = ("Cc", "Cs", "Zl", "Zp")
"""Categories that are replaced: control characters, which a terminal obeys, surrogates, other line ends."""
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional controls: they can show text in another order than it has."""
OF_BARS = ("\r", "\x1b[A")
"""What a progress bar writes to begin its line again."""


def visible(text: str) -> str:
    """A text with the code of each character that a terminal or a browser obeys but does not show.

    Line ends, tabs, letters of all scripts and joined emoji stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    hidden = character in REORDERING or (character not in KEPT and unicodedata.category(character) in NOT_SHOWN)
    return ascii(character)[1:-1] if hidden else character


def visible_line(text: str) -> str:
    """A text as one line: of another library's error, for example."""
    return visible(" ".join(text.split()))


def echo(line: str = "", *, err: bool = False) -> None:
    """Print one line to standard output, or to standard error if `err`; line ends of names and values become spaces.

    Commands print by this, `echo_text` and `echo_json` alone.
    """
    echo_text(" ".join(line.splitlines()), err=err)


def echo_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text of several lines: a table, or the answer of a model."""
    click.echo(visible(text), err=err, nl=nl)


def echo_json(value: Any) -> None:
    """Print a value as JSON, with dates and paths as text."""
    echo_text(json_text(value, indent=2))


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON in ASCII; JSON's own codes stand for all that a terminal would obey."""
    return json.dumps(value, indent=indent, default=str).replace("\x7f", "\\u007f")


def replace_unencodable() -> None:
    """Print `?` where the encoding of standard output lacks a character, such as a bar in a pipe on Windows."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and codecs.lookup(out.encoding).name != "utf-8":
        out.reconfigure(errors="replace")


class OutputFault(OSError):
    """Standard output cannot be written: its disk is full, for example. What was not written is lost."""


class _Guarded:
    """A stream on which a terminal obeys nothing but line ends, and what `kept` lists."""

    def __init__(self, stream: Any, kept: tuple[str, ...], *, is_output: bool):
        self._stream, self._kept, self._is_output = stream, kept, is_output

    def write(self, text: str) -> int:
        """Write a text with its other control characters as codes. Raises OutputFault."""
        if not isinstance(text, str):
            raise TypeError(f"must be a text; got {type(text).__name__}")  # By which click tells streams of bytes.
        if text:  # Of an empty one, which click tries, a fault would be lost.
            with self._faults():
                self._stream.write(self._escaped(text, self._kept))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered. Raises OutputFault."""
        with self._faults():
            self._stream.flush()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # The reader has enough: click ends the process without a word.
            raise
        except OSError as error:
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                # Else the interpreter writes again when it ends, and prints a traceback.
                os.dup2(nowhere.fileno(), self._stream.fileno())
            if self._is_output:  # A fault of standard error could be told nowhere.
                raise OutputFault(error.errno, error.strerror) from None

    def _escaped(self, text: str, kept: tuple[str, ...]) -> str:
        if not kept:
            return visible(text)
        return kept[0].join(self._escaped(part, kept[1:]) for part in text.split(kept[0]))

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's own."""
        return getattr(self._stream, name)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Escape what other libraries print in the block: their warnings, logs and tracebacks quote text of strangers."""
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, _Guarded) or stream is None for stream in before):  # None: closed from the start.
        yield
        return
    replace_unencodable()
    sys.stdout = cast(TextIO, _Guarded(before[0], (), is_output=True))
    sys.stderr = cast(TextIO, _Guarded(before[1], OF_BARS, is_output=False))
    try:
        yield
    except Exception:  # The interpreter prints the traceback, to the guarded streams.
        raise
    except BaseException:
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before
