"""Which engine turns text into ids: the tokenizers library, or, where it gives the same ids, tiktoken."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from stages.errors import UserError
from stages.tokenize.bytepairs import NotExact, TiktokenEngine, check_merges
from stages.tokenize.encoder import TOKENIZER_FILE, Engine, TokenizersEngine, load_tokenizer
from stages.tokenize.probe import probe_texts

SHOWN_CHARACTERS = 40


def open_engine(name: str, directory: Path, tokenizer: Tokenizer) -> Engine:
    """The engine `tokenizers` or `tiktoken`.

    Raises:
        NotExact: tiktoken cannot stand for this tokenizer.
    """
    plain = TokenizersEngine(tokenizer)
    if name == "tokenizers":
        return plain
    return TiktokenEngine(json.loads((directory / TOKENIZER_FILE).read_bytes()), plain)


def choose_engine(requested: str, directory: Path, sample_texts: Sequence[str]) -> tuple[str, str]:
    """(engine, why that one): tiktoken only where it gives the same ids as the tokenizers library.

    It is held to that on texts that are hard, on every kind of character, and on the given sample of the data. No
    thread is started, so worker processes can be forked afterwards.

    Raises:
        UserError: `requested` is tiktoken, and it does not.
    """
    if requested == "tokenizers":
        return requested, "run.tokenizer_engine says so"
    tokenizer = load_tokenizer(directory)
    try:
        engine = open_engine("tiktoken", directory, tokenizer)
        check_merges(json.loads((directory / TOKENIZER_FILE).read_bytes()), tokenizer)
        compared = _compare(engine, tokenizer, sample_texts)
    except NotExact as fault:
        if requested == "tiktoken":
            raise UserError(
                f"run.tokenizer_engine: tiktoken cannot stand for the tokenizer in {directory}: {fault}; "
                "set auto or tokenizers"
            ) from None
        return "tokenizers", f"tiktoken cannot stand for it: {fault}"
    return "tiktoken", f"it gave the ids of the tokenizers library on {compared} texts"


def _compare(engine: Engine, tokenizer: Tokenizer, sample_texts: Sequence[str]) -> int:
    """The number of texts on which the engine was held to the tokenizers library.

    Raises:
        NotExact: naming the first text that it encodes to other ids.
    """
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    # Rows may hold lone surrogates, which no encoder takes; the guard replaces them before a text is encoded.
    texts = [*probe_texts(added), *(text.encode(errors="replace").decode() for text in sample_texts)]
    for text in texts:
        # Alone, as a batch would start threads.
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        if engine.encode([text]).values.tolist() != expected:
            raise NotExact(f"it gives other ids for {_show(text)}")
    return len(texts)


def _show(text: str) -> str:
    """A text for a message, cut to stay readable."""
    return repr(text) if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]!r}..."
