"""How each optimizer step is cut into micro-batches: changes memory, padding and speed, never what is learnt."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

import numpy as np

from lean_finetune.config.schema import round_up
from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import Plan, sums_between
from lean_finetune.plan.bucketed import cheapest_cuts, even_cuts
from lean_finetune.plan.optimizer_steps import Steps
from lean_finetune.plan.packed import fill_first, pack_steps
from lean_finetune.plan.row_index import RowIndex

ROWS_PER_BLOCK = 1 << 20
"""Rows cut together: enough that numpy's calls cost little, few enough that their arrays stay in the cache."""
SAMPLED_ROWS = 1 << 18
"""Rows by which the run's first micro-batch is sized, of step 0 and as many of the next steps as they fill."""
KEY_BITS = 64


@dataclass(frozen=True, kw_only=True)
class MicroBatchSettings:
    """The parameters that decide how steps are cut."""

    mode: Literal["bucketed", "packed", "fixed"]
    max_tokens: int
    """Most tokens of a micro-batch, padding counted (not in mode fixed)."""
    pad_multiple: int
    """Padded lengths are multiples of this."""
    constant_shape: bool
    """Mode packed: every micro-batch is padded to max_tokens."""
    fixed_rows: int
    """Mode fixed: rows of a micro-batch."""
    ranks: int
    """GPUs that share a step: each gets the same number of micro-batches."""

    @property
    def flat(self) -> bool:
        """Whether micro-batches are single sequences of joined rows."""
        return self.mode == "packed"

    @property
    def capacity(self) -> int:
        """Most tokens of a micro-batch that leave its padded size within `max_tokens`."""
        multiple = 1 if self.constant_shape else self.pad_multiple
        return self.max_tokens // multiple * multiple

    @property
    def deciding(self) -> dict[str, Any]:
        """What of these decides how a step is cut, the number of GPUs apart."""
        read = {
            "bucketed": ("max_tokens",),
            "packed": ("max_tokens", "constant_shape"),
            "fixed": ("fixed_rows",),
        }[self.mode]
        return {name: getattr(self, name) for name in ("mode", "pad_multiple", *read)}


def split_steps(steps: Iterable[Steps], index: RowIndex, cutting: MicroBatchSettings) -> Iterator[Plan]:
    """Cut steps (the first holds the longest row) into micro-batches: consecutive parts of the plan, in order.

    The run's first micro-batch starts with the longest row and takes as many rows as the largest of the others needs
    (mode packed: as `max_tokens` allows); its padded tokens cap all others (modes bucketed and packed). So none after
    it is larger in padded tokens or in length: memory is flat, and running out of it happens at once or never. Inside
    a step the largest micro-batches run first, each next to the others of its size on the other GPUs.

    Raises:
        UserError: the longest row does not fit in `max_tokens`.
    """
    _check_fits(index.lengths, cutting)
    return _cut_steps(steps, index, cutting)


def _check_fits(lengths: np.ndarray, cutting: MicroBatchSettings) -> None:
    """The longest row must fit in a micro-batch of its own."""
    row = int(lengths.argmax())
    length = int(lengths[row])
    if cutting.mode != "fixed" and length > cutting.capacity:
        raise UserError(
            f"bucket.max_tokens: the longest row (train row {row}: {length} tokens, padded "
            f"{round_up(length, cutting.pad_multiple)}) must fit in a micro-batch; got {cutting.max_tokens}; "
            "raise bucket.max_tokens or lower data.max_length"
        )


def _cut_steps(steps: Iterable[Steps], index: RowIndex, cutting: MicroBatchSettings) -> Iterator[Plan]:
    """`split_steps` once the longest row is known to fit."""
    number, steps = 0, iter(steps)
    sample = list(islice(steps, 2))
    needed_tokens = _needed_tokens(sample, index, cutting) if cutting.mode == "bucketed" else cutting.max_tokens
    for part in chain(sample, steps):
        for block in _blocks(part, index):
            rows, lengths = _sorted_rows(block, index) if cutting.mode != "fixed" else _plain_rows(block, index)
            if number == 0:
                groups = _first_groups(lengths, cutting, needed_tokens)
            else:
                groups = _groups(lengths, block.bounds, cutting)
            plan = _deal(rows, lengths, groups, block, index, cutting, first_step=number)
            if number == 0 and cutting.mode != "fixed":
                cutting = replace(cutting, max_tokens=int(plan.padded_tokens[0]))
            yield plan
            number += len(block)


def _needed_tokens(sample: Iterable[Steps], index: RowIndex, cutting: MicroBatchSettings) -> int:
    """Padded tokens of the largest micro-batch where `max_tokens` alone limits them, in the first steps of a sample.

    A later step may need more; it is then cut within the size found here.
    """
    largest = 0
    for part in sample:
        steps = part.part(0, max(1, int(np.searchsorted(part.bounds, SAMPLED_ROWS, side="right")) - 1))
        for block in _blocks(steps, index):
            rows, lengths = _sorted_rows(block, index)
            groups = _groups(lengths, block.bounds, cutting)
            plan = _deal(rows, lengths, groups, block, index, cutting, first_step=0)
            largest = max(largest, int(plan.padded_tokens.max()))
    return largest


def _blocks(steps: Steps, index: RowIndex) -> Iterator[Steps]:
    """Steps in blocks of bounded size, the first step of the run (which comes alone) among them."""
    most_steps = 1 << (KEY_BITS - sum(_key_bits(index)))
    start = 0
    while start < len(steps):
        within = int(np.searchsorted(steps.bounds, steps.bounds[start] + ROWS_PER_BLOCK, side="right")) - 1
        end = min(max(within, start + 1), start + most_steps, len(steps))
        yield steps.part(start, end)
        start = end


def _key_bits(index: RowIndex) -> tuple[int, int]:
    """Binary digits of a length and of a row number."""
    return int(index.lengths.max()).bit_length(), len(index.lengths).bit_length()


def _plain_rows(block: Steps, index: RowIndex) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the block's steps in shuffled order, and their lengths."""
    return block.rows, index.lengths[block.rows].astype(np.int64)


def _sorted_rows(block: Steps, index: RowIndex) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the block's steps, each step sorted by length, longest first, then by row number; and their lengths.

    One number holds step, length and row, so that one plain sort of integers does it.
    """
    length_bits, row_bits = (np.uint64(bits) for bits in _key_bits(index))
    longest = np.uint64((1 << int(length_bits)) - 1)
    keys = np.repeat(np.arange(len(block), dtype=np.uint64), np.diff(block.bounds))
    keys <<= length_bits
    keys |= longest - index.lengths[block.rows].astype(np.uint64)
    keys <<= row_bits
    keys |= block.rows.astype(np.uint64)
    keys.sort()
    rows = (keys & np.uint64((1 << int(row_bits)) - 1)).astype(np.int32)
    lengths = longest - (keys >> row_bits & longest)
    return rows, lengths.astype(np.int64)


def _first_groups(lengths: np.ndarray, cutting: MicroBatchSettings, needed_tokens: int) -> np.ndarray:
    """Micro-batch of each row of the run's first step; the first one holds `needed_tokens`, as far as it can."""
    bounds = np.array([0, len(lengths)])
    if cutting.mode == "fixed":
        return _groups(lengths, bounds, cutting)
    most_rows = max(1, len(lengths) - (cutting.ranks - 1))
    if cutting.mode == "packed":
        taken = fill_first(lengths, cutting.capacity, most_rows)
        largest = round_up(int(lengths[taken].sum()), cutting.pad_multiple)
    else:
        longest = round_up(int(lengths[0]), cutting.pad_multiple)
        rows = min(cutting.max_tokens // longest, most_rows, -(-needed_tokens // longest))
        taken = np.arange(len(lengths)) < rows
        largest = longest * int(taken.sum())
    groups = np.zeros(len(lengths), np.int64)
    left = lengths[~taken]
    if len(left):
        capped = replace(cutting, max_tokens=cutting.max_tokens if cutting.constant_shape else largest)
        groups[~taken] = 1 + _groups(left, np.array([0, len(left)]), capped, done=1)
    return groups


def _groups(lengths: np.ndarray, bounds: np.ndarray, cutting: MicroBatchSettings, *, done: int = 0) -> np.ndarray:
    """Number of each row's micro-batch within its step.

    A multiple of `ranks` of them with the `done` that exist already, but never more than there are rows.
    """
    if cutting.mode == "packed":
        return pack_steps(lengths, bounds, cutting.capacity, ranks=cutting.ranks, done=done)
    if cutting.mode == "fixed":
        return _fixed_groups(bounds, cutting)
    padded = -(-lengths // cutting.pad_multiple) * cutting.pad_multiple
    if cutting.ranks == 1:
        begins = cheapest_cuts(padded, bounds, cutting.max_tokens)
    else:
        begins = even_cuts(padded, bounds, cutting.max_tokens, ranks=cutting.ranks, done=done)
    number = np.cumsum(begins)
    return number - np.repeat(number[bounds[:-1]], np.diff(bounds))


def _fixed_groups(bounds: np.ndarray, cutting: MicroBatchSettings) -> np.ndarray:
    """`fixed_rows` rows after the other; at the end of a step fewer, so that a row is left for every micro-batch."""
    rows = np.diff(bounds)
    numbers = np.minimum(-(-rows // (cutting.fixed_rows * cutting.ranks)) * cutting.ranks, rows)
    step = np.repeat(np.arange(len(rows)), rows)
    place = np.arange(bounds[-1]) - bounds[step]
    from_end = numbers[step] - (rows[step] - place)
    return np.maximum(place // cutting.fixed_rows, from_end)


def _deal(
    rows: np.ndarray,
    lengths: np.ndarray,
    groups: np.ndarray,
    block: Steps,
    index: RowIndex,
    cutting: MicroBatchSettings,
    *,
    first_step: int,
) -> Plan:
    """The block's part of the plan: micro-batches of every step, largest first, dealt to the ranks to and fro.

    To and fro (rank 0 gets the largest of one turn and the smallest of the next), so that over a step no rank has more
    to do than another. Where a step has too few rows to give every rank one, its last turn ends in micro-batches
    without rows: another choice would drop rows, or let the number of GPUs decide which rows a step has.
    """
    step_of_row = np.repeat(np.arange(len(block)), np.diff(block.bounds))
    key = step_of_row * (int(groups.max()) + 1) + groups
    order = np.argsort(key, kind="stable")
    rows, key = rows[order], key[order]
    starts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    sizes = np.diff(np.append(starts, len(rows)))
    step = step_of_row[order[starts]]
    if cutting.flat:
        tokens = np.add.reduceat(lengths[order], starts)
        multiple = cutting.max_tokens if cutting.constant_shape else cutting.pad_multiple
    else:
        tokens = np.maximum.reduceat(lengths[order], starts)
        multiple = cutting.pad_multiple
    length = -(-tokens // multiple) * multiple
    idle = np.repeat(np.arange(len(block)), -np.bincount(step) % cutting.ranks)
    step = np.append(step, idle)
    starts, sizes, length = (np.append(column, np.zeros_like(idle)) for column in (starts, sizes, length))
    by_size = np.lexsort((-length, -length * (1 if cutting.flat else sizes), step))
    step = step[by_size]
    place = np.arange(len(step)) - np.searchsorted(step, step)
    turn, rank = np.divmod(place, cutting.ranks)
    dealt = by_size[np.arange(len(step)) + np.where(turn % 2, cutting.ranks - 1 - 2 * rank, 0)]
    bounds = np.concatenate([[0], np.cumsum(sizes[dealt])])
    rows = rows[np.repeat(starts[dealt] - bounds[:-1], sizes[dealt]) + np.arange(len(rows))]
    return Plan(
        epoch=np.full(len(step), block.epoch, np.int32),
        step=(step + first_step).astype(np.int32),
        rank=rank.astype(np.int32),
        rows=rows,
        bounds=bounds,
        length=length[dealt].astype(np.int32),
        supervised=sums_between(index.supervised[rows], bounds).astype(np.int32),
        ranks=cutting.ranks,
        flat=cutting.flat,
    )
