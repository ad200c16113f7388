"""Choice of the engine that turns text into ids: tiktoken where it gives the same ids as tokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from lean_finetune.core.errors import UserError
from lean_finetune.data.encode.engine_probes import probe_texts
from lean_finetune.data.encode.tiktoken_engine import NotEquivalent, TiktokenEngine, check_merges
from lean_finetune.data.encode.tokenizers_engine import TOKENIZER_FILE, Engine, TokenizersEngine, read_tokenizer

SHOWN_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """The chosen engine, and the reason."""

    name: str
    """`tokenizers` or `tiktoken`."""
    reason: str
    engine: Engine


def load_engine(name: str, directory: Path) -> Engine:
    """The engine `tokenizers` or `tiktoken` of a model directory.

    Raises NotEquivalent if tiktoken would give other ids.
    """
    plain = TokenizersEngine(read_tokenizer(directory))
    return plain if name == "tokenizers" else TiktokenEngine(_read_spec(directory), plain)


def choose_engine(requested: str, directory: Path, sample_texts: Sequence[str]) -> EngineChoice:
    """Choose tiktoken only where it gives the same ids as the tokenizers library.

    Both encode edge cases, every kind of character, and the sample of the data. No thread is started, so worker
    processes can be forked afterwards. Raises UserError if `requested` is tiktoken, and its ids differ.
    """
    plain = load_engine("tokenizers", directory)
    if requested == "tokenizers":
        return EngineChoice(name=requested, reason="run.tokenizer_engine says so", engine=plain)
    try:
        spec = _read_spec(directory)
        engine = TiktokenEngine(spec, plain)
        check_merges(spec, plain.tokenizer)
        compared = _compare(engine, plain.tokenizer, sample_texts)
    except NotEquivalent as fault:
        if requested == "tiktoken":
            raise UserError(
                f"run.tokenizer_engine: tiktoken cannot replace the tokenizer in {directory}: {fault}; "
                "set auto or tokenizers"
            ) from None
        return EngineChoice(name="tokenizers", reason=f"tiktoken cannot replace it: {fault}", engine=plain)
    reason = f"it gave the ids of the tokenizers library on {compared} texts"
    return EngineChoice(name="tiktoken", reason=reason, engine=engine)


def _read_spec(directory: Path) -> dict[str, Any]:
    """The content of tokenizer.json."""
    return dict(orjson.loads((directory / TOKENIZER_FILE).read_bytes()))


def _compare(engine: Engine, tokenizer: Tokenizer, sample_texts: Sequence[str]) -> int:
    """The number of texts compared."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    # No encoder accepts lone surrogates; Guard replaces them before rows are encoded.
    texts = [*probe_texts(added), *(text.encode(errors="replace").decode() for text in sample_texts)]
    for text in texts:
        # One by one: a batch would start threads.
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        if engine.encode([text]).values.tolist() != expected:
            shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            raise NotEquivalent(f"it gives other ids for {shown!r}")
    return len(texts)
