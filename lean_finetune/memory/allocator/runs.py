"""A traced run as the timeline of a replay: exact sizes and origins, cut into the units of the plan."""

import re
from collections.abc import Hashable
from functools import cache

from lean_finetune.memory.allocator.cut import Timeline, Unit
from lean_finetune.memory.allocator.step_units import StepKind, step_units
from lean_finetune.memory.trace.allocation_origins import Origin, OriginTrace

CLIP = "clip"
"""The phase with which a step's update begins."""
SCALAR, HEAD = "scalar", "head"
"""In place of an operation, for single values and for what is shaped like the head's weight."""


def timeline_of(trace: OriginTrace, kind: StepKind, *, layers: int, vocab_size: int, period: int = 1) -> Timeline:
    """The events of whole steps, with sizes before rounding.

    Args:
        trace: of any number of steps.
        kind: of the setting's steps.
        layers: of the traced model.
        vocab_size: of the traced model.
        period: every so many layers they are alike.
    """
    events = tuple(
        (storage, trace.exact_bytes[storage] * (1 if change > 0 else -1)) for storage, change in trace.events
    )
    updates = [start for start, _, phase in trace.phases if phase == CLIP]
    marks: list[tuple[int, Unit]] = []
    begun = list(trace.micro_batches)
    for update in updates:
        own = [(start, shape) for start, shape in begun if start < update]
        begun = begun[len(own) :]
        starts = [*(start for start, _ in own), update]
        marks += zip(starts, step_units([shape for _, shape in own], kind), strict=True)
    kinds = {storage: _kind(origin, vocab_size, period) for storage, origin in trace.origins.items()}
    return Timeline(events=events, units=tuple(marks), kinds=kinds, movable=_is_head, layers=layers)


def _is_head(kind: Hashable) -> bool:
    """Whether tensors are of the kind of the head's gradients: a sum with the embedding's is where either was."""
    return isinstance(kind, tuple) and kind[0] == HEAD


def _kind(origin: Origin, vocab_size: int, period: int) -> Hashable:
    """What made a storage, with no number of a layer: those of all layers that are alike are of one kind.

    So are those that are summed up chunk by chunk, whatever operation made them: the losses and the head's gradients.
    """
    operation, module = origin.operation, origin.module
    if origin.shape == ():
        operation = SCALAR
    elif origin.shape is not None and len(origin.shape) == 2 and origin.shape[0] == vocab_size != origin.shape[1]:
        operation, module = HEAD, ""
    return operation, _without_numbers(module, period), origin.phase


@cache
def _without_numbers(module: str, period: int) -> str:
    """A module's path with * for every number, and its place in the period where there is one."""

    def place(number: re.Match[str]) -> str:
        return "*" if period == 1 else f"*{int(number[0]) % period}"

    return re.sub(r"(?<=\.)\d+(?=\.|$)", place, module)
