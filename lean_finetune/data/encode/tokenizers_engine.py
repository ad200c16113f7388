"""The engine interface, and the engine that uses the tokenizers library."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from lean_finetune.core.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
TEXTS_PER_CALL = 512
# An encoding takes over a hundred bytes for each token, so long texts are encoded in small batches.
CHARACTERS_PER_CALL = 1 << 20


class EncodedTexts(NamedTuple):
    """Texts as token ids."""

    values: np.ndarray
    """int32: the ids of all texts, concatenated."""
    lengths: np.ndarray
    """int64, shape (texts,): tokens of each text."""
    failed: list[int]
    """Indices of texts that the engine could not encode, so that the tokenizers library did."""


class Engine(Protocol):
    """Encodes texts, in one thread: control tokens in them become their ids, and nothing is added."""

    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of each text."""


class TokenizersEngine:
    """Encodes with the tokenizers library, with its own threads."""

    def __init__(self, tokenizer: Tokenizer):
        """Encode with this tokenizer."""
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of each text."""
        values = array("i")
        lengths = array("q")
        for batch in _batches(texts):
            for encoding in self.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = encoding.ids
                values.fromlist(ids)
                lengths.append(len(ids))
        return EncodedTexts(np.frombuffer(values, np.int32), np.frombuffer(lengths, np.int64), [])


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory, without the truncation and padding saved in it.

    Raises UserError if its file is damaged.
    """
    try:
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    except Exception as error:  # tokenizers raises a plain Exception.
        raise UserError(
            f"model.name: {directory / TOKENIZER_FILE} is not a tokenizer ({error}); save or download it again"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in batches of bounded size."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == TEXTS_PER_CALL or characters >= CHARACTERS_PER_CALL:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
