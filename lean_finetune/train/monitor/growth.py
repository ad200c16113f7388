"""Why memory grows, judged by the rows of a run's curves: longer batches, fragmentation, a leak, a jump, a cycle.

A row needs `step` and one of `held_bytes`, `allocated_bytes`, `held_reserved_bytes`, `rss_own_bytes` and
`rss_bytes`; the shape of its batches (`SHAPES`) lets growth be judged at equal shape. A cell may be None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lean_finetune.core.units import MIB
from lean_finetune.train.monitor.trend import (
    LEAST_POINTS,
    at_equal_shape,
    block_levels,
    find_jumps,
    find_period,
    meet_confidence,
    ranks_agree,
    rising_confidence,
    steady_trend,
)

Cause = Literal["leak", "fragmentation", "length", "jump", "periodic", "plateau", "flat", "unclear", "too_short"]
Rows = Sequence[Mapping[str, Any]]

HELD, PEAK, RESERVED, OWN, RESIDENT = (
    "held_bytes",
    "allocated_bytes",
    "held_reserved_bytes",
    "rss_own_bytes",
    "rss_bytes",
)
MEMORY = (HELD, PEAK, RESERVED, OWN, RESIDENT)
RETRIES = "alloc_retries"
"""Known of CUDA's allocator alone: where its cells are empty, malloc counted, and what that reserves comes and goes."""
SHAPES = ("largest_micro_batch_tokens", "tokens", "longest_row")
"""Of the batches. A step's tokens count where those of its largest micro-batch, which decide the peak, are unknown."""
SURE = 0.9995
"""Confidence of a cause. A run is looked at many times in several series: see the false alarms in the tests."""
WARM_UP_SHARE = 0.25
"""Of the steps, at the beginning: first uses of kernels, threads and caches."""
LEAK_BYTES, LEAK_SHARE = MIB, 0.001
"""A leak that is less, over the steps it is judged on, in bytes or as a share of the level, is none to tell of."""
GROWTH_BYTES, GROWTH_SHARE = MIB, 0.02
"""Less growth, over a whole run, is flat …"""
MOST_JUMPS = 5
"""More are no jumps but a staircase."""
LENGTH_SHARE = 0.1
"""… and less of it by longer batches is none to tell of: a run that fits has more room than that."""
KNOWN_SHARE = 0.5
"""Of the rows with memory that must have a column: peaks measured on a CPU are those of the largest steps, mostly."""
FRAGMENT_BYTES, FRAGMENT_SHARE = 20 * MIB, 0.05
"""Fragmentation that is less (a segment of CUDA's allocator; of what is reserved) is none to tell of."""
FALLS_SHARE = 0.25
"""Of its rises: what CUDA's allocator has reserved it seldom gives back, so what falls more often is something else."""
RECORD_SHARE = 0.01
"""A batch is a new longest one if it is longer by more than this …"""
LONG_SHARE = 0.95
"""… and among the longest if it has so much of the longest before it."""
EXPLAINED_SHARE = 0.8
"""Of the growth that must come with batches among the longest."""
SETTLED_SHARE = 0.2
"""Of the growth: a plateau has less in its second half."""
QUIET: dict[Cause, int] = {"flat": 0, "periodic": 1}
"""What is said of a run only where no series shows more."""
LEAST_STEPS = 12
"""Fewer tell nothing."""
LEAST_PROCESS_POINTS = 22
"""Of the process's memory: Python's and malloc's caches fill for some 20 steps before they empty."""
LEAST_RESERVED_POINTS = 33
"""Of what is reserved: while batches are still getting longer, segments are added."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What a series of memory does, and why."""

    cause: Cause
    series: str | None
    """Column that shows it; None where there is nothing to show."""
    slope_bytes_per_step: float
    growth_bytes: int
    """Over the steps looked at."""
    confidence: float | None
    """Of the cause; None where it is the absence of others."""
    first_step: int
    last_step: int
    at_equal_shape: bool
    """The batches' shapes were known and taken into account."""
    jump_steps: tuple[int, ...] = ()
    """Cause jump: the steps at which memory rose."""
    largest_jump_bytes: int = 0
    period_steps: float | None = None
    """Cause periodic: steps from one peak to the next."""
    swing_bytes: int = 0
    """Cause periodic: from the lowest to the highest of a period."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Series:
    """One column without its empty cells."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    shapes: tuple[np.ndarray, ...]

    def after(self, start: int) -> "_Series":
        """Its points from a place on."""
        shapes = tuple(shape[start:] for shape in self.shapes)
        return _Series(name=self.name, steps=self.steps[start:], values=self.values[start:], shapes=shapes)

    def grown(self, cause: Cause, slope: float, growth: float, confidence: float | None, **details: Any) -> Growth:
        """What was found over all its points; `details` are further fields of Growth."""
        return Growth(
            cause=cause,
            series=self.name,
            slope_bytes_per_step=slope,
            growth_bytes=round(growth),
            confidence=confidence,
            first_step=int(self.steps[0]),
            last_step=int(self.steps[-1]),
            at_equal_shape=bool(self.shapes),
            **details,
        )


def classify(rows: Rows) -> list[Growth]:
    """The causes of growth that are sure, a leak first, then by bytes; never empty: else what the series look like."""
    found = _leak(rows)
    explained = [one for one in (_fragmentation(rows), _length(rows)) if one is not None]
    explained.sort(key=lambda growth: -growth.growth_bytes)
    causes = ([] if found is None else [found]) + explained
    return causes or [_no_cause(rows)]


def _series(rows: Rows, name: str) -> _Series | None:
    """A column; None where too few rows have it, or where it says nothing."""
    known = [row for row in rows if row.get(name) is not None]
    watched = sum(any(row.get(column) is not None for column in MEMORY) for row in rows)
    if len(known) < max(LEAST_STEPS, KNOWN_SHARE * watched):
        return None
    if name == RESERVED and all(row.get(RETRIES, 0) is None for row in known):
        return None
    shapes = [one for one in SHAPES if all(row.get(one) is not None for row in known)]
    if SHAPES[0] in shapes and SHAPES[1] in shapes:
        shapes.remove(SHAPES[1])
    return _Series(
        name=name,
        steps=_column(known, "step"),
        values=_column(known, name),
        shapes=tuple(_column(known, one) for one in shapes),
    )


def _column(rows: Rows, name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=np.float64)


def _records(series: _Series) -> np.ndarray:
    """Whether each point's batch is longer than every one before it, in some shape."""
    found = np.zeros(len(series.steps), dtype=bool)
    for shape in series.shapes:
        before = np.maximum.accumulate(shape)[:-1]
        found[1:] |= shape[1:] > before * (1 + RECORD_SHARE)
    return found


def _longest(series: _Series) -> np.ndarray:
    """Whether each point's batch is a new longest one, or among the longest in every shape that varies."""
    varying = [shape for shape in series.shapes if shape.min() < shape.max()]
    if not varying:
        return np.zeros(len(series.steps), dtype=bool)
    near = [shape >= LONG_SHARE * np.maximum.accumulate(shape) for shape in varying]
    return _records(series) | np.logical_and.reduce(near)


def _leak(rows: Rows) -> Growth | None:
    """Steady growth at equal shape: of what is held, else of the peaks, else of the process."""
    for name in (HELD, PEAK, OWN, RESIDENT):
        series = _series(rows, name)
        found = None if series is None else _steady_growth(series)
        if found is not None:
            return found
        if name == OWN and series is not None:
            return None  # The other count of the process has mapped files in it, which grow as they are read.
    return None


def _steady_growth(series: _Series) -> Growth | None:
    """A leak, if there is one, after the warm-up and after the longest batch has been."""
    records = np.flatnonzero(_records(series))
    start = max(round(len(series.steps) * WARM_UP_SHARE), records[-1] + 1 if len(records) else 0)
    late = series.after(start)
    if len(late.steps) < (LEAST_PROCESS_POINTS if series.name in (OWN, RESIDENT) else LEAST_POINTS):
        return None
    values = at_equal_shape(late.steps, late.values, late.shapes)
    if values is None:
        return None
    trend = steady_trend(late.steps, values)
    material = max(LEAK_BYTES, LEAK_SHARE * float(np.median(late.values)))
    if trend.confidence < SURE or not trend.steady or trend.growth < material:
        return None
    return late.grown("leak", trend.slope_per_step, trend.growth, trend.confidence)


def _fragmentation(rows: Rows) -> Growth | None:
    """Growth of what is reserved beyond the most that tensors ever took."""
    for name in (PEAK, HELD):
        both = [row for row in rows if row.get(name) is not None]
        series = _series(both, RESERVED)
        if series is None:
            continue
        excess = series.values - np.maximum.accumulate(_column([r for r in both if r.get(RESERVED) is not None], name))
        start = round(len(excess) * WARM_UP_SHARE)
        if len(excess) - start < LEAST_RESERVED_POINTS:
            continue
        times, levels = block_levels(series.steps[start:], excess[start:])
        rises = np.diff(levels)
        growth = float(levels[-1] - levels[0])
        material = max(FRAGMENT_BYTES, FRAGMENT_SHARE * float(series.values[-1]))
        confidence = rising_confidence(levels)
        if confidence < SURE or growth < material or -rises.clip(max=0).sum() > FALLS_SHARE * rises.clip(min=0).sum():
            return None
        return series.after(start).grown("fragmentation", growth / float(times[-1] - times[0]), growth, confidence)
    return None


def _length(rows: Rows) -> Growth | None:
    """Growth that comes with batches longer than those before."""
    series = next((s for name in (PEAK, RESERVED, OWN, RESIDENT, HELD) if (s := _series(rows, name))), None)
    if series is None or not series.shapes:
        return None
    highest = np.maximum.accumulate(series.values)
    rises = np.diff(highest)
    growth = float(rises.sum())
    if growth < max(GROWTH_BYTES, LENGTH_SHARE * float(highest[0])):
        return None
    longest = _longest(series)[1:]
    if rises[longest].sum() < EXPLAINED_SHARE * growth:
        return None
    # A rise that matters: else noise would count as much as a jump.
    jumps = rises > growth / len(rises) / 2
    met = meet_confidence(int((jumps & longest).sum()), int(jumps.sum()), int(longest.sum()), len(rises))
    together = max(ranks_agree(series.values, shape) for shape in series.shapes)
    confidence = max(met, together)
    if confidence < SURE:
        return None
    return series.grown("length", growth / float(series.steps[-1] - series.steps[0]), growth, confidence)


def _no_cause(rows: Rows) -> Growth:
    """What the series look like that grows most, where no cause is sure."""
    series = [s for name in MEMORY if (s := _series(rows, name)) is not None]
    if OWN in (names := [one.name for one in series]) and RESIDENT in names:
        series.pop()
    if not series:
        steps = [int(row["step"]) for row in rows] or [0]
        return Growth(
            cause="too_short",
            series=None,
            slope_bytes_per_step=0.0,
            growth_bytes=0,
            confidence=None,
            first_step=steps[0],
            last_step=steps[-1],
            at_equal_shape=False,
        )
    found = [_look(one) for one in series]
    return max(found, key=lambda growth: (QUIET.get(growth.cause, len(QUIET)), growth.growth_bytes))


def _look(series: _Series) -> Growth:
    """What a series without a sure cause looks like: flat, periodic, a jump, settled, or growing."""
    tenth = max(LEAST_STEPS // 4, len(series.values) // 10)
    middle = len(series.values) // 2
    first, last = (float(np.median(part)) for part in (series.values[:tenth], series.values[-tenth:]))
    growth = last - first
    slope = growth / float(series.steps[-1] - series.steps[0])
    values = at_equal_shape(series.steps, series.values, series.shapes)
    values = series.values if values is None else values
    if (cycle := _cycle(series, values)) is not None:
        return series.grown("periodic", slope, growth, None, **cycle)
    if growth < max(GROWTH_BYTES, GROWTH_SHARE * first):
        return series.grown("flat", slope, growth, None)
    if (jumps := _jumps(series, values, growth)) is not None:
        return series.grown("jump", slope, growth, None, **jumps)
    late = last - float(np.median(series.values[middle - tenth // 2 : middle - tenth // 2 + tenth]))
    return series.grown("plateau" if late < SETTLED_SHARE * growth else "unclear", slope, growth, None)


def _cycle(series: _Series, values: np.ndarray) -> dict[str, Any] | None:
    """Period and swing of memory that rises and falls and does not grow from one period to the next."""
    start = round(len(values) * WARM_UP_SHARE)
    late = values[start:]
    swing = float(late.max() - late.min())
    if len(late) < LEAST_STEPS or swing < max(GROWTH_BYTES, GROWTH_SHARE / 2 * float(np.median(late))):
        return None
    period = find_period(late)
    if period is None or np.median(late[-period:]) - np.median(late[:period]) > SETTLED_SHARE * swing:
        return None
    steps = series.steps[start:]
    return {"period_steps": period * float(steps[-1] - steps[0]) / (len(steps) - 1), "swing_bytes": round(swing)}


def _jumps(series: _Series, values: np.ndarray, growth: float) -> dict[str, Any] | None:
    """A few jumps that are nearly all the growth, the last of them after the warm-up."""
    at = find_jumps(values)
    rises = np.diff(values)[at - 1]
    if not 0 < len(at) <= MOST_JUMPS or rises.min() < GROWTH_BYTES or at[-1] < len(values) * WARM_UP_SHARE:
        return None
    if rises.sum() < EXPLAINED_SHARE * growth:
        return None
    return {"jump_steps": tuple(int(step) for step in series.steps[at]), "largest_jump_bytes": round(rises.max())}
