"""What is assumed of the rows of a run with full rows besides their length: here nothing, they are text alone."""

from collections.abc import Iterator
from pathlib import Path

from transformers import PretrainedConfig

from lean_finetune.config.data_schema import Data
from lean_finetune.config.schema import Bucket, Params, Train
from lean_finetune.memory.trace.fake_batches import TEXT_ALONE, FakeBatches
from lean_finetune.rows.attachment import Attachment
from lean_finetune.step.batches import BatchShape


class AssumedRows:
    """What every row carries besides text: nothing. A subclass assumes more."""

    whole_model: bool = False
    """Whether the model runs with its parts beside decoder and head."""

    def refuse(self, p: Params, config: PretrainedConfig) -> None:
        """Raise UserError if the model or the objective does not take such rows."""

    def for_model(self, directory: Path, *, beside_text: bool) -> "AssumedRows":
        """The same for a model with its config.json in a directory.

        `beside_text`: data.max_length is an assumption, of the text beside what the rows carry.
        """
        return self

    def made(self, config: PretrainedConfig, data: Data) -> "FullRow":
        """What a row then has for a model.

        Raises:
            UserError: the model's files do not make it, or a limit of `data` excludes it.
        """
        return TEXT_ROW


class FullRow:
    """A row of a run with full rows: text alone. A subclass carries more."""

    assumed = AssumedRows()
    fakes: FakeBatches = TEXT_ALONE
    """Makes the micro-batches of traces."""
    shortest_row: int = 0
    """Tokens of a row with little text."""

    @property
    def attached(self) -> tuple[Attachment, ...]:
        """What one row carries."""
        return ()

    @property
    def size(self) -> int:
        """What memory grows with, in the unit of its measure."""
        return 0

    def length(self, max_length: int, positions: int | None) -> int:
        """Tokens of the longest row, without padding; `positions` of the model.

        Raises:
            UserError: what the row carries does not fit in it.
        """
        return max_length

    def bucket(self, bucket: Bucket, length: int) -> Bucket:
        """The section with room for rows of so many tokens, if what they carry made them longer than assumed."""
        return bucket

    def carried(self, shape: BatchShape, bucket: Bucket) -> BatchShape:
        """A micro-batch of text with what its rows carry; it may have fewer rows.

        Raises:
            UserError: one row has more than a micro-batch may have.
        """
        return shape

    def most_traces(self, train: Train, most: int) -> int:
        """The most traces of a search, at most `most`."""
        return most

    def lighter(self, data: Data) -> Iterator[str]:
        """Overrides that make what the rows carry smaller, the least change first."""
        yield from ()


TEXT_ROWS, TEXT_ROW = AssumedRows(), FullRow()
