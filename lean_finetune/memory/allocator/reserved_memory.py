"""What a GPU reserves and what its process takes, above the bytes of tensors.

Tensors (torch.cuda.max_memory_allocated) lie in blocks that the caching allocator reserves (max_memory_reserved), and
beside those the process holds a CUDA context that no allocator sees (nvidia-smi counts it). Reserved bytes are found
by playing the traced events to the allocator's rules; the context is a constant with a margin.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_finetune.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lean_finetune.memory.gpus import CudaContext
from lean_finetune.memory.trace.allocation_origins import OriginTrace

ALLOCATORS = {"native": False, "expandable": True}
"""Whether segments expand, by kind: train.expandable_segments."""


def segments_of(expandable: bool) -> str:
    """The kind of segments that train.expandable_segments asks for."""
    return next(name for name, expands in ALLOCATORS.items() if expands == expandable)


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What the allocator reserves for the traced steps."""

    peak_bytes: int | None
    """The most at any instant; None where the steps run out of memory."""
    by_phase: Mapping[str, int]
    """The most in each phase, as far as the steps came. What one phase reserved, later ones keep."""
    retries: int
    """How often cached blocks had to be given back for want of memory: each stops the device."""
    out_of_memory: str | None
    """Where and why the steps failed; None where they did not."""

    def as_json(self) -> dict[str, Any]:
        """Its part of tiers.json."""
        return {
            "reserved_bytes": self.peak_bytes,
            "reserved_by_phase": dict(self.by_phase),
            "retries": self.retries,
            "out_of_memory": self.out_of_memory,
        }


def reserve(trace: OriginTrace, *, expandable: bool, capacity_bytes: int | None) -> Reserved:
    """Play a trace, with sizes before rounding, to the allocator.

    Args:
        trace: of steps on a GPU.
        expandable: whether segments expand.
        capacity_bytes: memory for PyTorch's blocks; None for no limit.
    """
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity_bytes)
    handles: dict[int, int] = {}
    by_phase: dict[str, int] = {}
    ends = [(start, end, name) for start, end, name in trace.phases]
    phase, running = 0, ""
    for place, (storage, change) in enumerate(trace.events):
        while phase < len(ends) and ends[phase][1] <= place:
            phase += 1
        inside = phase < len(ends) and ends[phase][0] <= place
        running = ends[phase][2] if inside else ""
        try:
            if change > 0:
                handles[storage] = allocator.allocate(trace.exact_bytes[storage])
            else:
                allocator.free(handles.pop(storage))
        except OutOfMemory as error:
            where = f"{running or 'between phases'}, micro-batch {_micro_batch(trace, place)} of those traced: {error}"
            return Reserved(peak_bytes=None, by_phase=by_phase, retries=allocator.retries, out_of_memory=where)
        if running:
            by_phase[running] = max(by_phase.get(running, 0), allocator.reserved_bytes)
    peak = allocator.peak_reserved_bytes
    return Reserved(peak_bytes=peak, by_phase=by_phase, retries=allocator.retries, out_of_memory=None)


def _micro_batch(trace: OriginTrace, place: int) -> int:
    """Number of the micro-batch that ran at an event, from 1; 0 before the first."""
    return sum(start <= place for start, _ in trace.micro_batches)


def tiers(trace: OriginTrace, capacity_bytes: int, context: CudaContext) -> dict[str, Any]:
    """The content of tiers.json for a GPU: reserved bytes by either allocator, and what the process takes.

    Played without a limit for the figures, and within the device's memory less the most of a context for the failure.

    Args:
        trace: of the worst micro-batches.
        capacity_bytes: all of the device's memory.
        context: what the process takes of it beside PyTorch's blocks.
    """
    found: dict[str, Any] = {}
    for name, expandable in ALLOCATORS.items():
        unlimited = reserve(trace, expandable=expandable, capacity_bytes=None)
        assert unlimited.peak_bytes is not None
        limited = reserve(trace, expandable=expandable, capacity_bytes=capacity_bytes - context.max_bytes)
        found[name] = {
            **unlimited.as_json(),
            "retries": limited.retries,
            "out_of_memory": limited.out_of_memory,
            "process_bytes": unlimited.peak_bytes + context.bytes,
            "process_margin_bytes": context.margin_bytes,
        }
    return found


def tiers_metrics(reserved: Mapping[str, Any] | None, expandable: bool) -> dict[str, Any]:
    """Part of figures.json: what the worst micro-batches reserve, in the run's own segments and in each kind.

    `reserved` is the content of tiers.json; None for a CPU, which reserves nothing.
    """
    kinds = {"": segments_of(expandable), **{f"_{name}": name for name in ALLOCATORS}}
    told = {
        f"reserved_bytes_predicted{suffix}": None if reserved is None else reserved[kind]["reserved_bytes"]
        for suffix, kind in kinds.items()
    }
    return {**told, "process_bytes_predicted": None if reserved is None else reserved[kinds[""]]["process_bytes"]}
