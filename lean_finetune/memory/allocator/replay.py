"""Replay the allocations of traced optimizer steps in the caching allocator, and record what each step reserves."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from lean_finetune.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lean_finetune.memory.predict.traced_shapes import TracedSteps
from lean_finetune.memory.trace.allocation_origins import OriginTrace


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
    out_of_memory: OutOfMemory | None = None
    """Why the step after them failed; None if all were finished."""
    failed_phase: str | None = None
    """The phase in which it failed; None between two phases or if all were finished."""

    @property
    def reserved_peak_bytes(self) -> int:
        """The most bytes reserved at any instant of the finished steps."""
        return max(step.reserved_peak_bytes for step in self.steps)

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


def replay(trace: OriginTrace, steps: TracedSteps, *, expandable: bool, capacity_bytes: int | None) -> Replay:
    """Replay a trace of these steps in the caching allocator; `capacity_bytes` is None for no limit."""
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    events = trace.events
    phases: list[str | None] = [None] * len(events)  # None between two phases.
    for start, end, name in trace.phases:
        phases[start:end] = [name] * (end - start)
    handles: dict[int, int] = {}
    finished: list[StepMemory] = []
    by_phase: dict[str, int] = {}
    # What precedes the first step belongs to it.
    next_steps = accumulate(len(shapes) for shapes in steps[:-1])
    ends = [*(trace.micro_batches[number][0] for number in next_steps), len(events)]
    start = 0
    for end in ends:
        allocator.reset_peaks()
        retries = allocator.retries
        for place in range(start, end):
            storage, change = events[place]
            phase = phases[place]
            try:
                if change > 0:
                    handles[storage] = allocator.allocate(trace.exact_bytes[storage])
                else:
                    allocator.free(handles.pop(storage))
            except OutOfMemory as error:
                return Replay(
                    steps=tuple(finished), reserved_by_phase=by_phase, out_of_memory=error, failed_phase=phase
                )
            if phase is not None:
                by_phase[phase] = max(by_phase.get(phase, 0), allocator.reserved_bytes)
        start = end
        finished.append(
            StepMemory(
                allocated_peak_bytes=allocator.peak_allocated_bytes,
                reserved_peak_bytes=allocator.peak_reserved_bytes,
                reserved_bytes=allocator.reserved_bytes,
                retries=allocator.retries - retries,
            )
        )
    return Replay(steps=tuple(finished), reserved_by_phase=by_phase)
