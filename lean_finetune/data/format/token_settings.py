"""What decides the tokens of a block, besides its bytes; sent once to every worker."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class SourceShape:
    """How the rows of one source are read."""

    format: str
    """A shape of rows, never `auto`."""
    columns: Mapping[str, str]
    """Column of the source by name of the shape's key; empty where the names are the same."""
    is_heldout: bool = False
    """Whether all its rows are held out."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of params.yaml, and of the pinned tokenizer, that decides the tokens."""

    tokenizer_directory: Path
    sources: tuple[SourceShape, ...]
    """In the order of the data lock."""
    ignore_columns: tuple[str, ...]
    """Columns that are not read, as if no row had them."""
    files: int
    """Of all sources."""
    chat_template: str
    """`tokenizer`, `chatml`, or the text of the user's template."""
    template_date: str
    """What templates are given as today, YYYY-MM-DD."""
    train_on: str
    max_length: int
    over_length: str
    on_bad_row: str
    drop_duplicates: bool
    heldout_fraction: float
    heldout_seed: int
    engine: str
    """`tokenizers` or `tiktoken`: decided, and proven, before any block is encoded."""


@dataclass(kw_only=True)
class BlockTokens:
    """What became of a block."""

    train: pa.RecordBatch
    """Rows in order, of `token_schema`; with no row when all went elsewhere."""
    heldout: pa.RecordBatch
    train_supervised: np.ndarray
    """Supervised tokens of each row of `train`, int32."""
    heldout_supervised: np.ndarray
    train_digests: np.ndarray
    """64-bit hash of each row's ids and spans, uint64; empty unless `drop_duplicates`."""
    heldout_digests: np.ndarray
    counts: dict[str, int]
    """Figures of the block, to be added up: see `COUNTS`."""
    rejects: list[tuple[int, int, str]] = field(default_factory=list)
    """(row number, line, reason) of rows that were not used, in order; a bad row's reason is its fault."""
    first: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(row number, line) of the first row that each count met."""
    unread: list[str] = field(default_factory=list)
    """Columns that no row of this shape is read from, ascending, the first `UNREAD_LISTED`."""


UNREAD_LISTED = 32
"""Names of unread columns that are noted of a source: rows may have any number of keys."""


COUNTS = (
    "rows",  # read, empty lines not counted
    "bad_rows",  # that on_bad_row: skip left out
    "empty_answer_rows",  # left out: an answer in them is empty
    "reasoning_left_out_rows",  # the template shows a trained turn without its reasoning, as another turn follows
    "truncated_rows",  # lost trained tokens to max_length
    "dropped_long_rows",  # longer than max_length, over_length: drop
    "split_rows",  # cut into several, over_length: split
    "no_answer_rows",  # left out: no supervised token remained (a split row counts where none of its pieces has one)
    "control_tokens_as_text",
    "surrogates_replaced",
    "engine_fallback_rows",  # that the faster engine could not encode
    "sampled_rows",  # also encoded as one text, to see whether the ids differ
    "sampled_rows_differing",
)
