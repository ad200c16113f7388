"""Rows of text to rows of token ids, truncated to the longest length."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import LITERAL_START, Guard, TextSegment
from lean_finetune.data.chat.tokenizer_files import read_special_tokens
from lean_finetune.data.encode.tokenizer_engine import TOKENIZER_FILE, Engine
from lean_finetune.data.encode.whole_row_encoder import ControlCheck, EncodedRows, WholeRowEncoder, from_segments
from lean_finetune.data.format.format_base import PlainText

# Encoded rows limited to data.max_length: truncated, left out, or split into chunks.

DROP, SPLIT = "drop", "split"


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Parts of encoded rows of at most data.max_length tokens, as the token files store them."""

    rows: np.ndarray
    """int64, shape (chunks,): the encoded row of each chunk, ascending. Only split rows have several."""
    starts: np.ndarray
    """int64, shape (chunks,): index of its first token in the ids of all rows."""
    lengths: np.ndarray
    """int64, shape (chunks,): its tokens; the last one is trained."""
    supervised: np.ndarray
    """int64, shape (chunks,): its trained tokens except the first of the chunk, which nothing predicts; at least 1."""
    span_chunks: np.ndarray
    """int64, shape (spans,): the chunk of each span, ascending."""
    spans: np.ndarray
    """int64, shape (spans, 2): token positions in the chunk."""
    truncated: np.ndarray
    """Rows that lost trained tokens to truncation."""
    dropped_long: np.ndarray
    """Rows left out because of their length."""
    split: np.ndarray
    """Rows split into several chunks."""
    no_answer: np.ndarray
    """Rows without a supervised token in any chunk."""

    def select(self, wanted: np.ndarray) -> "Chunks":
        """The chunks for which `wanted`, bool of shape (chunks,), is true."""
        new_index = np.cumsum(wanted) - 1
        wanted_spans = wanted[self.span_chunks]
        return replace(
            self,
            rows=self.rows[wanted],
            starts=self.starts[wanted],
            lengths=self.lengths[wanted],
            supervised=self.supervised[wanted],
            span_chunks=new_index[self.span_chunks[wanted_spans]],
            spans=self.spans[wanted_spans],
        )


def limit_lengths(encoded: EncodedRows, max_length: int, over_length: str) -> Chunks:
    """Truncate, drop or split rows over `max_length`, and remove tokens behind the last trained one.

    Attention is causal, so tokens behind the last trained one change no loss and only cost memory. They do not count
    towards a row's length.
    """
    row_count = len(encoded.offsets) - 1
    rows, spans = encoded.span_rows, encoded.spans
    ends = np.zeros(row_count, np.int64)
    np.maximum.at(ends, rows, spans[:, 1])
    long = np.flatnonzero(ends > max_length)
    none = long[:0]
    if len(long) == 0:
        number = np.zeros(len(rows), np.int64)  # Of each span's chunk in its row.
    else:
        if over_length == DROP:
            fits = ends[rows] <= max_length
            rows, spans = rows[fits], spans[fits]
        rows, spans, number = _split_spans(rows, spans, max_length)
        if over_length != SPLIT:
            fits = number == 0
            rows, spans, number = rows[fits], spans[fits], number[fits]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:] != rows[:-1]) | (number[1:] != number[:-1])
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(rows)) - 1
    span_chunks = np.cumsum(is_new) - 1
    span_supervised = spans[:, 1] - np.maximum(spans[:, 0], 1)
    supervised = np.bincount(span_chunks, weights=span_supervised, minlength=len(first)).astype(np.int64)
    is_answered = np.zeros(row_count, bool)
    is_answered[rows[first][supervised > 0]] = True
    if over_length == DROP:
        is_answered[long] = True
    chunks = Chunks(
        rows=rows[first],
        starts=encoded.offsets[rows[first]] + number[first] * max_length,
        lengths=spans[last, 1] if len(first) else none,
        supervised=supervised,
        span_chunks=span_chunks,
        spans=spans,
        truncated=none if over_length in (DROP, SPLIT) else long,
        dropped_long=long if over_length == DROP else none,
        split=long if over_length == SPLIT else none,
        no_answer=np.flatnonzero(~is_answered),
    )
    return chunks.select(supervised > 0)


def _split_spans(rows: np.ndarray, spans: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split spans at multiples of `size`: (rows, spans in their chunk, number of the chunk in its row)."""
    first, last = spans[:, 0] // size, (spans[:, 1] - 1) // size
    parts = last - first + 1
    span = np.repeat(np.arange(len(rows)), parts)
    number = first[span] + np.arange(len(span)) - np.repeat(np.cumsum(parts) - parts, parts)
    inside = np.clip(spans[span] - (number * size)[:, None], 0, size)
    return rows[span], inside, number


# The tokenizer of a model directory: rows of text segments become token ids with trained spans.

# Words in the names of control tokens without a use.
UNUSED_WORDS = ("pad", "reserved", "unused", "extra_id")
TRAINED_ROLES = ("bos_token", "eos_token")


class RowTokenizer:
    """Encodes rows without importing transformers.

    Each segment is encoded separately, so no token crosses from the prompt into the answer, and the prompt's tokens
    are the same as at inference. Tokenizers that add a space before every text use `WholeRowEncoder` instead.
    """

    def __init__(self, directory: Path, engine: Engine):
        """Use an engine of the directory's tokenizer.json, and read tokenizer_config.json.

        Raises UserError if a special token is not in the vocabulary, or the tokenizer changes text.
        """
        self.directory = directory
        self._tokenizer, self._engine = engine.tokenizer, engine
        self.special_tokens = read_special_tokens(directory)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocab_size:
            raise UserError(f"model.name: {directory / TOKENIZER_FILE} has no tokens; download or save it again")
        added = self._tokenizer.get_added_tokens_decoder()
        control = {number: token.content for number, token in added.items() if token.special}
        self.guard = Guard(list(control.values()))
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self._id_of("pad_token")  # Refuses a pad_token that is not in the vocabulary.
        self.pad = choose_pad(control, self.special_tokens, self._tokenizer.token_to_id)
        self._joined = WholeRowEncoder(self._tokenizer, self.guard, directory) if self._adds_spaces() else None
        self._control = ControlCheck(self._tokenizer, self.guard, self.vocab_size, is_whole=self._joined is not None)

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

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def texts_of(self, ids: Iterable[int]) -> list[str]:
        """The control tokens with these ids; other ids are left out."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [added[number].content for number in ids if number in added]

    def _adds_spaces(self) -> bool:
        """Whether the tokenizer adds a space before every text, so that separate segments decode to another text."""
        ids = [*self._encode("Hello"), *self._encode("world")]
        return bool(self._tokenizer.decode(ids, skip_special_tokens=False) != "Helloworld")

    def _encode(self, text: str) -> list[int]:
        """The ids of a text; control tokens in it become their ids, and nothing is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cache  # noqa: B019 - the tokenizer lives as long as the process
    def _plain_ids(self, token: str) -> list[int]:
        """The ids of a control token's characters, without the control token's id."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self._encode(token)
        finally:
            self._tokenizer.encode_special_tokens = False

    @property
    def eos_text(self) -> str:
        """The end-of-sequence token. Raises UserError if the tokenizer has none."""
        eos = self.special_tokens.get("eos_token")
        if eos is None:
            raise UserError(
                f"model.name: the tokenizer in {self.directory} has no eos_token, so the model could not learn to "
                "stop; set it in tokenizer_config.json"
            )
        return eos

    @cached_property
    def bos_text(self) -> str:
        """The BOS token if the tokenizer itself adds it before a text, else an empty text."""
        first = self._tokenizer.encode("Hello", add_special_tokens=True).ids[0]
        return self.special_tokens["bos_token"] if self.bos_id is not None and first == self.bos_id else ""

    def plain_segments(self, example: PlainText, train_on: str) -> list[TextSegment]:
        """Segments of guarded plain text, with BOS in front where the tokenizer adds it, and EOS at the end.

        With `train_on` all, the prompt is trained too. Raises UserError if the tokenizer has no end-of-sequence token.
        """
        prompt, completion = self.bos_text + example.prompt, example.completion + self.eos_text
        segments = TextSegment(text=prompt, trained=train_on == "all"), TextSegment(text=completion, trained=True)
        return [segment for segment in segments if segment.text]

    def encode_rows(self, rows: Sequence[Sequence[TextSegment]]) -> EncodedRows:
        """Encode rows of guarded segments."""
        if self._joined is not None:
            return self._joined.encode_rows(rows)
        texts: list[str] = []
        trained: list[bool] = []
        counts: list[int] = []
        literals: dict[int, list[int]] = {}
        for row in rows:
            before = len(texts)
            for text, is_trained in row:
                if LITERAL_START not in text:
                    texts.append(text)
                    trained.append(is_trained)
                    continue
                for part, is_literal in self.guard.split(text):
                    if is_literal:
                        literals[len(texts)] = self._plain_ids(part)
                    texts.append("" if is_literal else part)
                    trained.append(is_trained)
            counts.append(len(texts) - before)
        ids, lengths, failed = self._engine.encode(texts)
        if literals:
            ids, lengths = _insert(ids, lengths, literals)
        return from_segments(ids, lengths, np.array(trained, bool), np.array(counts, np.int64), failed)

    def cut_tokens(self, rows: Sequence[Sequence[TextSegment]], encoded: EncodedRows) -> dict[int, str]:
        """By row, the first control token of its text that its ids lack or add; rows without a fault are not in it."""
        return self._control.faults(rows, encoded)

    def differs_as_a_whole(self, segments: Sequence[TextSegment], ids: np.ndarray) -> bool | None:
        """Whether a row has other ids when encoded as one text.

        None where they cannot be compared: rows with control tokens as text, and rows that are one text anyway.
        """
        text = "".join(segment.text for segment in segments)
        if self._joined is not None or LITERAL_START in text:
            return None
        return not np.array_equal(self._engine.encode([text]).values, ids)


def _insert(ids: np.ndarray, lengths: np.ndarray, literals: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(ids, lengths) with the ids of literals inserted at their empty texts; `literals` maps a text's index to ids."""
    indices = np.fromiter(literals, np.int64, len(literals))
    sizes = np.fromiter(map(len, literals.values()), np.int64, len(literals))
    starts = np.cumsum(lengths) - lengths
    values = np.array([number for literal in literals.values() for number in literal], np.int32)
    lengths = lengths.copy()
    lengths[indices] = sizes
    return np.insert(ids, np.repeat(starts[indices], sizes), values), lengths


class Pad(NamedTuple):
    """The padding token."""

    number: int
    """Its id."""
    reason: str
    is_spare: bool
    """Whether the token has no other use, so that a trained one is an error."""


def choose_pad(
    control: Mapping[int, str], special_tokens: Mapping[str, str], id_of: Callable[[str], int | None]
) -> Pad:
    """The padding token: one that is never trained, so that padding cannot be mistaken for an answer.

    `control` has the control tokens by id, `special_tokens` the bos_token, eos_token, pad_token, … as text.
    """
    taken = {special_tokens[role] for role in TRAINED_ROLES if role in special_tokens}

    def spare(role: str) -> int | None:
        token = special_tokens.get(role)
        return None if token is None or token in taken else id_of(token)

    if (number := spare("pad_token")) is not None:
        return Pad(number, f"it is the tokenizer's pad_token {special_tokens['pad_token']!r}", True)
    for word in UNUSED_WORDS:
        for number, token in sorted(control.items()):
            if word in token.lower() and token not in taken:
                return Pad(number, f"the tokenizer has no pad_token, but a control token {token!r}", True)
    if (number := spare("unk_token")) is not None:
        return Pad(number, f"it is the tokenizer's unk_token {special_tokens['unk_token']!r}", True)
    reason = (
        "the tokenizer has no unused token for padding; this one is trained too, which changes nothing here: "
        "trained tokens are stored as spans, never found by id"
    )
    eos = special_tokens.get("eos_token")
    return Pad((None if eos is None else id_of(eos)) or 0, reason, False)
