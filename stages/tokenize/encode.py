"""A pinned tokenizer, and rows of text segments as token ids with the spans that are trained."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stages.errors import UserError
from stages.tokenize.chat import ChatTemplate, Segment, read_template
from stages.tokenize.guard import Guard
from stages.tokenize.rows import Plain


@dataclass(frozen=True, kw_only=True)
class EncodedRow:
    """One row as tokens."""

    ids: np.ndarray
    """int32, shape (tokens,)."""
    spans: np.ndarray
    """int32, shape (spans, 2): half-open token positions that are trained, ascending and disjoint."""

    @property
    def trained(self) -> int:
        """Trained tokens."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    @property
    def supervised(self) -> int:
        """Trained tokens that have a token before them to be predicted from."""
        return int((self.spans[:, 1] - np.maximum(self.spans[:, 0], 1)).sum())

    def cut(self, max_length: int) -> "EncodedRow":
        """The row without tokens from `max_length` on, and without any behind its last trained token.

        Attention is causal, so tokens behind the last trained one change no loss: they would only cost memory.
        """
        spans = np.minimum(self.spans, max_length)
        spans = spans[spans[:, 0] < spans[:, 1]]
        end = int(spans[-1, 1]) if len(spans) else 0
        return EncodedRow(ids=self.ids[:end], spans=spans)


class RowTokenizer:
    """The tokenizer of a model directory; transformers is not needed for it.

    Each segment is encoded by itself, so no token crosses from the prompt into the answer, and the prompt's tokens
    are those the model is given at inference.
    """

    def __init__(self, directory: Path):
        """Load tokenizer.json and tokenizer_config.json.

        Raises:
            UserError: a special token is unknown to the tokenizer, or segments cannot be encoded one by one.
        """
        self.directory = directory
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # A saved tokenizer may carry the cut and the padding of its last use.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_config(directory)
        self.special_tokens = _special_tokens(directory, self._config)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        control = {n: token.content for n, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._control_ids = np.array(sorted(control), np.int32)
        self.guard = Guard(sorted(control.values()))
        self.eos_id = self._id_of("eos_token")
        self.pad_id = self._id_of("pad_token")
        self._check_joins()

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

    def _check_joins(self) -> None:
        """Refuse a tokenizer that puts a space before each text it is given: a segment would not be what it says."""
        parts = ["Hello", "world"]
        ids = [number for part in parts for number in self._encode(part)]
        joined = self._tokenizer.decode(ids, skip_special_tokens=False)
        if joined != "".join(parts):
            raise UserError(
                f"model.name: {self.directory / 'tokenizer.json'} joins {parts} to {joined!r}, so an answer encoded "
                "apart from its prompt would change; only tokenizers that add and drop no spaces are supported"
            )

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

    def template(self) -> ChatTemplate:
        """The tokenizer's own chat template.

        Raises:
            UserError: it has none, or one without generation marks.
        """
        source, name = read_template(self.directory, self._config)
        return ChatTemplate(source, self.special_tokens, name)

    def plain_segments(self, example: Plain) -> list[Segment]:
        """Prompt and completion as the tokenizer itself would start and end a text: BOS where it adds one, then EOS.

        Raises:
            UserError: the tokenizer has no end-of-sequence token.
        """
        eos = self.special_tokens.get("eos_token")
        if eos is None:
            raise UserError(
                f"model.name: the tokenizer in {self.directory} has no eos_token, so the model could not learn to "
                "stop; set it in tokenizer_config.json"
            )
        segments = [
            Segment(text=self._bos_text() + example.prompt, trained=False),
            Segment(text=example.completion + eos, trained=True),
        ]
        return [segment for segment in segments if segment.text]

    @cache  # noqa: B019 - as above
    def _bos_text(self) -> str:
        """The BOS token when the tokenizer puts it in front of a text by itself, else nothing."""
        bos_id = self._id_of("bos_token")
        first = self._tokenizer.encode("Hello", add_special_tokens=True).ids[0]
        return self.special_tokens["bos_token"] if bos_id is not None and first == bos_id else ""

    def encode_rows(self, rows: Sequence[Sequence[Segment]]) -> list[EncodedRow]:
        """Encode rows of segments together, on all threads of the tokenizers library."""
        pieces = [[self.guard.pieces(segment.text) for segment in row] for row in rows]
        texts = [text for row in pieces for segment in row for text, literal in segment if not literal]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [self._join(row, row_pieces, encoded) for row, row_pieces in zip(rows, pieces, strict=True)]

    def _join(self, row: Sequence[Segment], pieces: list[list[tuple[str, bool]]], encoded: Any) -> EncodedRow:
        """Put one row together from its pieces, taking the encodings of those that are not literal in order."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for segment, segment_pieces in zip(row, pieces, strict=True):
            start = len(ids)
            for text, literal in segment_pieces:
                ids += self._plain_ids(text) if literal else next(encoded).ids
            if segment.trained and len(ids) > start:
                spans.append((start, len(ids)))
        return EncodedRow(ids=np.array(ids, np.int32), spans=np.array(spans, np.int32).reshape(-1, 2))

    def ends_turn(self, row: EncodedRow) -> bool:
        """Whether the last trained span holds a control token, from which the model learns where to stop."""
        if len(row.spans) == 0:
            return False
        start, end = row.spans[-1]
        return bool(np.isin(row.ids[start:end], self._control_ids).any())


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    path = directory / "tokenizer_config.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, pad_token, … as text; older tokenizers keep them in a file of their own."""
    path = directory / "special_tokens_map.json"
    named = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    named |= {key: value for key, value in config.items() if value is not None}
    found = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
