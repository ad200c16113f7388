"""Rows of every optimizer step, from the index of the rows."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from lean_finetune.core.arrow_files import damaged, open_batches, read_column
from lean_finetune.core.errors import UserError
from lean_finetune.islands.attachments import read_attached
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.batch_plan import refuse_other_rows
from lean_finetune.rows.attachment import Attachment, measures_of

if TYPE_CHECKING:
    from lean_finetune.config.data_schema import Source

COLUMNS = {
    "length": (pa.int32(),),
    "supervised": (pa.int32(),),
    "source": (pa.uint16(),),
    "dropped": (pa.bool_(),),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class RowIndex:
    """The training rows by row number, and how often the rows of each source are used."""

    lengths: np.ndarray
    """Tokens, int32."""
    supervised: np.ndarray
    """Tokens that are predicted and count in the loss, int32."""
    sources: np.ndarray
    """Index of the row's source in data.source, uint16."""
    dropped: np.ndarray
    """Whether the row is a duplicate that must never be trained, bool."""
    weights: Sequence[float]
    """Mean number of uses of a row per epoch, by source."""
    tokens: np.ndarray | None = None
    """Tokens that count towards a step, int32; None: `lengths`."""
    attached: tuple[Attachment, ...] = ()
    """What the rows carry besides tokens."""

    @property
    def step_tokens(self) -> np.ndarray:
        """Tokens that count towards a step, int32."""
        return self.lengths if self.tokens is None else self.tokens

    def of_kind(self, kind: RowKind, *, joined: bool) -> "RowIndex":
        """The rows of the data as rows, from rows of tokens.

        A row has the supervised tokens of its trained rows of tokens. It is as long as all of these if they are
        `joined`, and else as the longest row of tokens, to which all are padded.
        """
        lengths, supervised = (values.reshape(-1, kind.token_rows) for values in (self.lengths, self.supervised))
        tokens, longest = lengths[:, : kind.unit].sum(1, dtype=np.int32), lengths.max(1)
        return replace(
            self,
            lengths=np.maximum(tokens, longest) if joined else longest,
            supervised=supervised[:, : kind.unit].sum(1, dtype=np.int32),
            sources=self.sources[:: kind.token_rows],
            dropped=self.dropped[:: kind.token_rows],
            tokens=tokens,
        )

    @property
    def takes_every_row(self) -> bool:
        """Whether each epoch uses each row exactly once."""
        return all(weight == 1.0 for weight in self.weights) and not self.dropped.any()

    def shortened(self, max_length: int) -> "RowIndex":
        """The rows, cut to `max_length` tokens; as many supervised tokens as possible remain.

        Raises UserError if a longer row carries what is not cut.
        """
        for one in self.attached:
            one.refuse_cut(self.lengths, max_length)
        lengths = np.minimum(self.lengths, max_length)
        return replace(self, lengths=lengths, supervised=np.minimum(self.supervised, lengths - 1))


def source_weights(source: "str | Sequence[Source]") -> tuple[float, ...]:
    """The weight of each source, from the value of data.source."""
    return (1.0,) if isinstance(source, str) else tuple(one.weight for one in source)


def read_index(path: Path, weights: Sequence[float], kind: RowKind | None = None) -> RowIndex:
    """Read train-index.arrow.

    Raises UserError if the file is missing or damaged, is empty, or has a row without supervised tokens, of an unknown
    source, or of another `kind` if that is given.
    """
    batches = open_batches(path, COLUMNS)
    if kind is not None:
        refuse_other_rows(path, batches, kind)
    columns = [read_column(batches, name, types[0].to_pandas_dtype()) for name, types in COLUMNS.items()]
    lengths, supervised, sources, dropped = columns
    index = RowIndex(
        lengths=lengths,
        supervised=supervised,
        sources=sources,
        dropped=dropped,
        weights=tuple(weights),
        attached=read_attached(path),
    )
    if index.dropped.all():
        raise UserError(f"{path}: has no training row; delete it, check data.source and run `dvc repro`")
    wrong = np.flatnonzero((index.supervised < 1) | (index.supervised >= index.lengths))
    if len(wrong):
        row = wrong[0]
        found = f"got {index.supervised[row]} of {index.lengths[row]}"
        raise damaged(path, f"row {row}: needs 1 or more supervised tokens and fewer than its tokens, {found}")
    if index.sources.max() >= len(index.weights):
        row = int(index.sources.argmax())
        raise UserError(
            f"{path}: row {row}: its source is number {index.sources[row]} but data.source has {len(index.weights)}; "
            "run `dvc repro`"
        )
    return index


# The rows of each optimizer step: a function of seed, epoch, tokens per step, row lengths and weights alone.

WEIGHT_BITS = 32
"""Bits of a weight's fraction; the rounding error is one row in four billion."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """Consecutive optimizer steps of one epoch."""

    epoch: int
    """Pass over the training rows, from 0."""
    rows: np.ndarray
    """Row numbers, int32, shuffled, step after step."""
    bounds: np.ndarray
    """Start of each step in `rows`, and the end of the last one, int64."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, start: int, end: int) -> "Steps":
        """Steps `start` to `end` - 1."""
        bounds = self.bounds[start : end + 1]
        return Steps(epoch=self.epoch, rows=self.rows[bounds[0] : bounds[-1]], bounds=bounds - bounds[0])


def run_steps(index: RowIndex, *, seed: int, epochs: int, tokens_per_step: int) -> Iterator[Steps]:
    """All steps of the run in order: those with the largest rows alone, then those of each epoch.

    Each epoch is shuffled and split into steps, so steps are independent random draws. The first step with a row of
    the greatest length moves to the front of the run: memory then peaks in step 0, and a run that does not fit fails
    there. With weights, that row may be absent from epoch 0; the step then comes from the first epoch that has it.
    Where rows carry more than tokens, the step of that epoch with the row of most follows, of each measure.

    Raises UserError if the weights leave no row in any epoch.
    """
    front_epoch = _epoch_of_longest(index, seed, epochs)
    steps = _epoch_steps(index, seed, front_epoch, tokens_per_step)
    sizes = [index.lengths, *(measure.values for measure in measures_of(index.attached))]
    largest = (np.maximum.reduceat(values[steps.rows], steps.bounds[:-1]) for values in sizes)
    front = list(dict.fromkeys(int(values.argmax()) for values in largest))
    yield from (steps.part(number, number + 1) for number in front)
    for epoch in range(epochs):
        if epoch == front_epoch:
            edges = pairwise([-1, *sorted(front), len(steps)])
            parts = [steps.part(before + 1, after) for before, after in edges]
        else:
            parts = [_epoch_steps(index, seed, epoch, tokens_per_step)]
        yield from (part for part in parts if len(part))


def _epoch_of_longest(index: RowIndex, seed: int, epochs: int) -> int:
    """The first epoch with a row of the greatest length that any epoch uses."""
    if index.takes_every_row:
        return 0
    longest = [int(index.lengths[_entries(index, seed, epoch)].max(initial=0)) for epoch in range(epochs)]
    if not max(longest):
        raise UserError(
            f"data.source: the weights leave no training row in {epochs} epoch{'s' * (epochs > 1)}; raise a weight"
        )
    return longest.index(max(longest))


def _entries(index: RowIndex, seed: int, epoch: int) -> np.ndarray:
    """Rows of an epoch before shuffling, int32: a row of weight w occurs floor(w) times, or once more.

    One draw u per (seed, row), shared by all epochs, decides the extra copy: it exists in epochs where u + epoch · w
    passes an integer. So weight 0.5 uses half of the rows in one epoch and the other half in the next, and every row
    occurs w · epochs times in all, give or take one. All arithmetic is in integers.
    """
    # The third number makes these draws independent of those that shuffle epochs: [seed, epoch].
    draws = np.random.PCG64([seed, 0, 1]).random_raw(len(index.lengths)) >> np.uint64(64 - WEIGHT_BITS)
    scaled = np.array([round(weight * 2**WEIGHT_BITS) for weight in index.weights], np.uint64)[index.sources]
    part = scaled & np.uint64(2**WEIGHT_BITS - 1)
    before, after = ((draws + part * np.uint64(turn)) >> np.uint64(WEIGHT_BITS) for turn in (epoch, epoch + 1))
    copies = ((scaled >> np.uint64(WEIGHT_BITS)) + after - before).astype(np.int64)
    copies[index.dropped] = 0
    return np.repeat(np.arange(len(copies), dtype=np.int32), copies)


def _epoch_steps(index: RowIndex, seed: int, epoch: int, tokens_per_step: int) -> Steps:
    """Steps of an epoch's shuffled rows: a step ends with the row that reaches `tokens_per_step` unpadded tokens.

    The last step of an epoch has the remaining rows.
    """
    if index.takes_every_row:
        rows = _permutation(len(index.lengths), seed, epoch)
    else:
        entries = _entries(index, seed, epoch)
        rows = entries[_permutation(len(entries), seed, epoch)]
    tokens = np.cumsum(index.step_tokens[rows], dtype=np.int64)
    # Bisecting a memoryview takes a microsecond per step, a call of numpy several.
    totals, bounds = tokens.data, [0]
    while bounds[-1] < len(rows):
        start = bounds[-1]
        target = tokens_per_step + (totals[start - 1] if start else 0)
        bounds.append(min(bisect_left(totals, target, start) + 1, len(rows)))
    return Steps(epoch=epoch, rows=rows, bounds=np.array(bounds, np.int64))


def _permutation(entries: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers 0 to entries - 1 in uniformly random order, int32.

    This sorts raw 64-bit draws instead of calling Generator.permutation: numpy may change the stream of a Generator
    method (NEP 19), and an upgrade must not reorder the training. Each number is in the low bits of its draw, so that
    keys are distinct.
    """
    keys = np.random.PCG64([seed, epoch]).random_raw(entries)
    place_bits = np.uint64(max(entries - 1, 0).bit_length())
    keys >>= place_bits
    keys <<= place_bits
    keys |= np.arange(entries, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << place_bits) - np.uint64(1)
    return keys.astype(np.int32)
