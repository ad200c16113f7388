"""Classify why memory grows over a run: a leak, fragmentation, longer batches, or a jump.

The input is the rows of a run's curves. A row has `step` and at least one memory column (`MEMORY`). Columns with the
shape of its batches (`SHAPES`) allow growth to be tested at equal shape. A cell may be None.

Memory noise is seldom independent from step to step. A long series is therefore reduced to the medians of `BLOCKS`
blocks, and a leak is a t-test on the differences between neighbouring medians: a cache that fills and empties inside a
block, or one large batch, has no effect, and a single jump is one large difference among many small ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np

from lean_finetune.core.units import MIB, readable_size

Cause = Literal["leak", "fragmentation", "length", "jump", "steady", "unclear", "too_short"]
Rows = Sequence[Mapping[str, Any]]

LIVE, PEAK, RESERVED = "live_bytes", "allocated_bytes", "reserved_bytes"
"""Live tensors after a step, peak of the step, reserved by the allocator."""
OWN, RESIDENT = "rss_own_bytes", "rss_bytes"
"""The process without mapped files, and with them."""
MEMORY = (LIVE, PEAK, RESERVED, OWN, RESIDENT)
RETRIES = "alloc_retries"
"""Counted by CUDA's allocator only. Where its cells are empty, `RESERVED` is malloc's, which rises and falls freely."""
SHAPES = ("largest_micro_batch_tokens", "tokens", "longest_row")
"""Batch shapes. `tokens` is used where the size of the largest micro-batch, which decides the peak, is unknown."""
CONFIDENCE, MAX_CONFIDENCE = 0.9995, 0.999999
"""Least confidence of a leak: a run is tested several times in several series, so 95 % would warn far too often. The
highest one reported: the test is an approximation."""
WARM_UP_SHARE = 0.25
"""First part of a run that no trend uses: kernels, threads and caches are used for the first time."""
LEAST_STEPS = 12
LEAST_POINTS, LEAST_PROCESS_POINTS, LEAST_RESERVED_POINTS = 15, 22, 33
"""Of a trend; of process memory, since the caches of Python and malloc fill over about 20 steps; of reserved memory,
since the allocator adds segments while batches still get longer."""
BLOCKS, BLOCK_POINTS = 11, 3
"""Number of blocks, and their least length: a shorter series is tested point by point."""
WALK_CORRECTION = math.sqrt(1.5)
"""Widens the scatter: block medians of a random walk share part of their path, so differences correlate by 1/4."""
STEADY_SHARE, SLOWING_SHARE, SLOWING_ERRORS = 2 / 3, 0.9, 1.5
"""A leak grows in its last third at this share of the mean or faster, and there is not slower than this share of its
first third by more than this number of standard errors: that is a cache that fills."""
KNOWN_SHARE = 0.5
"""A column is used if this share of the rows has it: peaks on a CPU are measured in the largest steps only."""
LEAK_SHARE, GROWTH_SHARE, LENGTH_SHARE = 0.001, 0.02, 0.1
"""Least growth of each kind as a share of the level, and never below 1 MiB. A run that fits has room for 10 %."""
FRAGMENT_BYTES, FRAGMENT_SHARE = 20 * MIB, 0.05
"""Fragmentation is reported if it exceeds both: a segment of CUDA's allocator, and a share of what is reserved."""
MOVES_WITH_TIME = 0.5
"""Above this correlation, growth with batch shape cannot be distinguished from growth with time."""
RECORD_SHARE, LONG_SHARE = 0.99, 0.95
"""A batch is as long as the longest of the run, or as the longest before it, from this share of its length on."""
EXPLAINED_SHARE, SETTLED_SHARE = 0.8, 0.2
"""Share of growth that a cause must explain; largest share in the second half of a run whose memory has settled."""
JUMP_CHANGES, MOST_JUMPS = 10, 5
"""A jump exceeds the median change by this factor; a change of normal noise does so once in 10 ** 11."""


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
    jumps: str | None = None
    """Cause jump: sizes and steps, for people."""


class _Series(NamedTuple):
    """One memory column without its empty cells; every array has one value for each remaining row."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    shapes: tuple[np.ndarray, ...]

    def after(self, start: int) -> "_Series":
        """Return the points from index `start` on."""
        return _Series(self.name, self.steps[start:], self.values[start:], tuple(one[start:] for one in self.shapes))

    def growth(self, cause: Cause, total: float, **details: Any) -> Growth:
        """Return the finding over all points; `details` are more fields of `Growth`."""
        first, last = int(self.steps[0]), int(self.steps[-1])
        slope = total / (last - first)
        known = {"growth_bytes": round(total), "slope_bytes_per_step": slope, "at_equal_shape": bool(self.shapes)}
        return Growth(cause=cause, series=self.name, first_step=first, last_step=last, **(known | details))


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
    steps, values, *columns = (_column(known, column) for column in ("step", name, *shapes))
    return _Series(name, steps, values, tuple(columns))


def _column(rows: Rows, name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=np.float64)


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
    """Test a series for a leak, from the end of the warm-up and the longest batch on."""
    longest = [int(np.argmax(shape >= RECORD_SHARE * shape.max())) + 1 for shape in series.shapes]
    late = series.after(max(round(len(series.steps) * WARM_UP_SHARE), *longest, 0))
    if len(late.steps) < (LEAST_PROCESS_POINTS if series.name in (OWN, RESIDENT) else LEAST_POINTS):
        return None
    values = _at_equal_shape(late)
    if values is None:
        return None
    times, levels = _block_levels(late.steps, values)
    slopes = np.diff(levels) / np.diff(times)
    mean, deviation = float(slopes.mean()), float(slopes.std(ddof=1))
    growth, third = mean * float(late.steps[-1] - late.steps[0]), len(slopes) // 3
    first, last = float(slopes[:third].mean()), float(slopes[-third:].mean())
    slowing = last < SLOWING_SHARE * first and first - last > SLOWING_ERRORS * deviation * math.sqrt(2 / third)
    if growth < max(MIB, LEAK_SHARE * float(np.median(late.values))) or last < STEADY_SHARE * mean or slowing:
        return None
    confidence = _confidence(mean, deviation * WALK_CORRECTION / math.sqrt(len(slopes)), len(slopes) - 1)
    if confidence < CONFIDENCE:
        return None
    return late.growth("leak", growth, slope_bytes_per_step=float(np.median(slopes)), confidence=confidence)


def _confidence(mean: float, error: float, freedom: int) -> float:
    """Return P(T < mean / error) for Student's t, by Wallace's normal approximation (1959)."""
    if error == 0:
        return MAX_CONFIDENCE
    z = math.sqrt(freedom * math.log1p((mean / error) ** 2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return min(NormalDist().cdf(z), MAX_CONFIDENCE)


def _block_levels(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean step and median value of each block; of a short series, its points."""
    if len(values) < BLOCKS * BLOCK_POINTS:
        return steps, values
    times = np.array([block.mean() for block in np.array_split(steps, BLOCKS)])
    return times, np.array([np.median(block) for block in np.array_split(values, BLOCKS)])


def _at_equal_shape(series: _Series) -> np.ndarray | None:
    """Subtract what batch shapes explain; return None if shapes grow with time, since they could explain all growth.

    Values are fitted as a quadratic function of each shape plus a line in time. Shapes that shrink with time can only
    hide growth and are not used.
    """
    varying = [shape for shape in series.shapes if shape.min() < shape.max()]
    in_time = [float(np.corrcoef(series.steps, shape)[0, 1]) for shape in varying]
    if max(in_time, default=0.0) > MOVES_WITH_TIME:
        return None
    used = [shape for shape, correlation in zip(varying, in_time, strict=True) if correlation >= -MOVES_WITH_TIME]
    time, *shapes = ((column - column.mean()) / column.std() for column in (series.steps, *used))
    if not shapes:
        return series.values
    terms = np.stack([term for shape in shapes for term in (shape, shape**2)], axis=1)
    design = np.column_stack([np.ones(len(time)), time, terms])
    weights = np.linalg.lstsq(design, series.values, rcond=None)[0][2:]
    return series.values - (terms - terms.mean(axis=0)) @ weights


def _fragmentation(rows: Rows) -> Growth | None:
    """Find growth of reserved memory beyond the highest peak so far."""
    for name in (PEAK, LIVE):
        both = [row for row in rows if row.get(name) is not None and row.get(RESERVED) is not None]
        series = _series(both, RESERVED)
        start = round(len(both) * WARM_UP_SHARE)
        if series is None or len(both) - start < LEAST_RESERVED_POINTS:
            continue
        excess = series.values - np.maximum.accumulate(_column(both, name))
        times, levels = _block_levels(series.steps[start:], excess[start:])
        total = float(levels[-1] - levels[0])
        settled = levels[-1] - levels[len(levels) // 2] < SETTLED_SHARE * total
        if settled or total < max(FRAGMENT_BYTES, FRAGMENT_SHARE * float(series.values[-1])):
            return None
        slope = total / float(times[-1] - times[0])
        return series.after(start).growth("fragmentation", total, slope_bytes_per_step=slope)
    return None


def _length(rows: Rows) -> Growth | None:
    """Find growth that comes with batches longer than earlier ones."""
    series = next((s for name in (PEAK, RESERVED, OWN, RESIDENT, LIVE) if (s := _series(rows, name))), None)
    varying = [] if series is None else [shape for shape in series.shapes if shape.min() < shape.max()]
    if series is None or not varying:
        return None
    highest = np.maximum.accumulate(series.values)
    rises, total = np.diff(highest), float(highest[-1] - highest[0])
    long = np.any([shape >= LONG_SHARE * np.maximum.accumulate(shape) for shape in varying], axis=0)[1:]
    if total < max(MIB, LENGTH_SHARE * float(highest[0])) or rises[long].sum() < EXPLAINED_SHARE * total:
        return None
    follows = max(float(np.corrcoef(series.values, shape)[0, 1]) for shape in varying)
    if long.mean() > 1 - EXPLAINED_SHARE and follows < EXPLAINED_SHARE:
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
    return max(map(_describe, series), key=lambda growth: (growth.cause != "steady", growth.growth_bytes))


def _describe(series: _Series) -> Growth:
    """Describe a series without a cause: steady, jumping, or unclear."""
    tenth, middle = max(LEAST_STEPS // 4, len(series.values) // 10), len(series.values) // 2
    parts = series.values[:tenth], series.values[middle - tenth // 2 :][:tenth], series.values[-tenth:]
    first, half, last = (float(np.median(part)) for part in parts)
    total = last - first
    if total < max(MIB, GROWTH_SHARE * first):
        return series.growth("steady", total)
    if jumps := _jumps(series, total):
        return series.growth("jump", total, jumps=jumps)
    return series.growth("steady" if last - half < SETTLED_SHARE * total else "unclear", total)


def _jumps(series: _Series, total: float) -> str | None:
    """Describe a few jumps that explain nearly all growth, the last one after the warm-up."""
    changes = np.diff(series.values)
    usual = np.median(np.abs(changes - np.median(changes)))
    at = np.flatnonzero(np.abs(changes) > JUMP_CHANGES * usual)
    if not 0 < len(at) <= MOST_JUMPS or at[-1] + 1 < len(series.values) * WARM_UP_SHARE:
        return None
    if changes[at].min() < MIB or changes[at].sum() < EXPLAINED_SHARE * total:
        return None
    size, steps = readable_size(round(changes[at].max())), ", ".join(str(int(step)) for step in series.steps[at + 1])
    return f"jumps by {size} at step {steps}" if len(at) == 1 else f"jumps by up to {size} at steps {steps}"
