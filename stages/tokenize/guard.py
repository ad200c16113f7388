"""Keeps a row's own text from acting as control tokens, as marks of ours, or from breaking the encoder."""

import re
from collections.abc import Sequence
from typing import Any

# Four of the noncharacters that Unicode reserves for a program's inner use.
TRAINED_START = "\ufdd0"
TRAINED_END = "\ufdd1"
_LITERAL_START = "\ufdd2"
_LITERAL_END = "\ufdd3"
_LITERAL = re.compile(f"{_LITERAL_START}([0-9]+){_LITERAL_END}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"


class Guard:
    """Replaces every control token in a row's strings by a placeholder that is later encoded as plain text.

    So a user who writes `<|im_end|>` ends no turn: the model sees the characters, never the token. A lone surrogate,
    which no encoder accepts, becomes U+FFFD. Both are counted.
    """

    def __init__(self, control_tokens: Sequence[str]):
        """Guard against these tokens, and against our own marks."""
        marks = (TRAINED_START, TRAINED_END, _LITERAL_START, _LITERAL_END)
        self._literals = sorted({*control_tokens, *marks} - {""}, key=lambda token: (-len(token), token))
        self._number = {token: str(number) for number, token in enumerate(self._literals)}
        # Longest first, so that no token hides inside another.
        self._pattern = re.compile("|".join(map(re.escape, self._literals)))
        self.control_tokens = 0
        self.surrogates = 0

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
        text, found = self._pattern.subn(lambda match: f"{_LITERAL_START}{self._number[match[0]]}{_LITERAL_END}", text)
        self.control_tokens += found
        return text

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut guarded text into (text, literal): literal pieces are control tokens to be encoded as plain text."""
        cut = _LITERAL.split(text)
        pieces = [(self._literals[int(part)], True) if odd % 2 else (part, False) for odd, part in enumerate(cut)]
        return [piece for piece in pieces if piece[0]]
