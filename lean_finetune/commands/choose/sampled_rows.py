"""A sample of the rows of data.source as tokens: every part of the source, and the rows with the most text."""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lean_finetune.commands.row_lengths import LONGEST_ROW, lengths_of
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError
from lean_finetune.data.read.row_block import BLOCK_BYTES, RowBlock
from lean_finetune.data.read.source_blocks import read_blocks
from lean_finetune.pinning.data_source import unwatched_lock
from lean_finetune.pinning.locate import find_tokenizer
from lean_finetune.plan.optimizer_steps import RowIndex

SAMPLE_ROWS = 2_000
LONGEST_ROWS = 32
"""Rows with the most bytes of text, which are tokenized too: one of them is nearly always the longest."""
PARTS = 200
"""Parts of the source, from the start of each of which rows are taken."""
LEAST_PART_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Tokens of a sample."""

    index: RowIndex
    """The sample; its last row is the longest one found."""
    tokenized: int
    """Rows whose tokens were counted."""
    total: int
    """Rows of the source."""

    def trained(self, p: Params) -> float:
        """About how many rows of the source are trained, and not held out."""
        return self.total * (1 - p.data.heldout_fraction)

    @property
    def text(self) -> str:
        """How much was read, in words."""
        if self.tokenized >= self.total:
            return f"all {self.total:,} rows"
        return f"{self.tokenized:,} of {self.total:,} rows: spread over the source, and those with the most text"


def sampled_rows(parameter: str, p: Params) -> SampledRows:
    """Count the tokens of a sample of data.source, as stage tokenize would; the same sample each time.

    Messages call the source `parameter`.

    Raises:
        UserError: the source or the tokenizer is not there, a row cannot be used, or there is none.
    """
    directory = find_tokenizer(p.model.name, p.model.revision)
    all_rows = {"heldout_fraction": 0.0, "heldout_source": None, "drop_duplicates": False, "max_length": LONGEST_ROW}
    data = p.data.model_copy(update=all_rows)
    lock = unwatched_lock(parameter, data)
    part_bytes = sum(file["bytes"] for source in lock["sources"] for file in source["files"]) // PARTS
    part_bytes = min(max(part_bytes, LEAST_PART_BYTES), BLOCK_BYTES)
    rows = [block.count_rows() for block in _parts(lock, part_bytes, p)]
    total, each = sum(rows), _rows_of_each(rows)
    longest: list[tuple[int, int, int, RowBlock]] = []

    def chosen() -> Iterator[RowBlock]:
        for number, block in enumerate(_parts(lock, part_bytes, p)):
            for line in _lines(block) if total > SAMPLE_ROWS else ():
                heapq.heappush(longest, (len(line.payload), -number, -line.first_row, line))
                if len(longest) > LONGEST_ROWS:
                    heapq.heappop(longest)
            yield replace(block, limit=each)

    sample = lengths_of(chosen(), lock, data, p, directory)
    tokenized = sum(min(count, each) for count in rows)
    if longest:
        most = lengths_of((line for *_, line in longest), lock, data, p, directory)
        tokenized += len(longest)
        if len(most.lengths) and most.lengths.max() > sample.lengths.max(initial=0):
            sample = _joined(sample, most, int(most.lengths.argmax()))
    if not len(sample.lengths):
        raise UserError(f"{parameter}: no row of {data.source} has a trained token; name other rows")
    sample = replace(sample, attached=tuple(one for one in sample.attached if not one.is_empty))
    return SampledRows(index=sample, tokenized=min(tokenized, total), total=total)


def _parts(lock: Mapping[str, Any], part_bytes: int, p: Params) -> Iterator[RowBlock]:
    return read_blocks(lock, max_rows=p.data.max_rows, progress=lambda _: None, block_bytes=part_bytes)


def _rows_of_each(rows: list[int]) -> int:
    """The most rows of a part with which a sample of all parts has about `SAMPLE_ROWS`."""
    each = -(-SAMPLE_ROWS // len(rows)) if rows else 1
    while sum(min(count, each) for count in rows) < min(SAMPLE_ROWS, sum(rows)):
        each += 1
    return each


def _lines(block: RowBlock) -> Iterator[RowBlock]:
    """Each row of a block of JSON Lines as a block; nothing of other formats, whose rows have no bytes of their own."""
    if block.kind == "lines":
        for number, line in enumerate(block.payload.split(b"\n")):
            if line.strip():
                yield replace(block, payload=line, first_row=block.first_row + number, faults=())


def _joined(sample: RowIndex, more: RowIndex, row: int) -> RowIndex:
    """A sample with one more row."""
    pairs = zip(sample.attached, more.attached, strict=True)
    return replace(
        sample,
        lengths=np.append(sample.lengths, more.lengths[row]),
        supervised=np.append(sample.supervised, more.supervised[row]),
        sources=np.append(sample.sources, more.sources[row]),
        dropped=np.append(sample.dropped, more.dropped[row]),
        attached=tuple(one.with_row(other, row) for one, other in pairs),
    )
