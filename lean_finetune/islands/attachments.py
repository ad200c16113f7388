"""The attachments that rows may have: one class each, in a package of its own."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from lean_finetune.images.attachment import ImageAttachment
from lean_finetune.rows.attachment import Attachment
from lean_finetune.weights.attachment import WeightAttachment

ATTACHMENTS: tuple[type[Attachment], ...] = (ImageAttachment, WeightAttachment)

LIMITED_ROWS = {key: kind.rows_text for kind in ATTACHMENTS for key in kind.limits}
"""Keys of section bucket that limit what rows carry, and how messages call such rows."""


def attached_of(batches: Sequence[pa.RecordBatch]) -> tuple[Attachment, ...]:
    """What rows in memory carry besides tokens, from record batches of an index; also what none of them has."""
    names = set(batches[0].schema.names) if batches else set()
    return tuple(kind.from_columns(batches) for kind in ATTACHMENTS if kind.columns.keys() <= names)


def read_attached(index: Path) -> tuple[Attachment, ...]:
    """What the rows of an index carry besides tokens; nothing if all are text alone.

    Raises UserError if the index is missing or damaged.
    """
    found = (kind.read(index) for kind in ATTACHMENTS)
    return tuple(one for one in found if one is not None)
