"""What rows carry besides tokens, as a plan sees it: figures of each row that limit micro-batches, and shapes of these.

An attachment is added by a subclass, listed in `lean_finetune/islands/attachments.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np
import pyarrow as pa

from lean_finetune.core.arrow_files import StoredBatch, open_batches

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig

    from lean_finetune.config.schema import Train
    from lean_finetune.rows.batch_part import BatchPart


IndexBatch: TypeAlias = StoredBatch | pa.RecordBatch
"""Rows of an index, in a file or in memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Measure:
    """An integer of each row. Of a micro-batch, the sum of its rows counts."""

    name: str
    """What it counts, for messages."""
    values: np.ndarray
    """int32, shape (rows,)."""
    limit: str
    """The key of section bucket with the most that a micro-batch may have."""
    remedy: str
    """What makes it less, for messages."""


class StoredRows(Protocol):
    """Rows of tokens in files."""

    attached: "tuple[Attachment, ...]"
    supervised: np.ndarray
    """Trained tokens of each row."""

    def value(self, column: str, row: int) -> Any:
        """What a row has in a column of the shards."""


class AttachedShape(ABC):
    """What a micro-batch has of an attachment, as far as memory depends on it: a frozen dataclass."""

    @property
    def beside(self) -> bool:
        """Whether parts of the model run for no row of its own, as other processes' do."""
        return False

    @property
    @abstractmethod
    def of_rows(self) -> Hashable:
        """What its own rows have; false for nothing."""

    @property
    @abstractmethod
    def attachment(self) -> "type[Attachment]":
        """The class whose it is."""

    @abstractmethod
    def largest(self, rows: int) -> Self:
        """That of so many of its rows: those that need most."""

    def empty(self, trained: int, device: "torch.device | str") -> "BatchPart | None":
        """What a batch of it with so many trained tokens has, without values; None if a `FakeBatches` makes it."""
        return None


class Attachment(ABC):
    """What the rows of one split carry besides tokens."""

    columns: ClassVar[Mapping[str, Collection[pa.DataType]]]
    """Its columns of the index, with their types."""
    name: ClassVar[str]
    """In messages: the … of every row."""
    rows_text: ClassVar[str]
    """How messages call such rows."""
    limits: ClassVar[tuple[str, ...]] = ()
    """Keys of section bucket that limit its measures."""
    whole_model: ClassVar[bool] = False
    """Whether it needs parts of the model beside its decoder and head."""
    sizes_option: ClassVar[str] = ""
    """Option of `lean-finetune fit` that names the sizes of what rows carry; empty if only lengths of rows count."""
    unpackable: ClassVar[str] = ""
    """Why such rows cannot be packed, for messages; empty if they can."""

    @classmethod
    def read(cls, index: Path) -> Self | None:
        """That of the rows of an index; None if no row has any. Raises UserError if the index is damaged."""
        batches = open_batches(index, {})
        if not batches or cls.columns.keys().isdisjoint(batches[0].schema.names):
            return None
        found = cls.from_columns(open_batches(index, cls.columns), index.parent)
        return None if found.is_empty else found

    @classmethod
    @abstractmethod
    def from_columns(cls, batches: "Sequence[IndexBatch]", tokens: Path | None = None) -> Self:
        """Create it from record batches of an index, at least one; `tokens` is the directory with the rows' files."""

    @property
    @abstractmethod
    def measures(self) -> Sequence[Measure]:
        """Figures of rows that limit micro-batches."""

    @property
    def is_empty(self) -> bool:
        """Whether no row has any."""
        return not any(measure.values.any() for measure in self.measures)

    @abstractmethod
    def shape_of(self, rows: np.ndarray, *, beside: bool = False) -> AttachedShape | None:
        """What a micro-batch of these rows has; None for nothing. `beside` as of `Plan.beside`."""

    def beside(self, rows: np.ndarray, bounds: np.ndarray, ranks: int) -> np.ndarray:
        """Whether each micro-batch has none, and runs parts of the model for it as another GPU of its turn does, bool.

        `rows` and `bounds` are those of a plan for so many GPUs.
        """
        return np.zeros(len(bounds) - 1, bool)

    def memory_figures(self, rows: np.ndarray, bounds: np.ndarray, beside: np.ndarray) -> list[np.ndarray]:
        """Figures of each micro-batch of a plan that memory grows with, each of shape (micro-batches,)."""
        return [sums_between(measure.values[rows], bounds) for measure in self.measures]

    def refuse_cut(self, lengths: np.ndarray, max_length: int) -> None:  # noqa: B027  # The usual one may be cut.
        """Raise UserError if rows of `lengths` tokens lose a part of it where they are cut to `max_length`."""

    def trained_by(self, train: "Train") -> Self:
        """As a run with this section of params.yaml has it."""
        return self

    def save(self, model: Path, out: Path) -> None:  # noqa: B027  # The usual one needs nothing.
        """Write what a trained model needs to be given the same, from the directory of its base, to its own."""

    def for_model(self, directory: Path, config: "PretrainedConfig") -> Self:
        """As a model in a directory takes it.

        Raises:
            UserError: the model's files do not make its arguments.
        """
        return self

    @abstractmethod
    def part(self, tokens: "StoredRows", rows: np.ndarray, ids_BT: "Tensor") -> "BatchPart | None":
        """What a batch of these rows has of it; None for nothing. `ids_BT` are the padded tokens of the rows.

        Raises:
            UserError: a file is missing or damaged.
        """

    def files_of(self, tokens: "StoredRows", row: int) -> list[bytes]:
        """The sha256 of each file that belongs to a row, in their order."""
        return []

    def for_generation(self, ids_BT: "Tensor", files: Sequence[Sequence[bytes]]) -> "dict[str, Tensor]":
        """The model's arguments in generation for padded tokens, and the files of each row (`files_of`).

        Raises:
            UserError: a file is missing or damaged.
        """
        return {}

    def loss_scale(self, rows: np.ndarray, supervised: np.ndarray) -> float:
        """The factor of the loss of a step's rows; `supervised` are the trained tokens of every row of the split."""
        return 1.0

    @property
    def together(self) -> bool:
        """Whether a process without it runs parts of the model for it while others do."""
        return False

    def blank(self) -> "BatchPart":
        """What a batch of no such row has where it runs parts of the model beside others."""
        raise NotImplementedError(f"{self.name} need no part of the model")

    @abstractmethod
    def with_row(self, other: Self, row: int) -> Self:
        """These rows and one of others."""


def files_of(tokens: StoredRows, row: int) -> list[bytes]:
    """The sha256 of each file that belongs to a row, in their order."""
    return [digest for one in tokens.attached for digest in one.files_of(tokens, row)]


def need_whole_model(attached: Iterable[Attachment]) -> bool:
    """Whether rows need parts of the model beside its decoder and head."""
    return any(one.whole_model for one in attached)


def measures_of(attached: Iterable[Attachment]) -> list[Measure]:
    """The measures of all attachments."""
    return [measure for one in attached for measure in one.measures]


def limited(attached: Iterable[Attachment], limits: Mapping[str, int]) -> list[tuple[Measure, int]]:
    """The measures that `limits` has, each with its limit."""
    return [(measure, limits[measure.limit]) for measure in measures_of(attached) if measure.limit in limits]


def sums_between(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sums of `values[bounds[k] : bounds[k + 1]]`, int64; 0 for empty ranges, unlike np.add.reduceat."""
    return np.diff(np.append(0, np.cumsum(values, dtype=np.int64))[bounds])
