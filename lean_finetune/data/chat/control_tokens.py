"""Keeps a row's own text from acting as control tokens, as marks of ours, or from breaking the encoder."""

import os.path
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import orjson

# Four of the noncharacters that Unicode reserves for a program's inner use.
TRAINED_START = "\ufdd0"
TRAINED_END = "\ufdd1"
LITERAL_START = "\ufdd2"
_LITERAL_END = "\ufdd3"
_LITERAL = re.compile(f"{LITERAL_START}([0-9]+){_LITERAL_END}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


class Guard:
    """Replaces every control token in a row's strings by a placeholder that is later encoded as plain text.

    So a user who writes `<|im_end|>` ends no turn: the model sees the characters, never the token. A lone surrogate,
    which no encoder accepts, becomes U+FFFD. Both are counted.
    """

    def __init__(self, control_tokens: Sequence[str]):
        """Guard against these tokens, and against our own marks."""
        marks = (TRAINED_START, TRAINED_END, LITERAL_START, _LITERAL_END)
        self._literals = sorted({*control_tokens, *marks} - {""})
        self._number = {token: str(number) for number, token in enumerate(self._literals)}
        self._pattern = re.compile(any_of(self._literals))
        # Rows are searched as JSON, in which a token's quotes and line ends are escaped.
        escaped = sorted(orjson.dumps(token)[1:-1] for token in self._literals)
        self._scans = [_scan(list(tokens)) for _, tokens in groupby(escaped, key=lambda token: token[0])]
        self.control_tokens = 0
        self.surrogates = 0

    def is_clean(self, value: Any) -> bool:
        """Whether a JSON value surely holds nothing to protect from: one pass over its bytes."""
        try:
            data = orjson.dumps(value)
        except orjson.JSONEncodeError:  # a lone surrogate, or a value that only `protect` can judge
            return False
        for prefix, search in self._scans:
            # One byte is looked for several times as fast as two.
            if prefix[0] in data and prefix in data and search(data) is not None:
                return False
        return True

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value whose strings (keys too) hold no control token."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if isinstance(value, dict):
            return {self._protect_text(key): self.protect(item) for key, item in value.items()}
        return value

    def clean(self, text: str) -> str:
        """The text without lone surrogates."""
        if not text.isascii():
            text, replaced = _LONE_SURROGATE.subn(REPLACEMENT, text)
            self.surrogates += replaced
        return text

    def _protect_text(self, text: str) -> str:
        text = self.clean(text)
        text, found = self._pattern.subn(lambda match: f"{LITERAL_START}{self._number[match[0]]}{_LITERAL_END}", text)
        self.control_tokens += found
        return text

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut guarded text into (text, literal): literal pieces are control tokens to be encoded as plain text."""
        cut = _LITERAL.split(text)
        pieces = [(self._literals[int(part)], True) if odd % 2 else (part, False) for odd, part in enumerate(cut)]
        return [piece for piece in pieces if piece[0]]


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for any of the texts, the longest of those that stand at a place.

    It branches by character, so that hundreds of tokens of one beginning cost a search hardly more than one does.
    """
    texts = set(texts)
    prefix = os.path.commonprefix(list(texts))
    rest = sorted(text[len(prefix) :] for text in texts)
    branches = "|".join(any_of(group) for _, group in groupby(filter(None, rest), key=lambda text: text[0]))
    longer = f"(?:{branches}){'' if rest[0] else '?'}" if branches else ""
    return re.escape(prefix) + longer


def _scan(tokens: list[bytes]) -> tuple[bytes, Any]:
    """What all of some tokens begin with, which is fast to look for, and the search for one of them."""
    letters = [token.decode("latin-1") for token in tokens]
    prefix, pattern = os.path.commonprefix(letters), any_of(letters)
    return prefix.encode("latin-1"), re.compile(pattern.encode("latin-1")).search
