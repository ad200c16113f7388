"""Token files as tokenize writes them, for the stages that read them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.step.token_rows import Split, TokenRows
from tests.plan.common import write_index as write_columns

Row = tuple[list[int], list[int], str | None]
"""Token ids, flat spans, family."""


def write_tokens(
    directory: Path,
    rows: Sequence[Row],
    split: Split = "train",
    *,
    token_type: pa.DataType | None = None,
    span_type: pa.DataType | None = None,
    block: int = 2,
    blocks_per_shard: int = 2,
    dropped: Sequence[int] = (),
    kind: RowKind = RowKind.ANSWER,
) -> Path:
    """Write shards and index of a split: `block` rows per record batch, `dropped` rows marked as duplicates."""
    schema = pa.schema(
        [
            ("input_ids", pa.list_(token_type or pa.uint16())),
            ("loss_spans", pa.list_(span_type or pa.uint16())),
            ("family", pa.string()),
            ("source_file", pa.uint16()),
            ("source_row", pa.uint32()),
        ]
    )
    shutil.rmtree(directory / split, ignore_errors=True)
    (directory / split).mkdir(parents=True)
    numbered = [(*row, 0, number) for number, row in enumerate(rows)]
    per_shard = block * blocks_per_shard
    for shard, start in enumerate(range(0, max(len(rows), 1), per_shard)):
        path = directory / split / f"{shard:05}.arrow"
        with ArrowWriter(path, schema) as writer:
            part = numbered[start : start + per_shard]
            for first in range(0, len(part), block):
                columns = zip(*part[first : first + block], strict=True)
                arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
                writer.write(pa.record_batch(arrays, schema=schema))
    write_index(directory / f"{split}-index.arrow", rows, dropped, kind)
    return directory


def write_index(path: Path, rows: Sequence[Row], dropped: Sequence[int] = (), kind: RowKind = RowKind.ANSWER) -> Path:
    """Write the index of these rows, all of source 0."""
    supervised = [
        sum(max(e - max(s, 1), 0) for s, e in zip(flat[::2], flat[1::2], strict=False)) for _, flat, _ in rows
    ]
    lengths = [len(ids) for ids, _, _ in rows]
    write_columns(path, lengths, supervised, dropped=np.isin(np.arange(len(rows)), list(dropped)).tolist(), kind=kind)
    return path


def heldout(directory: Path, rows: Sequence[Row], dropped: Sequence[int] = ()) -> TokenRows:
    """Held-out rows, written and opened."""
    return TokenRows(write_tokens(directory, rows, "heldout", dropped=dropped), "heldout")
