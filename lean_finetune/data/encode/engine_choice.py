"""Which engine turns text into ids: the tokenizers library, or, where it gives the same ids, tiktoken."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.data.encode.encoder import TOKENIZER_FILE, Engine, TokenizersEngine, load_tokenizer
from lean_finetune.data.encode.engine_probes import probe_texts
from lean_finetune.data.encode.tiktoken_engine import NotExact, TiktokenEngine, check_merges

SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A tokenizer with the engine that encodes for it; not to be shared by threads."""

    tokenizer: Tokenizer
    engine: Engine


def open_engine(name: str, directory: Path) -> Opened:
    """The tokenizer of a model directory with the engine `tokenizers` or `tiktoken`.

    Raises:
        NotExact: tiktoken cannot stand for this tokenizer.
    """
    tokenizer = load_tokenizer(directory)
    plain = TokenizersEngine(tokenizer)
    if name == "tokenizers":
        return Opened(tokenizer=tokenizer, engine=plain)
    return Opened(tokenizer=tokenizer, engine=TiktokenEngine(_read_spec(directory), plain))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What encodes, and why."""

    name: str
    """`tokenizers` or `tiktoken`."""
    reason: str
    opened: Opened
    """Opening it takes as long as thousands of rows: whoever proved it hands it on."""


def choose_engine(requested: str, directory: Path, sample_texts: Sequence[str]) -> Choice:
    """Choose tiktoken only where it gives the same ids as the tokenizers library.

    It is held to that on texts that are hard, on every kind of character, and on the given sample of the data. No
    thread is started, so worker processes can be forked afterwards.

    Raises:
        UserError: `requested` is tiktoken, and it does not.
    """
    plain = open_engine("tokenizers", directory)
    if requested == "tokenizers":
        return Choice(name=requested, reason="run.tokenizer_engine says so", opened=plain)
    tokenizer = plain.tokenizer
    try:
        spec = _read_spec(directory)
        engine = TiktokenEngine(spec, plain.engine)
        check_merges(spec, tokenizer)
        compared = _compare(engine, tokenizer, sample_texts)
    except NotExact as fault:
        if requested == "tiktoken":
            raise UserError(
                f"run.tokenizer_engine: tiktoken cannot stand for the tokenizer in {directory}: {fault}; "
                "set auto or tokenizers"
            ) from None
        return Choice(name="tokenizers", reason=f"tiktoken cannot stand for it: {fault}", opened=plain)
    reason = f"it gave the ids of the tokenizers library on {compared} texts"
    return Choice(name="tiktoken", reason=reason, opened=Opened(tokenizer=tokenizer, engine=engine))


def _read_spec(directory: Path) -> dict[str, Any]:
    """The content of tokenizer.json."""
    return dict(orjson.loads((directory / TOKENIZER_FILE).read_bytes()))


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
