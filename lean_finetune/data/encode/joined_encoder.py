"""Encoding of rows as one text each, for tokenizers that add a space before every text, as SentencePiece does.

A token is trained if its characters are inside a trained segment. The spaces before the segment count as inside,
because these tokenizers join a space to the following word. Other tokens across a boundary are not trained.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import LITERAL_START, Guard
from lean_finetune.data.chat.trained_segments import Segment
from lean_finetune.data.encode.encoded_rows import EncodedRows, from_segments

TEXTS_PER_CALL = 128
PROBE = "Hello  world: é 你好.\n\nEnd of it"


class JoinedRowEncoder:
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

    def encode_rows(self, rows: Sequence[Sequence[Segment]]) -> EncodedRows:
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

    def __init__(self, segments: Sequence[Segment], guard: Guard):
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
