"""The settings that decide the tokens, and the key of everything that decides the bytes of data/tokens."""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import sha256_json
from lean_finetune.data.format.format_base import SourceFormat
from lean_finetune.pinning.code import code_hashes

TOKENIZE_MODULE = "lean_finetune.data.shards.tokenize_run"
"""Module whose imports are the code that makes tokens."""
LIBRARIES = ("jinja2", "numpy", "orjson", "pyarrow", "tiktoken", "tokenizers")
KEY_DIGITS = 32


@dataclass(frozen=True, kw_only=True)
class TokenSettings:
    """Everything besides its bytes that decides the tokens of a block. Each worker gets it once."""

    tokenizer_directory: Path
    sources: tuple[SourceFormat, ...]
    """In the order of the data lock."""
    ignore_columns: tuple[str, ...]
    """Columns that are dropped before a row is read."""
    files: int
    """Number of files of all sources."""
    chat_template: str
    """`tokenizer`, `chatml`, or the text of the user's template."""
    template_date: str
    """Date that templates get as today, YYYY-MM-DD."""
    train_on: str
    max_length: int
    over_length: str
    on_bad_row: str
    drop_duplicates: bool
    heldout_fraction: float
    heldout_seed: int
    engine: str
    """`tokenizers` or `tiktoken`."""


def token_inputs(
    data_lock: Mapping[str, Any], tokenizer_lock: Mapping[str, Any], settings: TokenSettings, max_rows: int | None
) -> dict[str, str]:
    """By name, what the tokens depend on. The engine is left out: it changes no token."""
    values = asdict(settings)
    # The tokenizer's file hashes identify it, wherever it is.
    del values["tokenizer_directory"], values["engine"]
    return {
        "data": sha256_json(data_lock),
        "tokenizer": sha256_json(tokenizer_lock["files"]),
        "parameters": sha256_json({**values, "max_rows": max_rows}),
        "code": sha256_json(code_hashes(TOKENIZE_MODULE)),
        "libraries": ", ".join(
            [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in LIBRARIES)]
        ),
    }


def input_key(inputs: Mapping[str, str]) -> str:
    """The key of `token_inputs`: equal keys give equal bytes."""
    return sha256_json(dict(inputs))[:KEY_DIGITS]
