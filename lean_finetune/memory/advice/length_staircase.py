"""Reserved memory step by step for rows of unlike lengths: `fit --lengths`.

With fixed segments, a request that no free block can serve reserves a new segment, so reserved memory rises in steps.
The rows are planned as stage bucket does, and a sample of the plan's micro-batches is played to the allocator in the
plan's order, and for comparison in a random one.

Tracing each of hundreds of shapes would take minutes. The plan's micro-batches that can set the peak are traced anyway,
and a small one besides. Other micro-batches are made from the most alike of them that is not smaller: allocations that
have the same size in all traced shapes keep it, the others are scaled by tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from cuda_memory.units import counted
from lean_finetune.core.errors import UserError
from lean_finetune.memory.advice.plan_memory import PlanMemory, Replay, replay, replay_steps, sample_micro_batches
from lean_finetune.memory.advice.planned_run import with_plan
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.predict.deep_events import NONE, StepEvents
from lean_finetune.memory.predict.peak import Prediction, predict_with_events
from lean_finetune.memory.predict.traced_step import UPDATE_PHASES, TracedSteps
from lean_finetune.plan.optimizer_steps import RowIndex
from lean_finetune.plan.planned_rows import PlannedRows
from lean_finetune.plan.planner import PlanSettings
from lean_finetune.step.batches import BatchShape

SMALL_QUANTILE = 0.1
"""Of the micro-batches' tokens: the small one that is traced."""
MOST_EVENTS = 800_000
"""Allocations and frees that are played with each kind of segments: a few seconds."""
SAME_SHARE = 0.002
"""A rise by less than this share is not a stair."""
MOST_MICRO_BATCHES = 400
LEAST_MICRO_BATCHES = 16
GRADIENT = -2
"""Target of a free of the step's first gradient; those of the next ones are below."""


def with_rows(run: Run, index: RowIndex) -> Run:
    """The run with the plan of these rows, cut to data.max_length.

    Raises:
        UserError: the longest row does not fit in a micro-batch, or the run is not on one GPU.
    """
    if run.setting.gpus > 1:
        raise UserError(
            f"--lengths: needs one GPU, since communication allocates on other streams; got {run.setting.gpus}; leave "
            "--gpus or --lengths out"
        )
    if run.setting.train.offload == "parameters":
        raise UserError("--lengths: is not known with train.offload=parameters; leave one of them out")
    if run.device.kind != "cuda":
        raise UserError("--lengths: needs a GPU, since a CPU reserves nothing; name one with --gpu")
    index = index.shortened(run.params.data.max_length)
    settings = PlanSettings.from_params(run.params)
    planned = PlannedRows(plan=settings.plan(index), lengths=index.lengths, index=index, settings=settings)
    return with_plan(run, planned)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """Consecutive events that can be put after others."""

    size_E: np.ndarray
    target_E: np.ndarray
    """Position in the block; NONE for an allocation; GRADIENT - k for the k-th gradient of the step."""
    phases: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class _MicroBatch:
    """The events of a traced micro-batch."""

    shape: BatchShape
    block: _Block
    gradients: np.ndarray
    """Positions of what only the update frees: of a step's first micro-batch."""
    update: _Block | None
    """The end of the step, for its first micro-batch."""
    varies_E: np.ndarray
    """Whether a size depends on the shape."""

    @property
    def tokens(self) -> int:
        """With padding."""
        return self.shape.rows * self.shape.length

    def scaled(self, tokens: int) -> _Block:
        """The events of a micro-batch with so many tokens."""
        scaled = np.maximum(self.block.size_E * tokens // self.tokens, 1)
        return replace(self.block, size_E=np.where(self.varies_E, scaled, self.block.size_E))


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """What a plan of unlike rows reserves, step by step."""

    memory: PlanMemory
    """The replay in the plan's order."""
    shuffled: Replay
    """The same micro-batches in a random order, with fixed segments."""
    largest: tuple[BatchShape, ...]
    """The largest micro-batch of each played step."""
    planned_steps: int
    played: str
    """How much of the plan was played, in words."""

    def settled_step(self, kind: str) -> int:
        """The played step after which reserved memory stays within `SAME_SHARE` of its maximum."""
        return self.stairs(kind)[-1][0]

    def stairs(self, kind: str) -> list[tuple[int, int, BatchShape, bool]]:
        """Steps that reserve noticeably more than all before.

        Each has its number, the bytes reserved, its largest micro-batch, and whether that is the largest so far.
        """
        found: list[tuple[int, int, BatchShape, bool]] = []
        most_bytes, most_tokens = 0, 0
        replayed = zip(self.memory.steps, self.memory.unlimited[kind].steps, self.largest, strict=True)
        for number, step, shape in replayed:
            tokens = shape.rows * shape.length
            if step.reserved_peak_bytes > (1 + SAME_SHARE) * most_bytes:
                found.append((number, step.reserved_peak_bytes, shape, tokens > most_tokens))
                most_bytes = step.reserved_peak_bytes
            most_tokens = max(most_tokens, tokens)
        return found

    def as_json(self) -> dict[str, Any]:
        """The rows of every played step, and what a random order reserves."""
        return {
            "planned_steps": self.planned_steps,
            "played": self.played,
            "settled_step": {kind: self.settled_step(kind) for kind in self.memory.unlimited},
            "random_order_reserved_bytes": self.shuffled.reserved_peak_bytes,
            "steps": [
                {
                    "step": number,
                    "rows": shape.rows,
                    "tokens_per_row": shape.length,
                    **{
                        f"reserved_bytes_{kind}": replayed.steps[place].reserved_peak_bytes
                        for kind, replayed in self.memory.unlimited.items()
                    },
                }
                for place, (number, shape) in enumerate(zip(self.memory.steps, self.largest, strict=True))
            ],
        }


def predict_staircase(run: Run) -> tuple[Prediction, Staircase]:
    """The peaks of a planned run on one GPU, and what a sample of its plan reserves.

    Raises:
        UserError: PyTorch cannot trace an operation of the step, or steps cannot be put together from parts.
    """
    assert run.planned is not None
    plan, lengths = run.planned.own_plan, run.planned.lengths
    order = np.argsort(plan.padded_tokens, kind="stable")
    small = BatchShape.of(plan.micro_batch(int(order[round(SMALL_QUANTILE * (len(plan) - 1))])), lengths)
    several = bool((np.diff(plan.step_bounds) > 1).any())
    steps = (*run.steps, (small, small) if several else (small,))
    prediction, events = predict_with_events(run.model, steps)
    assert events is not None
    traced = _micro_batches(events, steps)
    longest = max(len(one.block.size_E) for one in traced)
    most = min(max(MOST_EVENTS // longest, LEAST_MICRO_BATCHES), MOST_MICRO_BATCHES)
    sampled: dict[int, list[BatchShape]] = {}
    for number in sample_micro_batches(plan, lengths, prediction.steps_of_peak, most):
        micro_batch = plan.micro_batch(number)
        sampled.setdefault(micro_batch.step, []).append(BatchShape.of(micro_batch, lengths))
    start, chosen = _part(events, 0, events.micro_batches[0]), list(sampled.values())
    memory = replay_steps(
        _with_workspaces(_joined(start, traced, chosen), events),
        tuple(map(tuple, chosen)),
        expandable=run.expandable,
        device=run.device,
        numbers=tuple(sampled),
    )
    mixed = _shuffled(chosen, run.params.seed)
    in_random_order = _with_workspaces(_joined(start, traced, mixed), events)
    shuffled = replay(in_random_order, tuple(map(tuple, mixed)), expandable=False, capacity_bytes=None)
    played = f"{sum(map(len, chosen))} of {counted(len(plan), 'micro-batch')}"
    return prediction, Staircase(
        memory=memory,
        shuffled=shuffled,
        largest=tuple(max(step, key=lambda shape: shape.rows * shape.length) for step in chosen),
        planned_steps=len(plan.steps),
        played=f"{played} in {len(sampled)} of {counted(len(plan.steps), 'step')}",
    )


def _shuffled(steps: Sequence[Sequence[BatchShape]], seed: int) -> list[list[BatchShape]]:
    """The micro-batches of all steps in a random order, in steps of the same sizes."""
    shapes = [shape for step in steps for shape in step]
    random.Random(seed).shuffle(shapes)
    rest = iter(shapes)
    return [[next(rest) for _ in step] for step in steps]


def _micro_batches(events: StepEvents, steps: TracedSteps) -> list[_MicroBatch]:
    """The micro-batches of traced steps."""
    starts = [*events.micro_batches, len(events)]
    found: list[_MicroBatch] = []
    place = 0
    for shapes in steps:
        step_start, step_end = starts[place], starts[place + len(shapes)]
        in_update = [first for first, _, name in events.phases if name in UPDATE_PHASES]
        update = min((first for first in in_update if step_start <= first < step_end), default=step_end)
        for number, shape in enumerate(shapes):
            start, end = starts[place + number], min(starts[place + number + 1], update)
            freed = events.target_E[update:step_end]
            gradients = np.unique(freed[(freed >= start) & (freed < end)]) if number == 0 else np.empty(0, np.int64)
            found.append(
                _MicroBatch(
                    shape=shape,
                    block=_part(events, start, end),
                    gradients=gradients - start,
                    update=_part(events, update, step_end, gradients) if number == 0 else None,
                    varies_E=np.empty(0, bool),
                )
            )
        place += len(shapes)
    if len({len(one.gradients) for one in found if one.update}) > 1:
        raise UserError("--lengths: is not known for steps that free other tensors with other shapes; leave it out")
    return _varying(found)


def _part(events: StepEvents, start: int, end: int, gradients: np.ndarray | None = None) -> _Block:
    """The events from `start` to `end`, with frees of gradients and of what the block allocates."""
    size_E, target_E = events.size_E[start:end], events.target_E[start:end]
    local = np.where(target_E >= start, target_E - start, NONE)
    kept = (target_E == NONE) | (target_E >= start)
    if gradients is not None and len(gradients):
        place = np.minimum(np.searchsorted(gradients, target_E), len(gradients) - 1)
        is_gradient = (target_E != NONE) & (gradients[place] == target_E)
        local, kept = np.where(is_gradient, GRADIENT - place, local), kept | is_gradient
    if (target_E[target_E != NONE] < events.micro_batches[0]).any():
        raise UserError("--lengths: is not known for steps that replace what exists before them; leave it out")
    moved = np.concatenate([[0], np.cumsum(kept)])  # Positions after frees of other blocks' tensors are left out.
    local = np.where(local >= 0, moved[np.maximum(local, 0)], local)
    phases = (
        (int(moved[max(first, start) - start]), int(moved[min(last, end) - start]), name)
        for first, last, name in events.phases
        if first < end and last > start
    )
    return _Block(size_E=size_E[kept], target_E=local[kept], phases=tuple(phases))


def _varying(found: Sequence[_MicroBatch]) -> list[_MicroBatch]:
    """The micro-batches, with the knowledge of which sizes depend on the shape."""
    result = []
    for is_first in (True, False):
        alike = [one for one in found if (one.update is not None) == is_first]
        sizes = [np.unique(one.block.size_E) for one in alike]
        same = reduce(np.intersect1d, sizes) if len(sizes) > 1 else np.empty(0, np.int64)
        for one in alike:
            varies_E = ~np.isin(one.block.size_E, same)
            varies_E[one.gradients] = False
            # A free has the size of its allocation.
            frees = one.block.target_E >= 0
            varies_E[frees] = varies_E[one.block.target_E[frees]]
            result.append(replace(one, varies_E=varies_E))
    return result


def _most_alike(traced: Sequence[_MicroBatch], shape: BatchShape, *, is_first: bool) -> _MicroBatch:
    """The traced micro-batch with as many tokens or hardly more, and rows of about the same length."""
    tokens = shape.rows * shape.length
    alike = [one for one in traced if (one.update is not None) == is_first]
    large_enough = [one for one in alike if one.tokens >= tokens] or alike

    def difference(one: _MicroBatch) -> tuple[float, int]:
        return round(abs(one.tokens - tokens) / tokens, 1), abs(one.shape.length - shape.length)

    return min(large_enough, key=difference)


class _Events:
    """Events that are appended block by block."""

    def __init__(self) -> None:
        self.sizes: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.phases: list[tuple[int, int, str]] = []
        self.micro_batches: list[int] = []
        self.count = 0

    def add(self, block: _Block, gradients: np.ndarray, kept: np.ndarray) -> None:
        """Append a block, and free at its end what it leaves, except for its allocations at `kept`."""
        base = self.count
        target_E = np.where(block.target_E >= 0, block.target_E + base, block.target_E)
        is_gradient = target_E <= GRADIENT
        if is_gradient.any():
            target_E[is_gradient] = gradients[GRADIENT - target_E[is_gradient]]
        left = np.setdiff1d(np.flatnonzero(block.target_E == NONE), np.concatenate([block.target_E, kept]))
        self.phases += [(base + start, base + end, name) for start, end, name in block.phases]
        for sizes, targets in ((block.size_E, target_E), (block.size_E[left], left + base)):
            self.sizes.append(sizes)
            self.targets.append(targets)
            self.count += len(sizes)

    def joined(self) -> StepEvents:
        """All events."""
        return StepEvents(
            size_E=np.concatenate(self.sizes),
            target_E=np.concatenate(self.targets),
            stream_E=np.zeros(self.count, np.int64),  # One GPU computes on one stream.
            phases=tuple(self.phases),
            micro_batches=tuple(self.micro_batches),
        )


def _joined(start: _Block, traced: Sequence[_MicroBatch], steps: Sequence[Sequence[BatchShape]]) -> StepEvents:
    """The events of steps with these micro-batches, after those of what exists before."""
    events, nothing = _Events(), np.empty(0, np.int64)
    events.add(start, nothing, np.flatnonzero(start.target_E == NONE))
    for step in steps:
        first = _most_alike(traced, step[0], is_first=True)
        gradients = first.gradients + events.count
        for place, shape in enumerate(step):
            own = first if place == 0 else _most_alike(traced, shape, is_first=False)
            events.micro_batches.append(events.count)
            events.add(own.scaled(shape.rows * shape.length), nothing, own.gradients)
        assert first.update is not None
        events.add(first.update, gradients, nothing)
    return events.joined()


def _with_workspaces(made: StepEvents, traced: StepEvents) -> StepEvents:
    """The events with cuBLAS' workspaces at the same distance from the start of a phase as in the traced steps.

    Both begin with what exists before the first step, so the workspaces are at the same places.
    """
    first_of_phase = {name: start for start, _, name in reversed(made.phases)}
    workspaces = []
    for place, use in traced.workspaces:
        start, name = next((start, name) for start, end, name in traced.phases if start <= use <= end)
        workspaces.append((place, first_of_phase[name] + use - start))
    return replace(made, workspaces=tuple(workspaces))
