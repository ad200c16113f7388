"""Skip work on parts that are alike: the trace repeats the events of one that ran.

The loss works on a micro-batch in hundreds of parts (`head_loss.in_parts`). The first two parts of one size run. If
both allocate and free the same, so do the next ones, and their events are appended without running any operation. The
last one of this size runs again, as a check. So events, origins and peaks are those of running every part.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from lean_finetune.memory.trace.memory_trace import MemoryTrace
from lean_finetune.patches.of_traces import ALIKE_LAYERS
from lean_finetune.step.head_loss import Parts, looping_by, run_all

KNOWN_VALUE = "known_value"
"""Attribute of a fake tensor with its values, if they are known."""
FEWEST = 4
"""Parts of one size from which on some are skipped."""
Found = TypeVar("Found")


class PartsDiffer(Exception):
    """The last part has other events than those that were skipped."""


def skipping_parts(run: Callable[[bool], Found]) -> Found:
    """`run(True)`, which may skip parts; `run(False)` if they turn out to differ."""
    try:
        return run(True)
    except PartsDiffer:
        return run(False)


def part_loop(trace: MemoryTrace, *, skip: bool, all_events: bool) -> AbstractContextManager[None]:
    """A context in which loops run as many parts as `trace` needs, or all of them.

    Without `all_events`, skipped parts repeat the allocation of their result alone: the last one, which runs, has at
    least as many bytes before it.
    """
    return looping_by(lambda work, parts: _loop(trace, work, parts, all_events)) if skip else nullcontext()


def _loop(trace: MemoryTrace, work: Callable[..., Any], parts: Parts, all_events: bool) -> list[Any]:
    """The results of all parts."""
    forms = [[_form(tensor) for tensor in part] for part in parts]
    alike = next((number for number, form in enumerate(forms) if form != forms[0]), len(parts))
    if alike < FEWEST or not trace.can_repeat:
        return run_all(work, parts)
    (first, events), (second, same) = (_run_part(trace, work, part) for part in parts[:2])
    if events is None or events != same:
        return [first, second, *run_all(work, parts[2:])]
    repeat = _repeat if all_events else _repeat_result
    skipped = [repeat(trace, events, second) for _ in parts[2 : alike - 1]]
    last, same = _run_part(trace, work, parts[alike - 1])
    if events != same:
        raise PartsDiffer
    return [first, second, *skipped, last, *run_all(work, parts[alike:])]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the work on a tensor depends on, and the memory of its result."""
    return tensor.shape, tensor.stride(), tensor.dtype


@dataclass(frozen=True, kw_only=True)
class _Events:
    """What work on a part allocates and frees, and its result."""

    changes: tuple[tuple[int, bool], ...]
    """(storage, whether it is allocated); numbered from the first one of the part."""
    storages: tuple[Any, ...]
    """Size, category and origin of each."""
    kept: int | None
    """The storage of the result; None without a result."""
    result: tuple[Any, ...] | None
    first: int = field(compare=False)
    """The number of the part's first storage in the trace."""


def _run_part(
    trace: MemoryTrace, work: Callable[..., Any], part: tuple[Any, ...], options: Mapping[str, Any] | None = None
) -> tuple[Any, _Events | None]:
    """The result of a part and its events; None for them if memory beside the result differs afterwards."""
    begin, first = trace.event_count, trace.storage_count
    result = work(*part, **(options or {}))
    if result is not None and not isinstance(result, torch.Tensor):
        return result, None
    changes = [(storage - first, change > 0) for storage, change in trace.events_from(begin)]
    kept = {storage for storage, allocated in changes if allocated}
    kept -= (freed := {storage for storage, allocated in changes if not allocated})
    own = None if result is None else trace.storage_of(result) - first
    if kept != ({own} - {None}) or min(freed, default=0) < 0 or (result is not None and result.requires_grad):
        return result, None
    return result, _Events(
        changes=tuple(changes),
        storages=tuple(trace.described(storage) for storage in range(first, trace.storage_count)),
        kept=own,
        result=None if result is None else (*_form(result), result.storage_offset()),
        first=first,
    )


def _repeat(trace: MemoryTrace, events: _Events, result: torch.Tensor | None) -> torch.Tensor | None:
    """Append the events of a part that does not run; returns a tensor that stands for its result."""
    offset = trace.storage_count - events.first
    for storage, allocated in events.changes:
        if allocated:
            trace.add_like(events.first + storage)
        else:
            trace.free(events.first + storage + offset)
    if result is None or events.kept is None:
        return None
    return trace.stand_in(result, events.first + events.kept + offset)


def _repeat_result(trace: MemoryTrace, events: _Events, result: torch.Tensor | None) -> torch.Tensor | None:
    """As `_repeat`, but append the allocation of the result alone."""
    if result is None or events.kept is None:
        return None
    return trace.stand_in(result, trace.add_like(events.first + events.kept))


# Layers of frozen towers, which keep nothing for backward: of those with the same weights and the same inputs,
# two run.


@dataclass(kw_only=True)
class _Layers:
    """Layers that ran, by what decides their events."""

    trace: MemoryTrace
    all_events: bool
    """Whether events are wanted that are undone within a layer, and that set no peak."""
    first: dict[Any, _Events | None] = field(default_factory=dict)
    second: dict[Any, tuple[_Events, int]] = field(default_factory=dict)
    """Events that two layers had, and the bytes that existed before the second."""


def skip_alike_layers(model: nn.Module, trace: MemoryTrace, *, all_events: bool) -> None:
    """Let layers of frozen parts beside a decoder repeat the events of an equal layer, once two have the same.

    Without `all_events` they repeat the allocation of their result alone, where as many bytes exist as before.
    """
    ran = _Layers(trace=trace, all_events=all_events)
    frozen = [part for module in model.modules() for part in getattr(module, "frozen_parts", ())]
    for listed in {each for part in frozen for each in part.modules() if isinstance(each, nn.ModuleList)}:
        for layer in listed:
            ALIKE_LAYERS.give_method(layer, partial(_layer, ran, layer, layer.forward))


def _layer(ran: _Layers, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a layer, which runs unless two equal ones did."""
    trace = ran.trace
    if torch.is_grad_enabled() or not trace.can_repeat:
        return forward(*args, **kwargs)
    inputs, _ = tree_flatten((args, kwargs))
    key = type(layer), tuple(map(_form, layer.parameters())), tuple(map(_input, inputs))
    before_bytes = trace.current_bytes
    if key in ran.second:
        events, known_bytes = ran.second[key]
        assert events.result is not None and events.kept is not None
        shape, strides, dtype, _ = events.result
        with _disable_current_modes():
            alike = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        repeat = _repeat if ran.all_events or before_bytes != known_bytes else _repeat_result
        return repeat(trace, events, alike)
    result, found = _run_part(trace, forward, args, kwargs)
    if found is not None and found.result is not None and ran.first.get(key) == found:
        ran.second[key] = found, before_bytes
    ran.first[key] = found
    return result


def _input(value: Any) -> Any:
    """What a layer sees of an argument: of integers whose values are known, the values too."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    if (known := getattr(value, KNOWN_VALUE, None)) is None:
        return _form(value)
    with unset_fake_temporarily(), _disable_current_modes():
        return _form(value), str(known.tolist())
