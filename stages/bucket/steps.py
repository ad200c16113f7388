"""Which rows each optimizer step holds: a function of seed, epoch, tokens per step and row lengths alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.bucket.arrow import open_batches
from stages.errors import UserError

COLUMNS = {"length": (pa.int32(),), "supervised": (pa.int32(),)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """What planning needs to know of the training rows, by row number."""

    lengths: np.ndarray
    """Tokens, int32."""
    supervised: np.ndarray
    """Tokens that are predicted and count in the loss, int32."""


def read_index(path: Path) -> Index:
    """Read index.arrow.

    Raises:
        UserError: the file is missing or damaged, is empty, or holds a row that nothing can be learnt from.
    """
    batches = open_batches(path, COLUMNS)
    columns = {
        name: np.concatenate([np.empty(0, np.int32), *(batch.column(name).to_numpy() for batch in batches)])
        for name in COLUMNS
    }
    index = Index(lengths=columns["length"], supervised=columns["supervised"])
    if not len(index.lengths):
        raise UserError(f"{path}: holds no training row; delete it, check data.source and run `dvc repro`")
    wrong = np.flatnonzero((index.supervised < 1) | (index.supervised >= index.lengths))
    if len(wrong):
        row = wrong[0]
        raise UserError(
            f"{path}: row {row}: needs 1 or more supervised tokens and fewer than its tokens, got "
            f"{index.supervised[row]} of {index.lengths[row]}; delete it and run `dvc repro`"
        )
    return index


def step_rows(lengths: np.ndarray, *, seed: int, epochs: int, tokens_per_step: int) -> Iterator[tuple[int, np.ndarray]]:
    """Epoch and rows (int32, shuffled) of every optimizer step of the run, in order.

    Each epoch is shuffled and cut on its own, so a step's composition is that of independent draws. Of the steps of
    epoch 0 that hold a row of the greatest length, the earliest is moved to the front of the run: memory peaks in
    the first step whatever bucket.max_tokens is, and a run that does not fit fails there.
    """
    for epoch in range(epochs):
        steps = _cut_epoch(_shuffled_rows(len(lengths), seed, epoch), lengths, tokens_per_step)
        if epoch == 0:
            longest = lengths.max()
            front = next(number for number, rows in enumerate(steps) if lengths[rows].max() == longest)
            steps.insert(0, steps.pop(front))
        yield from ((epoch, rows) for rows in steps)


def _shuffled_rows(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A uniform permutation of row numbers, int32.

    Sorting raw 64-bit draws rather than Generator.permutation: numpy keeps a bit generator's stream the same in
    every release, a Generator method's it may change (NEP 19), and a numpy upgrade must not reorder the training.
    """
    draws = np.random.PCG64([seed, epoch]).random_raw(rows)
    return np.argsort(draws, kind="stable").astype(np.int32)


def _cut_epoch(order: np.ndarray, lengths: np.ndarray, tokens_per_step: int) -> list[np.ndarray]:
    """Walk the rows in order; a step ends with the row that brings it to `tokens_per_step` unpadded tokens.

    The last step of an epoch holds what is left.
    """
    tokens = np.cumsum(lengths[order], dtype=np.int64)
    steps, start, walked = [], 0, 0
    while start < len(order):
        end = min(int(np.searchsorted(tokens, walked + tokens_per_step)) + 1, len(order))
        steps.append(order[start:end])
        start, walked = end, int(tokens[end - 1])
    return steps
