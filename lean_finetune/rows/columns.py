"""What rows carry besides tokens, on its way from their source to the files of tokens.

A capability adds a subclass of `RowColumns`, listed in `lean_finetune/islands/columns.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from lean_finetune.config.data_schema import Data
    from lean_finetune.data.chat.control_tokens import TextSegment
    from lean_finetune.data.encode.row_tokenizer import Chunks, RowTokenizer
    from lean_finetune.data.encode.whole_row_encoder import EncodedRows
    from lean_finetune.data.format.format_base import Example, SourceFormat
    from lean_finetune.data.read.row_block import RowBlock
    from lean_finetune.objectives.row_kind import RowKind


@dataclass(frozen=True, kw_only=True)
class InspectedRows:
    """What is known of a run's rows before they are tokenized."""

    data: "Data"
    tokenizer_lock: Mapping[str, Any]
    kind: "RowKind"
    sources: "Sequence[SourceFormat]"
    """How the rows of each source are read."""


@dataclass(frozen=True, kw_only=True)
class RowColumns(ABC):
    """What the rows of a run carry: how it is read, and its columns in shards and index.

    A value of it belongs to one row of tokens. Workers get copies, so it holds settings alone until it is `opened`.
    """

    rows_text: ClassVar[str] = ""
    """How messages call rows that have a value."""
    params: ClassVar[tuple[str, ...]] = ()
    """Keys of section data that act on such rows alone."""
    fields: ClassVar[tuple[pa.Field, ...]] = ()
    """Columns of the shards."""
    index_fields: ClassVar[tuple[pa.Field, ...]] = ()
    """Columns of the index."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions decide the values."""
    cut_count: ClassVar[str] = ""
    """Name of the count of rows that are left out because data.max_length cuts their value; blank if none is cut."""
    cut_text: ClassVar[str] = ""
    """What these rows are, for messages; `{limit}` is data.max_length."""
    cut_apart: ClassVar[str] = ""
    """Why a part of a row, split off by data.over_length, is left out."""
    notes: ClassVar[Mapping[str, str]] = {}
    """By name of a count of rows, the note for the user; placeholders as of `NOTES` in `tokenize_run`."""

    @classmethod
    @abstractmethod
    def of(cls, rows: InspectedRows) -> Self | None:
        """Create it for the rows of a run; None if no row has a value."""

    @classmethod
    def keys(cls, kind: "RowKind") -> tuple[str, ...]:
        """Keys beside those of formats, for which data.columns may name a column in rows of a kind."""
        return ()

    @classmethod
    def model_takes(cls, directory: Path) -> bool:
        """Whether the model in a directory takes it in the place of text. Raises UserError if a file is damaged."""
        return False

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the index."""
        return {}

    def opened(self, tokenizer: "RowTokenizer", store: Path | None, directories: Sequence[Path | None]) -> Self:
        """The same, ready to read rows.

        Args:
            tokenizer: the model's.
            store: the directory for files of the values, of which each has its own; None: they are not kept.
            directories: of each file of rows; None for a file on the hub.

        Raises:
            UserError: the model's files cannot be used.
        """
        return self

    def prepare(self, block: "RowBlock", source: "SourceFormat") -> None:  # noqa: B027  # The usual one needs nothing.
        """Load what the rows of a block may need, before memory is limited."""

    @abstractmethod
    def value(self, row: Mapping[str, Any], example: "Example", source: "SourceFormat", file: int) -> Any:
        """What a row of a file has. Raises RowFault if it cannot be used."""

    def filled(self, segments: "list[list[TextSegment]]", value: Any) -> "list[list[TextSegment]]":
        """The texts of a row with what stands in them for its value. Raises RowFault if it has no place there."""
        return segments

    def counts(self, value: Any) -> Mapping[str, int]:
        """By name of a count, what a row adds to it."""
        return {}

    def cut(self, chunks: "Chunks", encoded: "EncodedRows", values: Sequence[Any]) -> np.ndarray:
        """Whether each chunk lacks a part of its row's value, bool of shape (chunks,). `values` are of encoded rows."""
        return np.zeros(len(chunks.rows), bool)

    def cut_reason(self, value: Any, ids: np.ndarray, limit: int) -> str | None:
        """How data.max_length of so many tokens cuts the value of a row of token ids; None if it does not."""
        return None

    def with_untrained(self, chunks: "Chunks", ids: np.ndarray, max_length: int) -> "tuple[Chunks, np.ndarray]":
        """The chunks of a side with rows of tokens that are not trained (see `RowKind`), and the ids of both.

        Each chunk of `ids` is followed by those that are made for it, of `max_length` tokens at most.
        """
        return chunks, ids

    def arrays(self, values: Sequence[Any]) -> list[pa.Array]:
        """The columns of `fields`."""
        return []

    def index_arrays(self, values: Sequence[Any]) -> list[pa.Array]:
        """The columns of `index_fields`."""
        return []

    def digest(self, value: Any) -> bytes:
        """What makes rows of equal tokens differ."""
        return b""

    def published(self, store: Path, out: Path, rows: Path, dropped: np.ndarray | None) -> int:
        """Link the files of a side's rows from `store` to the directory of tokens `out`; return how many have a value.

        Args:
            store: as of `opened`.
            out: the directory of tokens.
            rows: the side's shards.
            dropped: bool of shape (rows,): which rows are duplicates; None if none is.
        """
        return 0

    def check(self, found: Mapping[str, int], rows: Mapping[str, int], why: str) -> None:  # noqa: B027
        """Refuse what cannot be trained.

        Args:
            found: by side, what `published` returned.
            rows: by side, the number of trained rows of tokens without duplicates.
            why: which rows were left out, to append to a message.

        Raises:
            UserError: naming data.source.
        """

    def figures(self, found: Mapping[str, int]) -> Mapping[str, int]:
        """Figures of stage tokenize; `found` as of `check`."""
        return {}

    def advice(self, found: Mapping[str, int], rows: Mapping[str, int]) -> Iterable[str]:
        """Notes for the user; arguments as of `check`."""
        return ()

    def refuse_change(  # noqa: B027  # The usual one has no files.
        self, lock: Mapping[str, Any], sources: "Sequence[SourceFormat]", ignore_columns: Collection[str]
    ) -> None:
        """Raise UserError if files that rows name differ from those in locks/data.json."""

    @property
    def inputs(self) -> tuple[str, dict[str, Any]]:
        """What decides the values, as JSON."""
        return type(self).__name__, asdict(self)


def index_schema(index: pa.Schema, attached: Iterable[RowColumns]) -> pa.Schema:
    """The schema of an index with the columns and the metadata of what rows carry."""
    metadata = dict(index.metadata or {})
    fields = list(index)
    for one in attached:
        fields += one.index_fields
        metadata.update(one.metadata)
    return pa.schema(fields, metadata=metadata or None)
