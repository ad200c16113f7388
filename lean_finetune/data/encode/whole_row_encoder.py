"""Encoded rows, the encoding of a complete row, and the comparison of its control tokens with those of its text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import LITERAL_START, Guard, TextSegment, any_of


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Token ids of rows, and their trained spans."""

    ids: np.ndarray
    """int32: the ids of all rows, concatenated."""
    offsets: np.ndarray
    """int64, shape (rows + 1,): where each row starts in `ids`, and the end of the last."""
    span_rows: np.ndarray
    """int64, shape (spans,): the row of each span, ascending."""
    spans: np.ndarray
    """int64, shape (spans, 2): half-open ranges of positions in the row; ascending, with gaps between them."""
    failed: frozenset[int]
    """Rows with text that the engine could not encode, so that the tokenizers library did."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int64."""
        return np.diff(self.offsets)


def from_segments(
    ids: np.ndarray,
    segment_lengths: np.ndarray,
    segment_trained: np.ndarray,
    segment_counts: np.ndarray,
    failed: list[int],
) -> EncodedRows:
    """Rows from the ids of their segments, each trained completely or not at all.

    Args:
        ids: int32, of all segments.
        segment_lengths: int64, tokens of each segment.
        segment_trained: bool, of each segment.
        segment_counts: int64, segments of each row.
        failed: indices of segments that the engine could not encode.
    """
    segment_rows = np.repeat(np.arange(len(segment_counts)), segment_counts)
    bounds = np.concatenate(([0], np.cumsum(segment_lengths)))
    offsets = bounds[np.concatenate(([0], np.cumsum(segment_counts)))]
    trained = np.flatnonzero(segment_trained & (segment_lengths > 0))
    starts, ends, rows = bounds[trained], bounds[trained + 1], segment_rows[trained]
    # Trained segments that touch become one span.
    is_gap = (starts[1:] != ends[:-1]) | (rows[1:] != rows[:-1])
    one = np.ones(min(len(trained), 1), bool)
    first, last = np.concatenate((one, is_gap)), np.concatenate((is_gap, one))
    rows = rows[first]
    spans = np.stack((starts[first], ends[last]), axis=1) - offsets[rows][:, None]
    return EncodedRows(
        ids=ids, offsets=offsets, span_rows=rows, spans=spans, failed=frozenset(segment_rows[failed].tolist())
    )


# Comparison of the control tokens in rows' texts with those in their ids.
#
# A row's text is encoded in segments, so a boundary inside a control token would make plain characters of it, and the
# model would never see the token that it gets at inference.

_BETWEEN = "\0"
"""Between the texts of rows, so that no control token is found in two of them."""


class ControlCheck:
    """Finds the tokens added to a vocabulary in texts, in one pass of a regular expression, and in ids."""

    def __init__(self, tokenizer: Tokenizer, guard: Guard, vocab_size: int, *, is_whole: bool):
        """Check the tokens that the tokenizer finds in any text.

        `guard` made the placeholders in texts. With `is_whole`, rows are encoded as one text, so their ids do not show
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
        self._guard, self._is_whole = guard, is_whole

    def faults(self, rows: Sequence[Sequence[TextSegment]], encoded: EncodedRows) -> dict[int, str]:
        """The first control token that differs, by row; empty where all ids have the control tokens of the text."""
        places = np.flatnonzero(self._is_control[encoded.ids])
        made = encoded.ids[places]
        if not self._is_whole:
            # All rows at once, which is several times as fast as one by one.
            text = _BETWEEN.join(["".join([text for text, _ in row]) for row in rows])
            if LITERAL_START not in text and np.array_equal(made, self._ids_of(self._find(text))):
                return {}
        wanted: list[str] = []
        ends = [0]
        cut = {}
        for number, row in enumerate(rows):
            found = self._find(self._text(row))
            if self._is_whole and len(found) > sum(len(self._find(self._text([segment]))) for segment in row):
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

    def _text(self, row: Sequence[TextSegment]) -> str:
        """The row's text without the control tokens that are text."""
        text = "".join(segment.text for segment in row)
        if LITERAL_START not in text:
            return text
        return "".join(LITERAL_START if is_literal else part for part, is_literal in self._guard.split(text))

    def _cut_token(self, row: Sequence[TextSegment]) -> str:
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


# Encoding of rows as one text each, for tokenizers that add a space before every text, as SentencePiece does.
#
# A token is trained if its characters are inside a trained segment. The spaces before the segment count as inside,
# because these tokenizers join a space to the following word. Other tokens across a boundary are not trained.

TEXTS_PER_CALL = 128
PROBE = "Hello  world: é 你好.\n\nEnd of it"


class WholeRowEncoder:
    """Encodes each row as one text."""

    def __init__(self, tokenizer: Tokenizer, guard: Guard, directory: Path):
        """Encode with this tokenizer. Raises UserError if the tokenizer changes text when it encodes and decodes it."""
        self._tokenizer, self._guard = tokenizer, guard
        decoded = tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False).ids, skip_special_tokens=False)
        if decoded.removeprefix(" ") != PROBE:
            raise UserError(
                f"model.name: {directory / 'tokenizer.json'} decodes its tokens of {PROBE!r} to {decoded!r}, so the "
                "model could not learn the exact answers; only tokenizers that preserve text are supported"
            )

    def encode_rows(self, rows: Sequence[Sequence[TextSegment]]) -> EncodedRows:
        """Encode rows of guarded segments."""
        ids, trained, lengths = [], [], []
        for start in range(0, len(rows), TEXTS_PER_CALL):
            batch = [_Row(row, self._guard) for row in rows[start : start + TEXTS_PER_CALL]]
            encodings = self._tokenizer.encode_batch([row.text for row in batch], add_special_tokens=False)
            for row, encoding in zip(batch, encodings, strict=True):
                row_ids, row_trained = self._tokens(row, encoding)
                ids.append(row_ids)
                trained.append(row_trained)
                lengths.append(len(row_ids))
        flat = np.concatenate([np.zeros(0, np.int32), *ids])
        each = np.ones(len(flat), np.int64)
        return from_segments(flat, each, np.concatenate([np.zeros(0, bool), *trained]), np.array(lengths, np.int64), [])

    def _tokens(self, row: "_Row", encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        """(ids, whether each is trained) of a row; placeholders become the ids of their text."""
        ids = np.array(encoding.ids, np.int32)
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        trained = row.trained(characters)
        # From the last, so that indices before it stay valid.
        for place, token in reversed(row.literals):
            here = np.flatnonzero((characters[:, 0] <= place) & (characters[:, 1] > place))
            if not (characters[here] == (place, place + 1)).all():
                raise UserError(
                    f"data.source: a row has the control token {token!r} as text, which this tokenizer cannot "
                    "encode as plain characters next to the text around it; remove it from the row"
                )
            plain = np.array(self._plain_ids(token), np.int32)
            first, last = int(here[0]), int(here[-1]) + 1
            ids = np.concatenate((ids[:first], plain, ids[last:]))
            filled = np.full(len(plain), trained[first])
            trained = np.concatenate((trained[:first], filled, trained[last:]))
        return ids, trained

    @cache  # noqa: B019 - the tokenizer lives as long as the process
    def _plain_ids(self, token: str) -> list[int]:
        """The ids of a control token's characters inside a text, without the control token's id."""
        self._tokenizer.encode_special_tokens = True
        try:
            encoding = self._tokenizer.encode(LITERAL_START + token, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = False
        return [number for number, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if start > 0]


class _Row:
    """A row's text, in which control tokens that are text are one placeholder character each."""

    def __init__(self, segments: Sequence[TextSegment], guard: Guard):
        parts: list[str] = []
        self.literals: list[tuple[int, str]] = []
        """(place in the text, control token)."""
        starts, ends, length = [], [], 0
        for text, is_trained in segments:
            start = length
            for part, is_literal in guard.split(text):
                if is_literal:
                    self.literals.append((length, part))
                parts.append(LITERAL_START if is_literal else part)
                length += len(parts[-1])
            if is_trained and length > start:
                starts.append(start)
                ends.append(length)
        self.text = "".join(parts)
        self._starts, self._ends = np.array(starts, np.int64), np.array(ends, np.int64)
        spaces = [start - len(self.text[:start].rstrip(" ")) for start in starts]
        self._reach = self._starts - np.array(spaces, np.int64)

    def trained(self, characters: np.ndarray) -> np.ndarray:
        """Whether each token is trained; `characters` has its half-open range of characters."""
        if len(self._starts) == 0:
            return np.zeros(len(characters), bool)
        # The trained segment in which a token ends.
        segment = np.searchsorted(self._starts, characters[:, 1], side="left") - 1
        known = np.maximum(segment, 0)
        return (segment >= 0) & (characters[:, 0] >= self._reach[known]) & (characters[:, 1] <= self._ends[known])
