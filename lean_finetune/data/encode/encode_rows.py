"""A pinned tokenizer, and rows of text segments as token ids with the spans that are trained."""

import json
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import LITERAL_START, Guard
from lean_finetune.data.chat.trained_segments import Segment, plain_segments
from lean_finetune.data.encode.encode_joined import WholeTextEncoder
from lean_finetune.data.encode.encoded_rows import EncodedRows, from_units
from lean_finetune.data.encode.engine_choice import Opened
from lean_finetune.data.encode.padding_token import choose_pad
from lean_finetune.data.format.example import Plain


class RowTokenizer:
    """The tokenizer of a model directory; transformers is not needed for it.

    Each segment is encoded by itself, so no token crosses from the prompt into the answer, and the prompt's tokens
    are those the model is given at inference. A tokenizer that puts a space before each text it is given encodes the
    row as one text instead: see `whole`.
    """

    def __init__(self, directory: Path, opened: Opened):
        """Take what was opened from tokenizer.json, and load tokenizer_config.json.

        Raises:
            UserError: a special token is unknown to the tokenizer, or decoding its ids does not give the text.
        """
        self.directory = directory
        self._tokenizer, self._engine = opened.tokenizer, opened.engine
        self.special_tokens = _special_tokens(directory)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        control = {number: token.content for number, token in added.items() if token.special}
        self.guard = Guard(list(control.values()))
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self._id_of("pad_token")  # one that is named has to be known
        pad = choose_pad(control, self.special_tokens, self._tokenizer.token_to_id)
        self.pad_id, self.pad_reason, self.pad_is_spare = pad
        self._whole = None if self._joins() else WholeTextEncoder(self._tokenizer, self.guard, directory)

    def _id_of(self, role: str) -> int | None:
        """The id of bos_token, eos_token or pad_token; None when the tokenizer has none."""
        token = self.special_tokens.get(role)
        if token is None:
            return None
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise UserError(
                f"model.name: {role} {token!r} of {self.directory / 'tokenizer_config.json'} is not in tokenizer.json; "
                "save the tokenizer again"
            )
        return int(number)

    def _joins(self) -> bool:
        """Whether texts encoded apart decode to the same as one: not where a space is put before each."""
        parts = ["Hello", "world"]
        ids = [number for part in parts for number in self._encode(part)]
        return bool(self._tokenizer.decode(ids, skip_special_tokens=False) == "".join(parts))

    @property
    def encodes_whole_text(self) -> bool:
        """Whether a row is encoded as one text."""
        return self._whole is not None

    def _encode(self, text: str) -> list[int]:
        """One text's ids, control tokens as such, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cache  # noqa: B019 - one tokenizer lives as long as its process
    def _plain_ids(self, token: str) -> list[int]:
        """The ids of a control token's characters, never its own id."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self._encode(token)
        finally:
            self._tokenizer.encode_special_tokens = False

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token.

        Raises:
            UserError: the tokenizer has none.
        """
        eos = self.special_tokens.get("eos_token")
        if eos is None:
            raise UserError(
                f"model.name: the tokenizer in {self.directory} has no eos_token, so the model could not learn to "
                "stop; set it in tokenizer_config.json"
            )
        return eos

    @cached_property
    def bos_text(self) -> str:
        """The BOS token when the tokenizer puts it in front of a text by itself, else nothing."""
        first = self._tokenizer.encode("Hello", add_special_tokens=True).ids[0]
        return self.special_tokens["bos_token"] if self.bos_id is not None and first == self.bos_id else ""

    def plain_segments(self, example: Plain, train_on: str) -> list[Segment]:
        """Guarded plain text as the tokenizer itself would start and end it.

        Raises:
            UserError: the tokenizer has no end-of-sequence token.
        """
        return plain_segments(example, bos=self.bos_text, eos=self.eos_text, train_on=train_on)

    def encode_rows(self, rows: Sequence[Sequence[Segment]]) -> EncodedRows:
        """Encode rows of guarded segments."""
        if self._whole is not None:
            return self._whole.encode_rows(rows)
        units: list[str] = []
        trained: list[bool] = []
        counts: list[int] = []
        literals: dict[int, list[int]] = {}
        for row in rows:
            before = len(units)
            for text, is_trained in row:
                if LITERAL_START not in text:
                    units.append(text)
                    trained.append(is_trained)
                    continue
                for piece, is_literal in self.guard.pieces(text):
                    if is_literal:
                        literals[len(units)] = self._plain_ids(piece)
                    units.append("" if is_literal else piece)
                    trained.append(is_trained)
            counts.append(len(units) - before)
        ids, lengths, failed = self._engine.encode(units)
        if literals:
            ids, lengths = _insert(ids, lengths, literals)
        return from_units(ids, lengths, np.array(trained, bool), np.array(counts, np.int64), failed)

    def encodes_otherwise(self, segments: Sequence[Segment], ids: np.ndarray) -> bool | None:
        """Whether a row's text has other ids when encoded as one; None where that says nothing.

        It says nothing of rows with control tokens as text, and of tokenizers that encode rows as one text anyway.
        """
        text = "".join(segment.text for segment in segments)
        if self._whole is not None or LITERAL_START in text:
            return None
        return not np.array_equal(self._engine.encode([text]).values, ids)


def _insert(ids: np.ndarray, lengths: np.ndarray, literals: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, lengths) with the ids of literals put in the place of their empty units."""
    units = np.fromiter(literals, np.int64, len(literals))
    sizes = np.fromiter(map(len, literals.values()), np.int64, len(literals))
    starts = np.cumsum(lengths) - lengths
    values = np.array([number for literal in literals.values() for number in literal], np.int32)
    lengths = lengths.copy()
    lengths[units] = sizes
    return np.insert(ids, np.repeat(starts[units], sizes), values), lengths


def _special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, pad_token, … as text; older tokenizers keep them in a file of their own."""
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8"))
            named |= {key: value for key, value in values.items() if value is not None}
    found = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
