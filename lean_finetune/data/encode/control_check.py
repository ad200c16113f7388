"""Comparison of the control tokens in rows' texts with those in their ids.

A row's text is encoded in segments, so a boundary inside a control token would make plain characters of it, and the
model would never see the token that it gets at inference.
"""

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.data.chat.control_tokens import LITERAL_START, Guard, any_of
from lean_finetune.data.chat.trained_segments import Segment
from lean_finetune.data.encode.encoded_rows import EncodedRows

_BETWEEN = "\0"
"""Between the texts of rows, so that no control token is found in two of them."""


class ControlCheck:
    """Finds the tokens added to a vocabulary in texts, in one pass of a regular expression, and in ids."""

    def __init__(self, tokenizer: Tokenizer, guard: Guard, vocab_size: int, *, is_joined: bool):
        """Check the tokens that the tokenizer finds in any text.

        `guard` made the placeholders in texts. With `is_joined`, rows are encoded as one text, so their ids do not show
        where a boundary lies.
        """
        tokens = tokenizer.get_added_tokens_decoder()
        # Others are found in normalized text, or between blanks only.
        exact = tokenizer.normalizer is None
        found = {
            token.content: number
            for number, token in tokens.items()
            if token.content and not token.single_word and (exact or not token.normalized)
        }
        self._ids = found
        self._find = re.compile(any_of(found) or r"(?!)").findall
        self._is_control = np.zeros(vocab_size, bool)
        self._is_control[list(found.values())] = True
        self._guard, self._is_joined = guard, is_joined

    def faults(self, rows: Sequence[Sequence[Segment]], encoded: EncodedRows) -> dict[int, str]:
        """The first control token that differs, by row; empty where all ids have the control tokens of the text."""
        places = np.flatnonzero(self._is_control[encoded.ids])
        made = encoded.ids[places]
        if not self._is_joined:
            # All rows at once, which is several times as fast as one by one.
            text = _BETWEEN.join(["".join([text for text, _ in row]) for row in rows])
            if LITERAL_START not in text and np.array_equal(made, self._ids_of(self._find(text))):
                return {}
        wanted: list[str] = []
        ends = [0]
        cut = {}
        for number, row in enumerate(rows):
            found = self._find(self._text(row))
            if self._is_joined and len(found) > sum(len(self._find(self._text([segment]))) for segment in row):
                cut[number] = self._cut_token(row)
            wanted += found
            ends.append(len(wanted))
        made_ends = np.searchsorted(places, encoded.offsets)
        if np.array_equal(made_ends, ends) and np.array_equal(made, self._ids_of(wanted)):
            return cut
        return cut | self._differences(wanted, ends, made, made_ends)

    def _ids_of(self, tokens: list[str]) -> np.ndarray:
        return np.fromiter(map(self._ids.__getitem__, tokens), np.int32, len(tokens))

    def _differences(
        self, wanted: list[str], ends: list[int], made: np.ndarray, made_ends: np.ndarray
    ) -> dict[int, str]:
        """The first difference of each row, of which `ends` are the bounds in all tokens wanted and made."""
        faults = {}
        for row in range(len(ends) - 1):
            ids = made[made_ends[row] : made_ends[row + 1]].tolist()
            tokens = wanted[ends[row] : ends[row + 1]]
            if ids != [self._ids[token] for token in tokens]:
                faults[row] = self._first_difference(tokens, ids)
        return faults

    def _text(self, row: Sequence[Segment]) -> str:
        """The row's text without the control tokens that are text."""
        text = "".join(segment.text for segment in row)
        if LITERAL_START not in text:
            return text
        return "".join(LITERAL_START if is_literal else part for part, is_literal in self._guard.split(text))

    def _cut_token(self, row: Sequence[Segment]) -> str:
        """The first token of the text that no segment contains."""
        inside = [token for segment in row for token in self._find(self._text([segment]))]
        tokens = self._find(self._text(row))
        return next((token for token, other in zip(tokens, inside, strict=False) if token != other), tokens[-1])

    def _first_difference(self, tokens: list[str], ids: list[int]) -> str:
        for token, number in zip(tokens, ids, strict=False):
            if self._ids[token] != number:
                return token
        if len(tokens) > len(ids):
            return tokens[len(ids)]
        return next(token for token, number in self._ids.items() if number == ids[len(tokens)])
