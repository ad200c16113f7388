"""Predict what the caching allocator reserves over a plan, and the optimizer step in which memory would run out.

A GPU holds more than tensors (torch.cuda.max_memory_allocated): they are in blocks that the caching allocator reserves
(max_memory_reserved), and the process has a CUDA context besides, which only nvidia-smi counts. Reserved memory is
found by tracing a sample of the plan's steps and replaying their allocations by the allocator's rules.

A bounded sample is enough: reserved memory hardly grows after the first step, because the plan puts its largest
micro-batch there. The sample has micro-batches of the first step, the one that sets the peak, and those of further
steps at even distances.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from cuda_memory.allocator import Arena, CachingAllocator, CapacityExceeded
from cuda_memory.gpus import Device, Figure
from cuda_memory.units import GIB, counted
from lean_finetune.memory.predict.deep_events import NONE, StepEvents, layers_to_trace, step_events
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.predict.process_memory import outside_of_blocks
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.plan.batch_plan import Plan
from lean_finetune.step.batches import BatchShape

ALLOCATORS = {"native": False, "expandable": True}
"""The kinds of segments, and whether they expand (train.expandable_segments)."""
MAX_MICRO_BATCHES = 12
MAX_TRACED_LAYERS = 128
"""Layers that are traced, over all micro-batches together: 10 micro-batches of an 8B model, in 3 + 4 + 5 layers."""
MIN_MICRO_BATCHES = 2
RESERVED_COLUMNS = ("step", "allocated_gib", "reserved_gib", "reserved_expandable_gib", "retries")


def segments_of(expandable: bool) -> str:
    """The kind of segments that a value of train.expandable_segments selects."""
    return "expandable" if expandable else "native"


def kinds_by_suffix(chosen: str) -> dict[str, str]:
    """The kind of segments by suffix of a metric's name; no suffix means the run's own kind."""
    return {"": chosen, **{f"_{kind}": kind for kind in ALLOCATORS}}


def tiers_metrics(tiers: Mapping[str, Any] | None, *, expandable: bool) -> dict[str, Any]:
    """Reserved and process memory in figures.json, from the content of tiers.json; None for a CPU."""
    chosen = segments_of(expandable)
    metrics = {
        f"reserved_bytes_predicted{suffix}": tiers and tiers[kind]["reserved_bytes"]
        for suffix, kind in kinds_by_suffix(chosen).items()
    }
    return {**metrics, "process_bytes_predicted": tiers and tiers[chosen]["process_bytes"]}


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The allocator's counters over one optimizer step."""

    allocated_peak_bytes: int
    """torch.cuda.max_memory_allocated over the step."""
    reserved_peak_bytes: int
    """torch.cuda.max_memory_reserved over the step."""
    reserved_bytes: int
    """torch.cuda.memory_reserved at its end: what the next step finds, and what nvidia-smi shows."""
    retries: int
    """How often the allocator released its cached blocks to serve a request."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What the caching allocator did with the traced steps."""

    steps: tuple[StepMemory, ...]
    """The steps that were finished."""
    reserved_by_phase: Mapping[str, int]
    """The most bytes reserved in each phase. Later phases keep what an earlier one reserved."""
    out_of_memory: CapacityExceeded | None = None
    """Why the step after them failed; None if all were finished."""
    failed_phase: str | None = None
    """The phase in which it failed; None between two phases or if all were finished."""

    @property
    def reserved_peak_bytes(self) -> int:
        """The most bytes reserved at any instant of the finished steps."""
        return max(step.reserved_peak_bytes for step in self.steps)

    @property
    def allocated_peak_bytes(self) -> int:
        """The most bytes of tensors at any instant of the finished steps, as the allocator counts them."""
        return max(step.allocated_peak_bytes for step in self.steps)

    @property
    def retries(self) -> int:
        """How often the allocator released its cached blocks in the finished steps."""
        return sum(step.retries for step in self.steps)

    @property
    def settled_step(self) -> int:
        """The first step after which reserved bytes no longer change; 0 if no step was finished."""
        last = len(self.steps)
        while last > 1 and self.steps[last - 2].reserved_bytes == self.steps[last - 1].reserved_bytes:
            last -= 1
        return max(last - 1, 0)


def replay(
    events: StepEvents, steps: TracedSteps, *, expandable: bool, capacity_bytes: int | None, rounds: int = 1
) -> Replay:
    """Replay the events of these steps in the caching allocator; `capacity_bytes` is None for no limit.

    With more than one of `rounds` the steps are repeated: the next ones find what the first ones left reserved.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    size, target, stream = (array.tolist() for array in (events.size_E, events.target_E, events.stream_E))
    arenas = {number: Arena(stream=number) for number in {*stream}}
    phases: list[str | None] = [None] * len(events)  # None between two phases.
    for start, end, name in events.phases:
        phases[start:end] = [name] * (end - start)
    handles: dict[int, int] = {}
    finished: list[StepMemory] = []
    by_phase: dict[str, int] = {}
    next_steps = accumulate(len(shapes) for shapes in steps)
    bounds = [events.micro_batches[number] for number in (0, *next_steps) if number < len(events.micro_batches)]
    spans = list(pairwise([*bounds, len(events)]))
    freed_earlier: set[int] = set()  # Allocations before the steps that these freed.
    later, made_before = {place for place, _ in events.workspaces}, {use: place for place, use in events.workspaces}
    # What precedes the first step belongs to it.
    for number, (start, end) in enumerate([(0, spans[0][1]), *spans[1:], *spans * (rounds - 1)]):
        if number and number % len(spans) == 0:
            for place in [place for place in handles if place >= start]:
                # The next round frees what replaced it, such as a moment that Adafactor computes anew in each step.
                replaced = next((old for old in sorted(freed_earlier) if size[old] == size[place]), None)
                if replaced is None:
                    allocator.free(handles.pop(place))
                else:
                    freed_earlier.remove(replaced)
                    handles[replaced] = handles.pop(place)
        allocator.reset_peaks()
        retries = allocator.retries
        for place in range(start, end):
            phase = phases[place]
            try:
                if (workspace := made_before.pop(place, None)) is not None:
                    handles[workspace] = allocator.allocate(size[workspace], arenas[stream[workspace]])
                if place in later:
                    continue
                if target[place] == NONE:
                    handles[place] = allocator.allocate(size[place], arenas[stream[place]])
                elif target[place] not in freed_earlier:
                    allocator.free(handles.pop(target[place]))
                    if target[place] < spans[0][0]:
                        freed_earlier.add(target[place])
            except CapacityExceeded as error:
                return Replay(
                    steps=tuple(finished), reserved_by_phase=by_phase, out_of_memory=error, failed_phase=phase
                )
            if phase is not None:
                by_phase[phase] = max(by_phase.get(phase, 0), allocator.reserved_bytes)
        finished.append(
            StepMemory(
                allocated_peak_bytes=allocator.peak_allocated_bytes,
                reserved_peak_bytes=allocator.peak_reserved_bytes,
                reserved_bytes=allocator.reserved_bytes,
                retries=allocator.retries - retries,
            )
        )
    return Replay(steps=tuple(finished), reserved_by_phase=by_phase)


class Replays(Mapping[str, Replay]):
    """Replays by kind of segments, each made when it is first read: a verdict needs one kind alone."""

    def __init__(self, make: Callable[[str], Replay]):
        self._make = make
        self._made: dict[str, Replay] = {}

    def __getitem__(self, kind: str) -> Replay:
        """The replay with segments of this kind."""
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def __iter__(self) -> Iterator[str]:
        """The kinds of segments."""
        return iter(ALLOCATORS)

    def __len__(self) -> int:
        """How many kinds there are."""
        return len(ALLOCATORS)


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """The replays of sampled steps, with either kind of segments."""

    steps: tuple[int, ...]
    """Numbers of the sampled optimizer steps, ascending."""
    chosen: str
    """The run's own kind of segments: train.expandable_segments."""
    unlimited: Mapping[str, Replay]
    """By kind of segments, with unlimited memory."""
    limited: Mapping[str, Replay]
    """By kind of segments, within the device's memory less the most that a CUDA context takes."""
    outside: Sequence[Figure]
    """Memory of the process outside of the blocks: the CUDA context, and NCCL's buffers on several GPUs."""

    def failing_step(self, kind: str) -> int | None:
        """The optimizer step, from 0, that runs out of memory; None if none does."""
        found = self.limited[kind]
        return None if found.out_of_memory is None else self.steps[len(found.steps)]

    def held_bytes(self, kind: str) -> int:
        """The most bytes that are reserved on the device, or would be if it were large enough."""
        return (self.unlimited if self.failing_step(kind) is not None else self.limited)[kind].reserved_peak_bytes

    def first_step_above(self, limit_bytes: int) -> int | None:
        """The first optimizer step, from 0, whose tensors exceed a limit; None if none does."""
        replayed = zip(self.steps, self.unlimited["native"].steps, strict=True)
        return next((number for number, step in replayed if step.allocated_peak_bytes > limit_bytes), None)

    def metrics(self) -> dict[str, Any]:
        """The part of figures.json that only a replay knows."""
        metrics: dict[str, Any] = {"reserved_settled_step": self.steps[self.unlimited[self.chosen].settled_step]}
        for suffix, kind in kinds_by_suffix(self.chosen).items():
            metrics[f"retries_predicted{suffix}"] = self.limited[kind].retries
            metrics[f"out_of_memory_step{suffix}"] = self.failing_step(kind)
        return metrics

    def tiers(self) -> dict[str, Any]:
        """The content of tiers.json."""
        found = {}
        for kind, unlimited in self.unlimited.items():
            limited, step = self.limited[kind], self.failing_step(kind)
            where = f"optimizer step {step}, {limited.failed_phase or 'between phases'}"
            found[kind] = {
                "tensors_bytes": unlimited.allocated_peak_bytes,
                "reserved_bytes": unlimited.reserved_peak_bytes,
                "reserved_by_phase": dict(unlimited.reserved_by_phase),
                "retries": limited.retries,
                "out_of_memory": None if step is None else f"{where}: {limited.out_of_memory}",
                "process_bytes": unlimited.reserved_peak_bytes + sum(figure.bytes for figure in self.outside),
                "process_margin_bytes": sum(figure.margin_bytes for figure in self.outside),
            }
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The rows of reserved.csv."""
        native, expandable = self.unlimited["native"].steps, self.unlimited["expandable"].steps
        limited = self.limited[self.chosen].steps
        return [
            {
                "step": step,
                "allocated_gib": round(native[place].allocated_peak_bytes / GIB, 6),
                "reserved_gib": round(native[place].reserved_peak_bytes / GIB, 6),
                "reserved_expandable_gib": round(expandable[place].reserved_peak_bytes / GIB, 6),
                "retries": limited[place].retries if place < len(limited) else None,
            }
            for place, step in enumerate(self.steps)
        ]


def replay_plan(
    plan: Plan,
    lengths: np.ndarray,
    model: TracedModel,
    prediction: Prediction,
    *,
    expandable: bool,
    device: Device,
) -> tuple[PlanMemory | None, str]:
    """Replay a sample of what one GPU computes, and describe the sample; None and the reason for several GPUs.

    `lengths` are the tokens of every training row, `prediction` is of the same run. The memory of `device` limits it.
    """
    if model.setting.distributed:
        return None, "worst micro-batches only: several GPUs share the steps"
    sampled = sample_steps(plan, lengths, prediction.steps_of_peak, layers=layers_to_trace(model))
    steps = tuple(sampled.values())
    events, _ = step_events(model, steps)
    memory = replay_steps(events, steps, expandable=expandable, device=device, numbers=tuple(sampled))
    replayed, planned = sum(map(len, steps)), len(plan)
    if replayed == planned:
        return memory, "the only step replayed" if len(steps) == 1 else f"all {len(steps)} steps replayed"
    parts = f"{replayed} of {planned} micro-batches in {len(steps)} of {counted(len(plan.steps), 'step')}"
    return memory, f"{parts} replayed: the first and the largest, and a sample of the others"


def replay_steps(
    events: StepEvents,
    steps: TracedSteps,
    *,
    expandable: bool,
    device: Device,
    numbers: tuple[int, ...] | None = None,
    rounds: int = 1,
    gpus: int = 1,
) -> PlanMemory:
    """Replay the events of steps with either kind of segments, without a limit and within a device's memory.

    `numbers` are those of the optimizer steps; None = 0, 1, … `rounds` as for `replay`.
    """
    limit_bytes = device.memory_bytes - device.context.max_bytes

    def play(kind: str, capacity_bytes: int | None) -> Replay:
        return replay(events, steps, expandable=ALLOCATORS[kind], capacity_bytes=capacity_bytes, rounds=rounds)

    def within_device(kind: str) -> Replay:
        fits = unlimited[kind].reserved_peak_bytes <= limit_bytes
        return unlimited[kind] if fits else play(kind, limit_bytes)

    unlimited = Replays(partial(play, capacity_bytes=None))
    limited = Replays(within_device)
    return PlanMemory(
        steps=numbers or tuple(range(len(steps) * rounds)),
        chosen=segments_of(expandable),
        unlimited=unlimited,
        limited=limited,
        outside=outside_of_blocks(device, gpus),
    )


def sample_steps(
    plan: Plan, lengths: np.ndarray, steps_of_peak: TracedSteps, *, layers: int
) -> dict[int, tuple[BatchShape, ...]]:
    """Choose micro-batches of what one GPU computes; return their shapes by optimizer step, in the plan's order."""
    most = max(MIN_MICRO_BATCHES, min(MAX_MICRO_BATCHES, MAX_TRACED_LAYERS // layers))
    sampled: dict[int, tuple[BatchShape, ...]] = {}
    for number in sample_micro_batches(plan, lengths, steps_of_peak, most):
        micro_batch = plan.micro_batch(number)
        sampled[micro_batch.step] = (*sampled.get(micro_batch.step, ()), BatchShape.of(micro_batch, lengths))
    return sampled


def sample_micro_batches(plan: Plan, lengths: np.ndarray, steps_of_peak: TracedSteps, most: int) -> Sequence[int]:
    """Return the numbers of all micro-batches, or of about `most`, with the one that sets the peak."""
    if len(plan) <= most:
        return range(len(plan))
    return _sample(plan, _peak_number(plan, lengths, steps_of_peak), most)


def _sample(plan: Plan, peak: int, most: int) -> Sequence[int]:
    """Return about `most` numbers of micro-batches: a quarter of them from the first step, two from each further step.

    A further step is represented by its first micro-batch, which allocates the gradients, and its largest other one,
    which needs space between them.
    """
    bounds, tokens = plan.step_bounds, plan.padded_tokens
    first_of_peak = int(bounds[plan.step[peak] - plan.step[0]])
    chosen = {0, first_of_peak, peak, *_evenly(0, bounds[1], most // 4)}
    for step in _evenly(1, len(bounds) - 1, max(0, most - len(chosen)) // 2):
        first, end = int(bounds[step]), int(bounds[step + 1])
        chosen |= {first, max(range(first, end), key=lambda number: (number > first, tokens[number]))}
    return sorted(chosen)


def _evenly(start: int, end: int, count: int) -> list[int]:
    """Return at most `count` different numbers of range(start, end) at even distances, from its first to its last."""
    return np.unique(np.linspace(start, end - 1, count).astype(int)).tolist() if start < end else []


def _peak_number(plan: Plan, lengths: np.ndarray, steps_of_peak: TracedSteps) -> int:
    """Return the number of the first micro-batch with the shape and the position in its step that set the peak."""
    wanted, is_first = steps_of_peak[-1][-1], len(steps_of_peak[-1]) == 1
    starts = np.isin(np.arange(len(plan)), plan.step_bounds)
    alike = (plan.length == wanted.length) & (plan.supervised == wanted.supervised) & (starts == is_first)
    return next(
        number
        for number in np.flatnonzero(alike).tolist()
        if BatchShape.of(plan.micro_batch(number), lengths) == wanted
    )
