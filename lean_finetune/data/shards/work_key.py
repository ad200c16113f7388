"""What decides the bytes of data/tokens, as one key: work done under the same key is the same work."""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from lean_finetune.core.atomic_files import sha256_json
from lean_finetune.data.format.token_settings import Settings
from lean_finetune.pinning.code import code_hashes

TOKENIZING = "lean_finetune.data.shards.tokenize_run"
"""The module whose imports are the code that makes tokens."""
LIBRARIES = ("jinja2", "numpy", "orjson", "pyarrow", "tiktoken", "tokenizers")
KEY_DIGITS = 32


def made_of(
    data_lock: Mapping[str, Any], tokenizer_lock: Mapping[str, Any], settings: Settings, max_rows: int | None
) -> dict[str, str]:
    """By name, what the tokens are made of; the engine is not among it, since it changes no token."""
    values = asdict(settings)
    # Where the tokenizer lies says nothing of what it is; its files' hashes do.
    del values["tokenizer_directory"], values["engine"]
    return {
        "data": sha256_json(data_lock),
        "tokenizer": sha256_json(tokenizer_lock["files"]),
        "parameters": sha256_json({**values, "max_rows": max_rows}),
        "code": sha256_json(code_hashes(TOKENIZING)),
        "libraries": ", ".join(
            [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in LIBRARIES)]
        ),
    }


def key_of(parts: Mapping[str, str]) -> str:
    """The key of what the tokens are made of."""
    return sha256_json(dict(parts))[:KEY_DIGITS]
