"""Explain a predicted peak: which allocations are alive at that instant, what made them, and the timeline up to it.

A trace of all layers gives every instant. An extrapolation from shallow models gives the fullest instant of each of
its windows; the windows of the other layers are interpolated between the windows of the first and the last layers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_memory.units import GIB
from lean_finetune.memory.predict.depth_extrapolation import (
    AFTER,
    BEFORE,
    INSIDE,
    Label,
    WindowTrace,
    peak_of_contents,
)
from lean_finetune.memory.predict.layer_repetition import Repetition
from lean_finetune.memory.predict.peak import Extrapolation, Prediction, predict_from
from lean_finetune.memory.predict.traced_step import UPDATE_PHASES, TracedModel, TracedSteps, trace_steps
from lean_finetune.memory.trace.memory_trace import CATEGORIES
from lean_finetune.memory.trace.origin_trace import KIND_FIELDS, AllocationKind, OriginTrace

MAX_GROUPS = 10
TIMELINE_POINTS = 400
"""Instants in a timeline: as many as a plot can show."""
TIMELINE_COLUMNS = ("event", "phase", *CATEGORIES)
BETWEEN = "between"
"""Phase of events outside any phase: a micro-batch is created, a loss is freed."""


AllocationGroup = Mapping[str, Any]
"""Allocations alive at the peak that are alike but for their layer: the fields of their kind, `count` and `bytes`."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What the peak consists of."""

    peak_bytes: int
    phase: str
    top: tuple[AllocationGroup, ...]
    """The largest groups at the peak."""
    timeline: Sequence[Mapping[str, Any]]
    """GiB by category at instants of the worst step, in order; columns as in `TIMELINE_COLUMNS`."""

    def as_json(self) -> dict[str, Any]:
        """Content of explanation.json, without the states."""
        return {"peak_bytes": self.peak_bytes, "phase": self.phase, "top": self.top}


class OriginWindowTrace(WindowTrace, OriginTrace):
    """Finds the peak of every window, and distinguishes its allocations by their origin."""

    def label(self, storage_id: int) -> Label:
        """See WindowTrace."""
        return self.kind(storage_id)


def predict_explained(model: TracedModel, steps: TracedSteps) -> tuple[Prediction, Explanation]:
    """`predict`, with an explanation of the peak.

    Raises:
        UserError: the model's memory depends on the data, or PyTorch cannot trace one of its operations.
    """
    prediction, deep = predict_from(OriginWindowTrace, model, steps)
    if deep is None:
        fullest = model.with_setting(prediction.setting)
        return prediction, explain(trace_origins(fullest, prediction.steps_of_peak))
    return prediction, _explain_extrapolation(deep, prediction, steps, model.target.granularity_bytes)


def trace_origins(model: TracedModel, steps: TracedSteps) -> OriginTrace:
    """Trace steps of the whole model, recording the origin of every allocation."""
    return trace_steps(OriginTrace, model, steps)[0]


def explain(trace: OriginTrace) -> Explanation:
    """Explain the peak of a trace of all layers."""
    changes = np.array([change for _, change in trace.events])
    phases = np.full(len(changes), BETWEEN, dtype="U16")
    for first, end, name in trace.phases:
        phases[first:end] = name
    current_bytes = np.cumsum(changes)
    # Between two phases only inputs grow, and the next phase begins with them.
    peak = int(np.argmax(np.where(phases != BETWEEN, current_bytes, -1)))
    live: dict[int, int] = {}
    for storage, change in trace.events[: peak + 1]:
        if change > 0:
            live[storage] = change
        else:
            del live[storage]
    return Explanation(
        peak_bytes=int(current_bytes[peak]),
        phase=str(phases[peak]),
        top=_largest_groups((trace.kind(storage), 1, size) for storage, size in live.items()),
        timeline=_timeline_of_trace(trace, changes, phases),
    )


def _largest_groups(allocations: Iterable[tuple[AllocationKind, int, int]]) -> tuple[AllocationGroup, ...]:
    """Sum (kind, count, bytes) by kind, and keep the largest."""
    counts: Counter[AllocationKind] = Counter()
    sizes: Counter[AllocationKind] = Counter()
    for kind, count, size in allocations:
        counts[kind] += count
        sizes[kind] += size
    largest = sorted(sizes.items(), key=lambda item: (-item[1], str(item[0])))[:MAX_GROUPS]
    return tuple(
        {**dict(zip(KIND_FIELDS, kind, strict=True)), "count": counts[kind], "bytes": size} for kind, size in largest
    )


def _timeline_of_trace(trace: OriginTrace, changes: np.ndarray, phases: np.ndarray) -> list[Mapping[str, Any]]:
    """Bytes by category at the highest instant of each of `TIMELINE_POINTS` equal intervals of the steps."""
    category = np.array([CATEGORIES.index(trace.category(storage)) for storage, _ in trace.events])
    bytes_CE = np.zeros((len(CATEGORIES), len(changes)), dtype=np.int64)  # C categories, E events.
    bytes_CE[category, np.arange(len(changes))] = changes
    bytes_CE = bytes_CE.cumsum(axis=1)
    total = bytes_CE.sum(axis=0)
    start = trace.micro_batches[0][0]
    edges = np.unique(np.linspace(start, len(changes), TIMELINE_POINTS + 1).astype(int)).tolist()
    rows: list[Mapping[str, Any]] = []
    for first, end in zip(edges[:-1], edges[1:], strict=True):
        event = first + int(np.argmax(total[first:end]))
        sizes = dict(zip(CATEGORIES, bytes_CE[:, event].tolist(), strict=True))
        rows.append(_timeline_row(event - start, str(phases[event]), sizes))
    return rows


def _timeline_row(event: int, phase: str, sizes: Mapping[str, int]) -> Mapping[str, Any]:
    """A row of timeline.csv."""
    gib = {category: round(sizes.get(category, 0) / GIB, 6) for category in CATEGORIES}
    return {"event": event, "phase": phase, **gib}


def _explain_extrapolation(
    deep: Extrapolation, prediction: Prediction, steps: TracedSteps, granularity_bytes: int
) -> Explanation:
    """Explain the peak of a model that was extrapolated from shallow ones."""
    phase, windows = prediction.worst_phase, deep[0]
    in_phase = [window.contents for window in windows.values() if window.phase == phase]
    fullest = max(in_phase, key=lambda contents: peak_of_contents(contents, granularity_bytes).bytes)
    allocations = (
        (label, count, count * (-(-size // granularity_bytes) * granularity_bytes))
        for (label, size), count in fullest.items()
    )
    rows = _timeline_of_windows(deep, _shown_micro_batches(prediction, steps), granularity_bytes)
    return Explanation(
        peak_bytes=prediction.peak.bytes,
        phase=phase,
        top=_largest_groups(allocations),
        timeline=[_timeline_row(number, *row) for number, row in enumerate(rows)],
    )


def _timeline_of_windows(
    deep: Extrapolation, shown: Mapping[tuple[bool, int], bool], granularity_bytes: int
) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Phase, and bytes by category, of every window of the shown micro-batches, in the order of the steps."""
    windows, repetition = deep
    for visit in sorted({place[0] for place in windows}):
        of_visit = {place[1:]: window for place, window in windows.items() if place[0] == visit}
        phase, micro_batch = next((window.phase, window.micro_batch) for window in of_visit.values())
        if not shown[phase in UPDATE_PHASES, micro_batch]:
            continue
        sizes = {
            end: peak_of_contents(window.contents, granularity_bytes).by_category for end, window in of_visit.items()
        }
        for by_category in _in_order(sizes, repetition, backward=phase == "backward"):
            yield phase, by_category


def _shown_micro_batches(prediction: Prediction, steps: TracedSteps) -> Mapping[tuple[bool, int], bool]:
    """By (is update, number of the micro-batch): whether it is the first one, or has the shape that set the peak."""
    worst, later = prediction.steps_of_peak[-1][-1], len(prediction.steps_of_peak[-1]) > 1
    shown: dict[tuple[bool, int], bool] = {}
    number = 0
    for shapes in steps:
        first = number
        for index, shape in enumerate(shapes):
            shown[False, number] = number == 0 or (shape == worst and (index > 0) == later)
            number += 1
        shown[True, number - 1] = any(shown[False, micro_batch] for micro_batch in range(first, number))
    return shown


def _in_order(
    sizes: Mapping[tuple[str, int], Mapping[str, int]], repetition: Repetition, *, backward: bool
) -> Iterator[Mapping[str, int]]:
    """The windows of one phase in order: before any layer, every layer, after the last."""
    for before in (INSIDE, BEFORE):
        if ("outside", before) in sizes:
            yield sizes["outside", before]
    if any(end == "first" for end, _ in sizes):
        layers = range(repetition.layers)
        for layer in reversed(layers) if backward else layers:
            yield _layer_sizes(sizes, layer, repetition)
    if ("outside", AFTER) in sizes:
        yield sizes["outside", AFTER]


def _layer_sizes(
    sizes: Mapping[tuple[str, int], Mapping[str, int]], layer: int, repetition: Repetition
) -> Mapping[str, int]:
    """Bytes by category in one layer's window: as traced near both ends, else interpolated between alike layers."""
    period, from_end = repetition.period, repetition.layers - 1 - layer
    if layer <= period:
        return sizes["first", layer]
    if from_end <= period:
        return sizes["last", from_end]
    low = 1 + (layer - 1) % period
    high_from_end = 1 + (from_end - 1) % period
    below, above = sizes["first", low], sizes["last", high_from_end]
    span = repetition.layers - 1 - high_from_end - low
    return {
        category: below.get(category, 0) + (above.get(category, 0) - below.get(category, 0)) * (layer - low) // span
        for category in {**below, **above}
    }
