"""The settings that decide the tokens."""

from dataclasses import dataclass
from pathlib import Path

from lean_finetune.data.format.format_base import SourceFormat


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
