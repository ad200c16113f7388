"""Classify why memory grows over a run: longer batches, fragmentation, a leak, a jump, a cycle.

The input is the rows of a run's curves. A row has `step` and at least one memory column (`MEMORY`). Columns with the
shape of its batches (`SHAPES`) allow growth to be tested at equal shape. A cell may be None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lean_finetune.core.units import MIB, readable_size
from lean_finetune.train.monitor.trend import (
    LEAST_POINTS,
    at_equal_shape,
    block_levels,
    find_jumps,
    find_period,
    steady_trend,
)

Cause = Literal["leak", "fragmentation", "length", "jump", "periodic", "plateau", "flat", "unclear", "too_short"]
Rows = Sequence[Mapping[str, Any]]

LIVE, PEAK, RESERVED, OWN, RESIDENT = (
    "held_bytes",
    "allocated_bytes",
    "held_reserved_bytes",
    "rss_own_bytes",
    "rss_bytes",
)
"""Live tensors after a step, peak of the step, reserved by the allocator, process without mapped files, process."""
MEMORY = (LIVE, PEAK, RESERVED, OWN, RESIDENT)
RETRIES = "alloc_retries"
"""Counted by CUDA's allocator only. Where its cells are empty, `RESERVED` is malloc's, which rises and falls freely."""
SHAPES = ("largest_micro_batch_tokens", "tokens", "longest_row")
"""Batch shapes. `tokens` is used where the size of the largest micro-batch, which decides the peak, is unknown."""
CONFIDENCE = 0.9995
"""Least confidence of a leak. A run is tested several times in several series, so 95 % would warn far too often."""
WARM_UP_SHARE = 0.25
"""First part of a run that no trend uses: kernels, threads and caches are used for the first time."""
LEAST_STEPS = 12
LEAST_PROCESS_POINTS = 22
"""Process memory: the caches of Python and malloc fill over about 20 steps."""
LEAST_RESERVED_POINTS = 33
"""Reserved memory: the allocator adds segments while batches still get longer."""
KNOWN_SHARE = 0.5
"""A column is used if this share of the rows has it: peaks on a CPU are measured in the largest steps only."""
LEAK_BYTES, LEAK_SHARE = MIB, 0.001
"""A leak is reported if it exceeds both, in bytes and as a share of the level."""
GROWTH_BYTES, GROWTH_SHARE = MIB, 0.02
"""A run that grows less is flat."""
LENGTH_SHARE = 0.1
"""Growth with batch length is reported above this share of the level: a run that fits has this much room."""
FRAGMENT_BYTES, FRAGMENT_SHARE = 20 * MIB, 0.05
"""Fragmentation is reported if it exceeds both: a segment of CUDA's allocator, and a share of what is reserved."""
RISING_BLOCKS, FALLS_SHARE = 5, 0.25
"""Fragmentation rises in at least this many of 10 intervals, and falls by at most this share of its rises."""
RECORD_SHARE, LONG_SHARE = 0.01, 0.95
"""A batch is a new longest one if it is longer by more than 1 %; it is long at 95 % of the longest before it."""
EXPLAINED_SHARE = 0.8
"""Share of the growth that a cause must explain."""
SETTLED_SHARE = 0.2
"""A plateau has less than this share of its growth in its second half."""
MOST_JUMPS = 5
QUIET: Mapping[Cause, int] = {"flat": 0, "periodic": 1}
"""Classes that are reported only if no series shows more."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How one memory series behaves, and why."""

    cause: Cause
    series: str | None = None
    """Column that shows it; None if no column has enough rows."""
    slope_bytes_per_step: float = 0.0
    growth_bytes: int = 0
    """From `first_step` to `last_step`."""
    confidence: float | None = None
    """That there is a leak; None for other causes."""
    first_step: int
    last_step: int
    at_equal_shape: bool = False
    """Batch shapes were known and their effect was subtracted."""
    description: str | None = None
    """Causes jump and periodic: sizes and steps, for people."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Series:
    """One memory column without its empty cells; every array has one value for each remaining row."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    shapes: tuple[np.ndarray, ...]

    def after(self, start: int) -> "_Series":
        """Return the points from index `start` on."""
        shapes = tuple(shape[start:] for shape in self.shapes)
        return _Series(name=self.name, steps=self.steps[start:], values=self.values[start:], shapes=shapes)

    def growth(self, cause: Cause, total: float, slope: float | None = None, **details: Any) -> Growth:
        """Return the finding over all points; `slope` defaults to the mean, `details` are more fields of `Growth`."""
        steps = float(self.steps[-1] - self.steps[0])
        return Growth(
            cause=cause,
            series=self.name,
            slope_bytes_per_step=total / steps if slope is None else slope,
            growth_bytes=round(total),
            first_step=int(self.steps[0]),
            last_step=int(self.steps[-1]),
            at_equal_shape=bool(self.shapes),
            **details,
        )


def classify(rows: Rows) -> list[Growth]:
    """Return all causes of growth, a leak first, then by bytes; without any, how the series behave. Never empty."""
    explained = [growth for growth in (_fragmentation(rows), _length(rows)) if growth is not None]
    explained.sort(key=lambda growth: -growth.growth_bytes)
    leak = _leak(rows)
    return ([] if leak is None else [leak]) + explained or [_without_cause(rows)]


def _series(rows: Rows, name: str) -> _Series | None:
    """Return a column, or None if too few rows have it."""
    known = [row for row in rows if row.get(name) is not None]
    with_memory = sum(any(row.get(column) is not None for column in MEMORY) for row in rows)
    if len(known) < max(LEAST_STEPS, KNOWN_SHARE * with_memory):
        return None
    if name == RESERVED and all(row.get(RETRIES, 0) is None for row in known):
        return None
    shapes = [shape for shape in SHAPES if all(row.get(shape) is not None for row in known)]
    if SHAPES[0] in shapes and SHAPES[1] in shapes:
        shapes.remove(SHAPES[1])
    return _Series(
        name=name,
        steps=_column(known, "step"),
        values=_column(known, name),
        shapes=tuple(_column(known, shape) for shape in shapes),
    )


def _column(rows: Rows, name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=np.float64)


def _records(series: _Series) -> np.ndarray:
    """Flag each point whose batch is longer than every earlier one, in some shape."""
    found = np.zeros(len(series.steps), dtype=bool)
    for shape in series.shapes:
        found[1:] |= shape[1:] > np.maximum.accumulate(shape)[:-1] * (1 + RECORD_SHARE)
    return found


def _leak(rows: Rows) -> Growth | None:
    """Find steady growth at equal shape: of live tensors, else of peaks, else of the process."""
    for name in (LIVE, PEAK, OWN, RESIDENT):
        series = _series(rows, name)
        if series is not None and (leak := _steady_growth(series)) is not None:
            return leak
        if name == OWN and series is not None:
            return None  # RESIDENT also counts mapped files, which grow as they are read.
    return None


def _steady_growth(series: _Series) -> Growth | None:
    """Test a series for a leak, from the end of the warm-up and the last new longest batch on."""
    records = np.flatnonzero(_records(series))
    late = series.after(max(round(len(series.steps) * WARM_UP_SHARE), records[-1] + 1 if len(records) else 0))
    if len(late.steps) < (LEAST_PROCESS_POINTS if series.name in (OWN, RESIDENT) else LEAST_POINTS):
        return None
    values = at_equal_shape(late.steps, late.values, late.shapes)
    if values is None:
        return None
    trend = steady_trend(late.steps, values)
    least = max(LEAK_BYTES, LEAK_SHARE * float(np.median(late.values)))
    if trend.confidence < CONFIDENCE or not trend.steady or trend.growth < least:
        return None
    return late.growth("leak", trend.growth, trend.slope_per_step, confidence=trend.confidence)


def _fragmentation(rows: Rows) -> Growth | None:
    """Find growth of reserved memory beyond the highest peak so far."""
    for name in (PEAK, LIVE):
        both = [row for row in rows if row.get(name) is not None and row.get(RESERVED) is not None]
        series = _series(both, RESERVED)
        if series is None:
            continue
        excess = series.values - np.maximum.accumulate(_column(both, name))
        start = round(len(excess) * WARM_UP_SHARE)
        if len(excess) - start < LEAST_RESERVED_POINTS:
            continue
        times, levels = block_levels(series.steps[start:], excess[start:])
        rises = np.diff(levels)
        total = float(levels[-1] - levels[0])
        keeps_rising = (rises > 0).sum() >= RISING_BLOCKS and -rises.clip(max=0).sum() <= FALLS_SHARE * rises.clip(
            0
        ).sum()
        if not keeps_rising or total < max(FRAGMENT_BYTES, FRAGMENT_SHARE * float(series.values[-1])):
            return None
        return series.after(start).growth("fragmentation", total, total / float(times[-1] - times[0]))
    return None


def _length(rows: Rows) -> Growth | None:
    """Find growth that comes with batches longer than earlier ones."""
    series = next((s for name in (PEAK, RESERVED, OWN, RESIDENT, LIVE) if (s := _series(rows, name))), None)
    varying = [] if series is None else [shape for shape in series.shapes if shape.min() < shape.max()]
    if series is None or not varying:
        return None
    highest = np.maximum.accumulate(series.values)
    rises, total = np.diff(highest), float(highest[-1] - highest[0])
    long = [shape >= LONG_SHARE * np.maximum.accumulate(shape) for shape in varying]
    longest = (_records(series) | np.logical_and.reduce(long))[1:]
    if total < max(GROWTH_BYTES, LENGTH_SHARE * float(highest[0])) or rises[longest].sum() < EXPLAINED_SHARE * total:
        return None
    follows = max(float(np.corrcoef(series.values, shape)[0, 1]) for shape in varying)
    if longest.mean() > 1 - EXPLAINED_SHARE and follows < EXPLAINED_SHARE:
        return None  # Long batches are so common that any growth meets them.
    return series.growth("length", total)


def _without_cause(rows: Rows) -> Growth:
    """Describe the series that grows most, where no cause was found."""
    series = [s for name in MEMORY if (s := _series(rows, name)) is not None]
    if {OWN, RESIDENT} <= {one.name for one in series}:
        series.pop()
    if not series:
        steps = [int(row["step"]) for row in rows] or [0]
        return Growth(cause="too_short", first_step=steps[0], last_step=steps[-1])
    found = [_describe(one) for one in series]
    return max(found, key=lambda growth: (QUIET.get(growth.cause, len(QUIET)), growth.growth_bytes))


def _describe(series: _Series) -> Growth:
    """Describe a series without a cause: periodic, flat, jumping, on a plateau, or unclear."""
    tenth, middle = max(LEAST_STEPS // 4, len(series.values) // 10), len(series.values) // 2
    around_middle = series.values[middle - tenth // 2 :][:tenth]
    first, half, last = map(np.median, (series.values[:tenth], around_middle, series.values[-tenth:]))
    total = float(last - first)
    values = at_equal_shape(series.steps, series.values, series.shapes)
    values = series.values if values is None else values
    if cycle := _cycle(series, values):
        return series.growth("periodic", total, description=cycle)
    if total < max(GROWTH_BYTES, GROWTH_SHARE * first):
        return series.growth("flat", total)
    if jumps := _jumps(series, values, total):
        return series.growth("jump", total, description=jumps)
    return series.growth("plateau" if last - half < SETTLED_SHARE * total else "unclear", total)


def _cycle(series: _Series, values: np.ndarray) -> str | None:
    """Describe memory that rises and falls without growth from one period to the next."""
    start = round(len(values) * WARM_UP_SHARE)
    late, steps = values[start:], series.steps[start:]
    swing = float(late.max() - late.min())
    if len(late) < LEAST_STEPS or swing < max(GROWTH_BYTES, GROWTH_SHARE / 2 * float(np.median(late))):
        return None
    period = find_period(late)
    if period is None or np.median(late[-period:]) - np.median(late[:period]) > SETTLED_SHARE * swing:
        return None
    period_steps = period * float(steps[-1] - steps[0]) / (len(steps) - 1)
    return f"rises and falls by {readable_size(round(swing))} every {period_steps:.3g} steps"


def _jumps(series: _Series, values: np.ndarray, total: float) -> str | None:
    """Describe a few jumps that explain nearly all growth, the last one after the warm-up."""
    at = find_jumps(values)
    rises = np.diff(values)[at - 1]
    if not 0 < len(at) <= MOST_JUMPS or rises.min() < GROWTH_BYTES or at[-1] < len(values) * WARM_UP_SHARE:
        return None
    if rises.sum() < EXPLAINED_SHARE * total:
        return None
    size, steps = readable_size(round(rises.max())), ", ".join(str(int(step)) for step in series.steps[at])
    return f"jumps by {size} at step {steps}" if len(at) == 1 else f"jumps by up to {size} at steps {steps}"
