"""Texts into ids by the tokenizers library, and what any engine in its place has to give."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TEXTS_PER_CALL = 512
# An encoding holds over a hundred bytes for each token, so long texts are encoded a few at a time.
CHARACTERS_PER_CALL = 1 << 20


class Encoded(NamedTuple):
    """Texts as ids."""

    values: np.ndarray
    """int32: the ids of all texts, one after the other."""
    lengths: np.ndarray
    """int64, shape (texts,)."""
    failed: list[int]
    """Places of texts that the engine gave up on and the tokenizers library encoded."""


class Engine(Protocol):
    """Encodes texts, control tokens in them as such, nothing added."""

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of each text."""


class TokenizersEngine:
    """The tokenizers library, on as many threads as it is allowed."""

    def __init__(self, tokenizer: Tokenizer):
        """Encode with this tokenizer."""
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of each text."""
        values = array("i")
        lengths = array("q")
        for some in _calls(texts):
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=False):
                ids = encoding.ids
                values.fromlist(ids)
                lengths.append(len(ids))
        return Encoded(np.frombuffer(values, np.int32), np.frombuffer(lengths, np.int64), [])


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory, without the cut and the padding of its last use."""
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _calls(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in lists of bounded size."""
    some: list[str] = []
    characters = 0
    for text in texts:
        some.append(text)
        characters += len(text)
        if len(some) == TEXTS_PER_CALL or characters >= CHARACTERS_PER_CALL:
            yield some
            some, characters = [], 0
    if some:
        yield some
