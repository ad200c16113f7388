"""Split optimizer steps into micro-batches: this decides memory, padding and speed, never what is learnt."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice, pairwise
from typing import Any, Literal

import numpy as np

from cuda_memory.units import round_up
from lean_finetune.config.schema import Bucket
from lean_finetune.core.errors import UserError
from lean_finetune.islands.attachments import LIMITED_ROWS
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.plan.bucketed import cheapest_splits, even_splits, fill_first, pack_steps
from lean_finetune.plan.optimizer_steps import RowIndex, Steps
from lean_finetune.rows.attachment import limited, sums_between

ROWS_PER_BLOCK = 1 << 20
"""Rows split at once: enough to make numpy efficient, few enough for the cache."""
SAMPLED_ROWS = 1 << 18
"""Rows from the start of the run that decide the size of its first micro-batch."""
KEY_BITS = 64


@dataclass(frozen=True, kw_only=True)
class MicroBatchSettings:
    """The settings that decide the micro-batches of a step."""

    mode: Literal["bucketed", "packed", "fixed"]
    max_tokens: int
    """Largest number of tokens of a micro-batch, padding included (not in mode fixed)."""
    pad_multiple: int
    """Padded lengths are multiples of this."""
    constant_shape: bool
    """Mode packed: every micro-batch is padded to max_tokens."""
    fixed_rows: int
    """Mode fixed: rows of a micro-batch."""
    ranks: int
    """GPUs that share a step; each gets the same number of micro-batches."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Most that a micro-batch may have of the measures of what rows carry besides tokens, by their key of section
    bucket."""
    kind: RowKind = RowKind.ANSWER
    """What a planned row is. The other figures are those of planned rows."""

    def of_kind(self, kind: RowKind) -> "MicroBatchSettings":
        """The settings for rows of the data, from those for rows of tokens: a padded pair has twice those of one."""
        if kind.unit == 1:
            return replace(self, kind=kind)
        tokens = self.max_tokens if self.flat else self.max_tokens // 2
        return replace(self, max_tokens=tokens, fixed_rows=max(1, self.fixed_rows // 2), kind=kind)

    @property
    def flat(self) -> bool:
        """Whether each micro-batch is one sequence of packed rows."""
        return self.mode == "packed"

    @property
    def capacity(self) -> int:
        """Largest number of unpadded tokens whose padded size is within `max_tokens`."""
        multiple = 1 if self.constant_shape else self.pad_multiple
        return self.max_tokens // multiple * multiple

    @property
    def deciding(self) -> dict[str, Any]:
        """The settings that decide the division of rows, without the number of GPUs and what they stand for."""
        by_mode = {"bucketed": ["max_tokens"], "packed": ["max_tokens", "constant_shape"], "fixed": ["fixed_rows"]}
        names = [
            "mode",
            "pad_multiple",
            *by_mode[self.mode],
        ]
        return {name: getattr(self, name) for name in names} | dict(self.limits)


def limits_of(bucket: Bucket) -> dict[str, int]:
    """Those keys of the section that limit what rows carry besides tokens, and have a value."""
    own = {one.name for one in fields(MicroBatchSettings)}
    values = {name: getattr(bucket, name) for name in Bucket.model_fields if name not in own}
    return {name: value for name, value in values.items() if value is not None}


def split_steps(steps: Iterable[Steps], index: RowIndex, settings: MicroBatchSettings) -> Iterator[Plan]:
    """Split steps (the first has the longest row) into micro-batches; yields consecutive parts of the plan.

    The run's first micro-batch starts with the longest row and is as large as the largest later one needs to be (mode
    packed: as `max_tokens` allows). Its padded tokens cap all others in modes bucketed and packed. So memory peaks in
    the first micro-batch: a run is out of memory at once or never. Within a step the largest micro-batches run first,
    concurrently with those of similar size on the other GPUs. Raises UserError if the longest row does not fit in
    `max_tokens`.
    """
    _check_fits(index.lengths, settings)
    _check_attached(index, settings)
    steps, number = iter(steps), 0
    sample = list(islice(steps, 2))
    first_tokens = None if settings.mode == "fixed" else settings.max_tokens
    if settings.mode == "bucketed":
        first_tokens = _needed_tokens(sample, index, settings)
    for part in chain(sample, steps):
        for block in _blocks(part, index):
            plan = _block_plan(block, index, settings, first_step=number, first_tokens=first_tokens)
            if first_tokens is not None:
                settings, first_tokens = replace(settings, max_tokens=int(plan.padded_tokens[0])), None
            yield plan
            number += len(block)


def _check_fits(lengths: np.ndarray, settings: MicroBatchSettings) -> None:
    """Check that the longest row fits into a micro-batch."""
    row = int(lengths.argmax())
    length = int(lengths[row])
    if settings.mode != "fixed" and length > settings.capacity:
        rows = 1 if settings.flat else settings.kind.unit
        padded, allowed = rows * round_up(length, settings.pad_multiple), rows * settings.max_tokens
        what, first = "row" if settings.kind.unit == 1 else "pair of rows", settings.kind.token_rows * row
        raise UserError(
            f"bucket.max_tokens: the longest {what} (train row {first}: {rows * length} tokens, padded {padded}) must "
            f"fit in a micro-batch; got {allowed}; raise bucket.max_tokens or lower data.max_length"
        )


def _check_attached(index: RowIndex, settings: MicroBatchSettings) -> None:
    """Check that the mode can have what rows carry besides tokens, and that each row fits in its limits."""
    for key in settings.limits.keys() - {measure.limit for measure, _ in limited(index.attached, settings.limits)}:
        raise UserError(
            f"bucket.{key}: has an effect only on {LIMITED_ROWS[key]}; got {settings.limits[key]}; leave it blank"
        )
    for one in index.attached:
        if settings.flat and one.unpackable:
            raise UserError(
                f"bucket.mode: {one.rows_text} cannot be packed: {one.unpackable}; got packed; use bucketed"
            )
        for measure, most in limited([one], settings.limits):
            row = int(measure.values.argmax())
            if measure.values[row] > most:
                raise UserError(
                    f"bucket.{measure.limit}: the {one.name} of every row must fit in a micro-batch; train row {row} "
                    f"has {measure.values[row]} {measure.name}; got {most}; raise it or {measure.remedy}"
                )


def _within(groups: np.ndarray, bounds: np.ndarray, values: np.ndarray, most: int) -> np.ndarray:
    """Groups divided so that of none the sum of `values`, one of each row, is above `most`.

    Groups are numbered from 0 within each step, whose rows start at `bounds`; rows keep their order within a group.
    """
    divided = np.empty_like(groups)
    for start, end in pairwise(bounds.tolist()):
        parts: dict[int, tuple[int, int]] = {}  # By group: the part that is being filled, and its sum.
        count = 0
        for row in range(start, end):
            part, filled = parts.get(int(groups[row]), (-1, most))
            if part < 0 or filled + int(values[row]) > most:
                part, filled, count = count, 0, count + 1
            parts[int(groups[row])] = part, filled + int(values[row])
            divided[row] = part
    return divided


def _needed_tokens(sample: Iterable[Steps], index: RowIndex, settings: MicroBatchSettings) -> int:
    """Padded tokens of the largest micro-batch of a sample if only `max_tokens` limits them.

    A later step may need more; it is then split within the size found here.
    """
    largest = 0
    for part in sample:
        steps = part.part(0, max(1, int(np.searchsorted(part.bounds, SAMPLED_ROWS, side="right")) - 1))
        for block in _blocks(steps, index):
            largest = max(largest, int(_block_plan(block, index, settings).padded_tokens.max()))
    return largest


def _blocks(steps: Steps, index: RowIndex) -> Iterator[Steps]:
    """Steps in blocks of bounded size."""
    most_steps = 1 << (KEY_BITS - sum(_key_bits(index)))
    start = 0
    while start < len(steps):
        within = int(np.searchsorted(steps.bounds, steps.bounds[start] + ROWS_PER_BLOCK, side="right")) - 1
        end = min(max(within, start + 1), start + most_steps, len(steps))
        yield steps.part(start, end)
        start = end


def _key_bits(index: RowIndex) -> tuple[int, int]:
    """Bits of the largest length and of the largest row number."""
    return int(index.lengths.max()).bit_length(), len(index.lengths).bit_length()


def _block_plan(
    block: Steps, index: RowIndex, settings: MicroBatchSettings, *, first_step: int = 0, first_tokens: int | None = None
) -> Plan:
    """The block's part of the plan; `first_tokens` is the wanted size of its first micro-batch."""
    if settings.mode == "fixed":
        rows, lengths = block.rows, index.lengths[block.rows].astype(np.int64)
    else:
        rows, lengths = _sorted_rows(block, index)
    if first_tokens is None:
        groups = _groups(lengths, block.bounds, settings)
    else:
        groups = _first_groups(lengths, settings, first_tokens)
    for measure, most in limited(index.attached, settings.limits):
        groups = _within(groups, block.bounds, measure.values[rows], most)
    return _distribute(rows, lengths, groups, block, index, settings, first_step=first_step)


def _sorted_rows(block: Steps, index: RowIndex) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the block's steps, sorted within a step by descending length, then by row number; and their lengths.

    Step, length and row are packed into one integer, so that one integer sort is enough.
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


def _first_groups(lengths: np.ndarray, settings: MicroBatchSettings, first_tokens: int) -> np.ndarray:
    """Micro-batch of each row of the run's first step; the first one has `first_tokens` if possible."""
    most_rows = max(1, len(lengths) - (settings.ranks - 1))
    if settings.mode == "packed":
        taken = fill_first(lengths, settings.capacity, most_rows)
        largest = round_up(int(lengths[taken].sum()), settings.pad_multiple)
    else:
        longest = round_up(int(lengths[0]), settings.pad_multiple)
        rows = min(settings.max_tokens // longest, most_rows, -(-first_tokens // longest))
        taken = np.arange(len(lengths)) < rows
        largest = longest * int(taken.sum())
    groups = np.zeros(len(lengths), np.int64)
    left = lengths[~taken]
    if len(left):
        capped = replace(settings, max_tokens=settings.max_tokens if settings.constant_shape else largest)
        groups[~taken] = 1 + _groups(left, np.array([0, len(left)]), capped, done=1)
    return groups


def _groups(lengths: np.ndarray, bounds: np.ndarray, settings: MicroBatchSettings, *, done: int = 0) -> np.ndarray:
    """Number of each row's micro-batch within its step.

    With the `done` existing ones their number is a multiple of `ranks`, but never more than the number of rows.
    """
    if settings.mode == "packed":
        return pack_steps(lengths, bounds, settings.capacity, ranks=settings.ranks, done=done)
    if settings.mode == "fixed":
        return _fixed_groups(bounds, settings)
    padded = -(-lengths // settings.pad_multiple) * settings.pad_multiple
    if settings.ranks == 1:
        begins = cheapest_splits(padded, bounds, settings.max_tokens)
    else:
        begins = even_splits(padded, bounds, settings.max_tokens, ranks=settings.ranks, done=done)
    number = np.cumsum(begins)
    return number - np.repeat(number[bounds[:-1]], np.diff(bounds))


def _fixed_groups(bounds: np.ndarray, settings: MicroBatchSettings) -> np.ndarray:
    """Groups of `fixed_rows` rows; fewer at the end of a step, so that every micro-batch has a row."""
    rows = np.diff(bounds)
    numbers = np.minimum(-(-rows // (settings.fixed_rows * settings.ranks)) * settings.ranks, rows)
    step = np.repeat(np.arange(len(rows)), rows)
    place = np.arange(bounds[-1]) - bounds[step]
    from_end = numbers[step] - (rows[step] - place)
    return np.maximum(place // settings.fixed_rows, from_end)


def _distribute(
    rows: np.ndarray,
    lengths: np.ndarray,
    groups: np.ndarray,
    block: Steps,
    index: RowIndex,
    settings: MicroBatchSettings,
    *,
    first_step: int,
) -> Plan:
    """The plan of grouped rows: micro-batches of every step, largest first, distributed to ranks in snake order.

    In snake order rank 0 gets the largest of one round and the smallest of the next, so work is balanced over a step. A
    step with too few rows for all ranks ends in empty micro-batches; otherwise rows would be dropped, or the number of
    GPUs would decide the rows of a step.
    """
    step_of_row = np.repeat(np.arange(len(block)), np.diff(block.bounds))
    key = step_of_row * (int(groups.max()) + 1) + groups
    order = np.argsort(key, kind="stable")
    rows, key = rows[order], key[order]
    starts = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    sizes = np.diff(np.append(starts, len(rows)))
    step = step_of_row[order[starts]]
    if settings.flat:
        tokens = np.add.reduceat(lengths[order], starts)
        multiple = settings.max_tokens if settings.constant_shape else settings.pad_multiple
    else:
        tokens = np.maximum.reduceat(lengths[order], starts)
        multiple = settings.pad_multiple
    length = -(-tokens // multiple) * multiple
    idle = np.repeat(np.arange(len(block)), -np.bincount(step) % settings.ranks)
    step = np.append(step, idle)
    starts, sizes, length = (np.append(column, np.zeros_like(idle)) for column in (starts, sizes, length))
    by_size = np.lexsort((-length, -length * (1 if settings.flat else sizes), step))
    step = step[by_size]
    place = np.arange(len(step)) - np.searchsorted(step, step)
    turn, rank = np.divmod(place, settings.ranks)
    dealt = by_size[np.arange(len(step)) + np.where(turn % 2, settings.ranks - 1 - 2 * rank, 0)]
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
        ranks=settings.ranks,
        flat=settings.flat,
    )
