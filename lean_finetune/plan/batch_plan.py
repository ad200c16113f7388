"""The batch plan: micro-batches of every optimizer step, as Arrow columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lean_finetune.core.arrow_files import ArrowWriter, StoredBatch, damaged, open_batches
from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.rows.attachment import AttachedShape, Attachment, measures_of, sums_between


def kind_of(path: Path, batches: list[StoredBatch]) -> RowKind:
    """What the rows of a file are, by `RowKind.metadata`; raises UserError for an unknown kind."""
    metadata = (batches[0].schema.metadata if batches else None) or {}
    name = metadata.get(b"kind", RowKind.ANSWER.name.encode()).decode(errors="replace")
    if name not in KINDS:
        raise damaged(path, f"kind {name!r} is unknown")
    return KINDS[name]


def refuse_other_rows(path: Path, batches: list[StoredBatch], kind: RowKind) -> None:
    """Raise UserError if the rows of a file of stage tokenize are of another kind; a file without rows has none."""
    if batches and (found := kind_of(path, batches)) != kind:
        raise UserError(
            f"{path}: its rows are {found.text}, and train.objective trains {kind.text}; run `dvc repro tokenize`"
        )


# The batch plan: the rows of each micro-batch of each optimizer step, as columns and as an Arrow file.

SCHEMA = pa.schema(
    [
        ("epoch", pa.int32()),
        ("step", pa.int32()),
        ("rank", pa.int32()),
        ("rows", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("supervised", pa.int32()),
    ]
)
SCALARS = tuple(field.name for field in SCHEMA if field.name != "rows")
PADDED, FLAT = "padded", "flat"
AUTO_STEP_TOKENS = "auto_step_tokens"
"""Key of a plan's metadata."""
PADDING_ROW_TOKENS = 1024
"""Longest row of padding in a packed sequence: attention grows with the square of a row's length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows that pass through the model in one forward and backward."""

    epoch: int
    """Pass over the training rows, from 0."""
    step: int
    """Optimizer step of the whole run, from 0."""
    rows: np.ndarray
    """Row numbers of the training shards, int32; bucketed and packed: longest row first.

    Empty for a GPU without work; then the other figures are 0.
    """
    length: int
    """Tokens to which every row is padded; flat: tokens of the joined sequence, padding included."""
    supervised: int
    """Tokens of these rows that count in the loss."""
    rank: int = 0
    """The GPU that runs it, from 0."""
    flat: bool = False
    """Whether the rows are packed into one sequence, each attending to itself."""
    kind: RowKind = RowKind.ANSWER
    """What its rows are: the trained rows of tokens of such rows."""
    attached: tuple[AttachedShape, ...] = ()
    """What its rows carry besides tokens."""

    @property
    def padded_tokens(self) -> int:
        """Tokens that pass through the model, padding included."""
        return self.length if self.flat else len(self.rows) * self.length


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Micro-batches in execution order as columns; `ranks` of a step at a time run concurrently."""

    epoch: np.ndarray
    """Pass over the training rows of each micro-batch, int32."""
    step: np.ndarray
    """Optimizer step of each micro-batch, int32, ascending."""
    rank: np.ndarray
    """GPU of each micro-batch, int32: its position in the step modulo `ranks`."""
    rows: np.ndarray
    """Row numbers, int32, one micro-batch after the other."""
    bounds: np.ndarray
    """Start of each micro-batch in `rows`, and the end of the last one, int64."""
    length: np.ndarray
    """Padded tokens of each row, or of the joined sequence (flat), int32."""
    supervised: np.ndarray
    """Supervised tokens of each micro-batch, int32."""
    ranks: int
    """GPUs that share every step."""
    flat: bool
    """Whether each micro-batch is one sequence of packed rows."""
    kind: RowKind = RowKind.ANSWER
    """What its rows are."""
    attached: tuple[Attachment, ...] = ()
    """What all training rows carry besides tokens. Not part of the file."""
    beside_others: tuple[np.ndarray, ...] = ()
    """`beside` of the plan of one GPU of several; empty: it follows from the plan. Not part of the file."""

    def __len__(self) -> int:
        return len(self.step)

    @staticmethod
    def of(micro_batches: Sequence[MicroBatch], *, ranks: int = 1) -> "Plan":
        """A plan from micro-batches in execution order."""
        scalars: dict[str, Any] = {
            name: np.array([getattr(one, name) for one in micro_batches], np.int32) for name in SCALARS
        }
        sizes = [len(one.rows) for one in micro_batches]
        return Plan(
            **scalars,
            rows=np.concatenate([np.empty(0, np.int32), *(np.asarray(one.rows, np.int32) for one in micro_batches)]),
            bounds=np.cumsum([0, *sizes], dtype=np.int64),
            ranks=ranks,
            flat=any(one.flat for one in micro_batches),
            kind=micro_batches[0].kind if micro_batches else RowKind.ANSWER,
        )

    @staticmethod
    def joined(parts: Sequence["Plan"]) -> "Plan":
        """One plan of consecutive parts with the same layout and number of ranks."""
        sizes = np.concatenate([part.sizes for part in parts])
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in (*SCALARS, "rows")
        }
        return Plan(
            **columns,
            bounds=np.append(0, np.cumsum(sizes, dtype=np.int64)),
            ranks=parts[0].ranks,
            flat=parts[0].flat,
            kind=parts[0].kind,
        )

    def of_kind(self, kind: RowKind) -> "Plan":
        """The plan of rows of tokens from one of rows of the data."""
        return replace(self, rows=kind.trained(self.rows).ravel(), bounds=kind.unit * self.bounds, kind=kind)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows of each micro-batch, int64."""
        return np.diff(self.bounds)

    @cached_property
    def padded_tokens(self) -> np.ndarray:
        """Tokens of each micro-batch, padding included, int64."""
        return self.length.astype(np.int64) * (1 if self.flat else self.sizes)

    @cached_property
    def step_bounds(self) -> np.ndarray:
        """First micro-batch of each step, and the end of the last one, int64."""
        return np.searchsorted(self.step, np.arange(self.step[0], self.step[-1] + 2))

    @cached_property
    def beside(self) -> tuple[np.ndarray, ...]:
        """Of each attachment, whether a micro-batch runs parts of the model beside other GPUs (`Attachment.beside`)."""
        if self.beside_others:
            return self.beside_others
        return tuple(one.beside(self.rows, self.bounds, self.ranks) for one in self.attached)

    @property
    def steps(self) -> "StepViews":
        """The optimizer steps as a lazy sequence of lists of micro-batches."""
        return StepViews(self)

    @property
    def most(self) -> dict[str, int]:
        """By limit: of each measure of what rows carry, that of the micro-batch which has most."""
        measures = measures_of(self.attached)
        return {one.limit: int(sums_between(one.values[self.rows], self.bounds).max()) for one in measures}

    def of_rank(self, rank: int) -> "Plan":
        """The plan of one GPU. GPU 0 has rows in every step, and the largest micro-batches."""
        own = np.flatnonzero((self.rank == rank) & (self.sizes > 0))
        sizes = self.sizes[own]
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return Plan(
            **{name: getattr(self, name)[own] for name in SCALARS if name != "rank"},
            rank=np.zeros(len(own), np.int32),
            rows=self.rows[np.repeat(self.bounds[own] - bounds[:-1], sizes) + np.arange(bounds[-1])],
            bounds=bounds,
            ranks=1,
            flat=self.flat,
            kind=self.kind,
            attached=self.attached,
            beside_others=tuple(beside[own] for beside in self.beside),
        )

    def micro_batch(self, number: int) -> MicroBatch:
        """Micro-batch `number` of the run; its rows are a view."""
        rows = self.rows[self.bounds[number] : self.bounds[number + 1]]
        pairs = zip(self.attached, self.beside, strict=True)
        shapes = (one.shape_of(rows, beside=bool(beside[number])) for one, beside in pairs)
        return MicroBatch(
            **{name: int(getattr(self, name)[number]) for name in SCALARS},
            rows=rows,
            flat=self.flat,
            kind=self.kind,
            attached=tuple(one for one in shapes if one is not None),
        )


class StepViews(Sequence[list[MicroBatch]]):
    """The steps of a plan as a sequence with constant access time."""

    def __init__(self, plan: Plan):
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.step_bounds) - 1

    def __getitem__(self, number: int) -> list[MicroBatch]:  # type: ignore[override]  # No slices.
        start, end = self._plan.step_bounds[range(len(self))[number] :][:2].tolist()
        return [self._plan.micro_batch(one) for one in range(start, end)]


def write_plan(
    path: Path, parts: Iterable[Plan], *, settings_hash: str = "", auto_step_tokens: int | None = None
) -> None:
    """Write consecutive parts of a plan, a record batch each; the caller makes the file atomic.

    Args:
        path: of the file.
        parts: at least one.
        settings_hash: of the settings that decide the micro-batches; `plan_settings_hash` reads it.
        auto_step_tokens: what train.tokens_per_step: auto is for these rows, None if it is a number.
    """
    stream = iter(parts)
    first = next(stream)
    metadata = {"layout": FLAT if first.flat else PADDED, "ranks": str(first.ranks), "cut": settings_hash}
    if auto_step_tokens is not None:
        metadata[AUTO_STEP_TOKENS] = str(auto_step_tokens)
    schema = SCHEMA.with_metadata(metadata | first.kind.metadata)
    with ArrowWriter(path, schema) as writer:
        for part in chain([first], stream):
            columns = {name: pa.array(getattr(part, name), pa.int32()) for name in SCALARS}
            columns["rows"] = pa.ListArray.from_arrays(pa.array(part.bounds, pa.int32()), pa.array(part.rows))
            writer.write(pa.record_batch([columns[name] for name in schema.names], schema=schema))


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises UserError if the file is missing or damaged, its steps are not 0, 1, 2, …, or GPUs have unequal shares of a
    step.
    """
    batches = open_batches(path, {field.name: (field.type,) for field in SCHEMA})
    if not sum(batch.num_rows for batch in batches):
        raise damaged(path, "has no micro-batch")
    metadata = batches[0].schema.metadata or {}
    layout, ranks = (metadata.get(key, b"").decode(errors="replace") for key in (b"layout", b"ranks"))
    if layout not in (PADDED, FLAT) or not (ranks.isascii() and ranks.isdigit() and 0 < int(ranks) < 2**31):
        raise damaged(path, f"layout {layout!r} of {ranks!r} ranks is unknown")
    kind = kind_of(path, batches)
    plan = Plan.joined([_part(batch, int(ranks), layout == FLAT, kind) for batch in batches])
    _check(path, plan)
    return plan


def _part(batch: StoredBatch, ranks: int, flat: bool, kind: RowKind) -> Plan:
    """The part of a plan in a record batch."""
    rows = batch.column("rows")
    return Plan(
        **{name: batch.column(name).to_numpy() for name in SCALARS},
        rows=rows.flatten().to_numpy(),
        bounds=rows.offsets.to_numpy(),
        ranks=ranks,
        flat=flat,
        kind=kind,
    )


def refuse_other_objective(plan: Plan, kind: RowKind) -> None:
    """Raise UserError for a plan of another kind of rows."""
    if plan.kind != kind:
        raise UserError(
            f"data/batches/plan.arrow: its rows are {plan.kind.text}, and train.objective trains {kind.text}; run `dvc "
            "repro bucket`"
        )


def plan_settings_hash(path: Path) -> str:
    """The hash that `write_plan` stored; raises UserError if the file is missing or damaged."""
    batches = open_batches(path, {})
    if not batches:
        raise damaged(path, "has no micro-batch")
    return (batches[0].schema.metadata or {}).get(b"cut", b"").decode(errors="replace")


def _check(path: Path, plan: Plan) -> None:
    """Check that every record is possible, steps count up, and ranks alternate."""
    before = np.concatenate([[-1], plan.step[:-1]])
    new_step = plan.step != before
    starts = np.flatnonzero(new_step)
    place = np.arange(len(plan)) - starts[np.cumsum(new_step) - 1] if len(starts) else np.zeros(len(plan), np.int64)
    uneven = np.append(new_step[1:], True) & ((place + 1) % plan.ranks != 0)
    wrong = (plan.step - before > 1) | (plan.step < before) | (plan.rank != place % plan.ranks) | uneven
    figures = plan.sizes, plan.length, plan.supervised
    # A rank may be without work, but not all ranks at once.
    working = plan.padded_tokens > 0
    turn_works = np.logical_or.reduceat(working, np.arange(0, len(plan), plan.ranks))
    wrong |= np.where(working, np.minimum.reduce(figures) < 1, np.any(figures, axis=0))
    wrong |= ~turn_works[np.arange(len(plan)) // plan.ranks]
    wrong |= sums_between(plan.rows < 0, plan.bounds) > 0
    wrong |= plan.sizes % plan.kind.unit != 0
    if wrong.any():
        number = int(wrong.argmax())
        raise damaged(
            path,
            f"record {number} cannot be right (step {plan.step[number]} after {before[number]}, rank "
            f"{plan.rank[number]} of {plan.ranks}, {plan.sizes[number]} rows of {plan.length[number]} tokens, "
            f"{plan.supervised[number]} supervised)",
        )


# Find the micro-batches that may need the most memory: estimate traces them, and train measures their steps.
#
# Memory grows with these figures of a micro-batch: padded tokens (activations, all logits), supervised tokens (logits
# of a loss chunk), on GPUs the tokens in full tiles of fused attention (accumulators of its backward), under a sliding
# window the length (its mask is length × length), with layers that work in chunks of a row (Mamba 2, the delta rule)
# rows and length, since each row is padded to full chunks: packed rows are, too, and the figures of what rows carry
# besides tokens. So the candidates are micro-batches that no other exceeds in all figures.
#
# Position matters too: gradients appear during the first backward of a step and exist throughout the later ones. So
# the first micro-batches of steps (one on every GPU) are compared apart from the later ones. Nothing else differs
# between steps: optimizer state exists before step 0, and parameters never change shape.

ATTENTION_TILE_TOKENS = 128
"""FlashAttention-2's backward rounds every sequence up to a multiple of this (Dao 2023, arXiv 2307.08691)."""


def memory_figures(plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool, chunk: int = 0) -> np.ndarray:
    """The figures of each micro-batch that memory grows with: tokens (padded, supervised, tiled), rows, attachments.

    `lengths` are the tokens of every training row. With `tiled`, attention works in tiles, as on GPUs: each packed row,
    rows of padding included, needs up to a tile more. With `windowed`, the model makes masks, though never for joined
    rows. `chunk`: tokens of a row that layers compute at once; 0 without such layers.
    """
    figures = [plan.padded_tokens, plan.supervised]
    padding = plan.length - sums_between(lengths[plan.rows], plan.bounds) if plan.flat else None
    if tiled and padding is not None:
        figures.append(plan.length + (plan.sizes + -(-padding // PADDING_ROW_TOKENS)) * ATTENTION_TILE_TOKENS)
    elif tiled:
        figures.append(plan.sizes * -(-plan.length // ATTENTION_TILE_TOKENS) * ATTENTION_TILE_TOKENS)
    if (windowed or chunk) and not plan.flat:
        figures.append(plan.length)
    if chunk:
        figures.append(plan.sizes)
    if chunk and padding is not None:
        figures.append((sums_between(-(-lengths[plan.rows] // chunk), plan.bounds) + -(-padding // chunk)) * chunk)
    for one, beside in zip(plan.attached, plan.beside, strict=True):
        figures += one.memory_figures(plan.rows, plan.bounds, beside)
    return np.stack(figures, axis=1)


def worst_micro_batches(
    plan: Plan, lengths: np.ndarray, *, tiled: bool, windowed: bool, chunk: int = 0
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The Pareto fronts among the first micro-batches of the steps, and among the later ones.

    The first micro-batch of step 0, which the plan makes the largest, comes first. Arguments as `memory_figures`.
    """
    figures = memory_figures(plan, lengths, tiled=tiled, windowed=windowed, chunk=chunk)
    is_first = np.arange(len(plan)) - plan.step_bounds[plan.step - plan.step[0]] < plan.ranks
    first = _front(figures, np.flatnonzero(is_first))
    later = _front(figures, np.flatnonzero(~is_first))
    first = [0, *(number for number in first if number)]
    return [plan.micro_batch(number) for number in first], [plan.micro_batch(number) for number in later]


def worst_steps(plan: Plan, lengths: np.ndarray, *, chunk: int = 0) -> list[int]:
    """Steps with a worst micro-batch on any device, ascending; step 0 is always among them."""
    first, later = worst_micro_batches(plan, lengths, tiled=True, windowed=True, chunk=chunk)
    return sorted({micro_batch.step for micro_batch in [*first, *later]})


def _front(figures: np.ndarray, numbers: np.ndarray) -> list[int]:
    """The Pareto front of these micro-batches, largest first; of equal ones the earliest.

    It is small in practice (2 to 10 of 1,300 in the default plan), since the budget keeps micro-batches similar. Each
    round takes the largest that is left and drops all that it exceeds.
    """
    front = []
    left = figures[numbers]
    while len(numbers):
        largest = np.arange(len(numbers))
        for figure in left.T:
            largest = largest[figure[largest] == figure[largest].max()]
        best = left[largest[0]]
        front.append(int(numbers[largest[0]]))
        other = (left > best).any(axis=1)
        numbers, left = numbers[other], left[other]
    return front


def longest_row(plan: Plan, lengths: np.ndarray) -> int:
    """Tokens of the longest row: with its padding, unless rows are packed."""
    return int(lengths[plan.rows].max() if plan.flat else plan.length.max())
