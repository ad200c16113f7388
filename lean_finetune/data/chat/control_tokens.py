"""Segments of a rendered conversation, trained or not, and the control tokens that bound them."""

import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import orjson

from lean_finetune.core.errors import RowFault

# Four of the noncharacters that Unicode reserves for internal use.
TRAINED_START = "\ufdd0"
TRAINED_END = "\ufdd1"
LITERAL_START = "\ufdd2"
_LITERAL_END = "\ufdd3"
SENTINELS = (TRAINED_START, TRAINED_END, LITERAL_START, _LITERAL_END)
_LITERAL = re.compile(f"{LITERAL_START}([0-9]{{1,9}}){_LITERAL_END}")
NOT_OF_TEMPLATES = re.compile(f"[{TRAINED_START}-{_LITERAL_END}\ud800-\udfff]")
WRITES_MARKS = "writes lone surrogates, or characters U+FDD0 to U+FDD3, which mark trained text here"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
THINK_TAGS = ("<think>", "</think>")


class Guard:
    """Replaces control tokens in a row's strings by placeholders, which are later encoded as plain text.

    A row that contains `<|im_end|>` as text then ends no turn: the model gets its characters, not the token. A lone
    surrogate, which no encoder accepts, becomes U+FFFD. Both are counted.
    """

    def __init__(self, control_tokens: Sequence[str]):
        """Guard against these tokens and the sentinels."""
        self._literals = sorted({*control_tokens, *SENTINELS} - {""})
        self._number = {token: str(number) for number, token in enumerate(self._literals)}
        self._pattern = re.compile(any_of(self._literals))
        self._in_answers = re.compile(any_of({*self._literals} - {*THINK_TAGS}))
        # Rows are searched as JSON, which escapes quotes and line ends in tokens.
        escaped = sorted(orjson.dumps(token)[1:-1] for token in self._literals)
        self._scans = [_scan(list(tokens)) for _, tokens in groupby(escaped, key=lambda token: token[0])]
        self.control_tokens = 0
        self.surrogates = 0

    def is_clean(self, value: Any) -> bool:
        """Whether a JSON value surely needs no protection, by one pass over its bytes."""
        try:
            data = orjson.dumps(value)
        except orjson.JSONEncodeError:  # A lone surrogate, or a value that is not JSON.
            return False
        for prefix, search in self._scans:
            # Searching one byte is several times as fast as searching two.
            if prefix[0] in data and prefix in data and search(data) is not None:
                return False
        return True

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with placeholders for the control tokens in its strings and keys."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if isinstance(value, dict):
            return {self._protect_text(key): self.protect(item) for key, item in value.items()}
        return value

    def protect_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of messages with placeholders. Think tags in an answer stay: they are the model's own, special or not.

        As characters they would differ from the tokens that the template writes around reasoning.
        """
        return [
            {
                self._protect_text(key): self._protect_text(value, self._in_answers)
                if message.get("role") == "assistant" and isinstance(value, str)
                else self.protect(value)
                for key, value in message.items()
            }
            for message in messages
        ]

    def clean(self, text: str) -> str:
        """The text without lone surrogates."""
        if not text.isascii():
            text, replaced = _LONE_SURROGATE.subn(REPLACEMENT, text)
            self.surrogates += replaced
        return text

    def _protect_text(self, text: str, pattern: re.Pattern[str] | None = None) -> str:
        text = self.clean(text)
        text, found = (pattern or self._pattern).subn(
            lambda match: f"{LITERAL_START}{self._number[match[0]]}{_LITERAL_END}", text
        )
        self.control_tokens += found
        return text

    def check(self, text: str) -> None:
        """Check a rendering of guarded text. Raises RowFault if the template wrote our marks or lone surrogates."""
        if text.isascii():
            return
        if any(mark in text for mark in SENTINELS):
            text = _LITERAL.sub(lambda match: "" if int(match[1]) < len(self._literals) else match[0], text)
        try:  # The fastest search for surrogates; it makes the bytes that encoding needs too.
            orjson.dumps(text)
            is_clean = not any(mark in text for mark in SENTINELS)
        except orjson.JSONEncodeError:
            is_clean = False
        if not is_clean:
            raise RowFault(f"the chat template {WRITES_MARKS}; correct the template")

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Split guarded text into (text, is_literal); a literal is a control token to be encoded as plain text."""
        parts = _LITERAL.split(text)
        pairs = [(self._literals[int(part)], True) if n % 2 else (part, False) for n, part in enumerate(parts)]
        return [pair for pair in pairs if pair[0]]


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for any of the texts, which prefers the longest at each position.

    It branches by character, so that searching hundreds of tokens with a common prefix costs little more than one.
    """
    texts = set(texts)
    prefix = os.path.commonprefix(list(texts))
    rest = sorted(text[len(prefix) :] for text in texts)
    branches = "|".join(any_of(group) for _, group in groupby(filter(None, rest), key=lambda text: text[0]))
    longer = f"(?:{branches}){'' if rest[0] else '?'}" if branches else ""
    return re.escape(prefix) + longer


def _scan(tokens: list[bytes]) -> tuple[bytes, Any]:
    """The common prefix of tokens, which is fast to find, and the search for one of them."""
    letters = [token.decode("latin-1") for token in tokens]
    prefix, pattern = os.path.commonprefix(letters), any_of(letters)
    return prefix.encode("latin-1"), re.compile(pattern.encode("latin-1")).search


# Segments of a row's text that are trained or not.

_SENTINELS = (TRAINED_START, TRAINED_END)
_SENTINEL = re.compile(f"([{TRAINED_START}{TRAINED_END}])")


class TextSegment(NamedTuple):
    """A part of a row's text that is trained completely or not at all."""

    text: str
    trained: bool


def split_segments(parts: Sequence[str]) -> list[TextSegment]:
    """The segments of a rendering; trained segments without text between them become one.

    Each sentinel must be one element of `parts`. Searching the joined text would cost more than rendering it: with a
    sentinel in it, Python stores every character in two bytes. Raises RowFault if generation blocks are nested or not
    closed.
    """
    segments: list[TextSegment] = []
    trained, start = False, 0
    for index, part in enumerate(parts):
        if part not in _SENTINELS:
            continue
        if trained == (part == TRAINED_START):
            raise RowFault("the chat template puts a generation block inside another; correct its generation marks")
        _add(segments, "".join(parts[start:index]), trained)
        trained, start = not trained, index + 1
    if trained:
        raise RowFault("the chat template opens a generation block and does not close it; correct its generation marks")
    _add(segments, "".join(parts[start:]), trained)
    return segments


def split_at_marks(parts: Iterable[str]) -> list[str]:
    """The parts of a rendering, with each sentinel inside them as a separate part."""
    return [text for part in parts for text in _SENTINEL.split(part)]


def _add(segments: list[TextSegment], text: str, trained: bool) -> None:
    """Append text to the last segment if that is of the same kind, else as a new segment."""
    if not text:
        return
    if segments and segments[-1].trained == trained:
        text = segments.pop().text + text
    segments.append(TextSegment(text, trained))


def segments_of_spans(text: str, spans: list[tuple[int, int]]) -> list[TextSegment]:
    """The segments of a text whose trained spans, half-open ranges of characters, are ascending and disjoint."""
    segments: list[TextSegment] = []
    done = 0
    for start, end in spans:
        segments += [TextSegment(text[done:start], False), TextSegment(text[start:end], True)]
        done = end
    segments.append(TextSegment(text[done:], False))
    return [segment for segment in segments if segment.text]
