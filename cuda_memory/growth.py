"""Classify why memory grows over a run: a leak, fragmentation, longer batches, kernels for new shapes, or a jump.

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

from cuda_memory.units import GIB, MIB, readable_size

Cause = Literal["leak", "fragmentation", "length", "kernels", "jump", "steady", "unclear", "too_short"]
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
KERNEL_SHAPES = "kernel_shapes"
"""Number of shapes so far for which a CPU's library keeps kernels; empty where it keeps none."""
COLUMNS = ("step", *MEMORY, *SHAPES, KERNEL_SHAPES)
CONFIDENCE, MAX_CONFIDENCE = 0.9995, 0.999999
"""Least confidence of a leak: a run is tested several times in several series, so 95 % would warn far too often. The
highest one reported: the test is an approximation."""
WARM_UP_SHARE = 0.25
"""First part of a run that no trend uses: kernels, threads and caches are used for the first time."""
LEAST_STEPS, KNOWN_SHARE = 12, 0.5
"""A column is used if it has this many cells, and this share of them: peaks on a CPU are measured in few steps."""
LEAST_POINTS = {LIVE: 15, PEAK: 15, RESERVED: 33, OWN: 22, RESIDENT: 22}
"""Of a trend. The caches of Python and malloc fill over about 20 steps; CUDA's allocator adds segments for longer."""
BLOCKS, BLOCK_POINTS = 11, 3
"""Number of blocks, and their least length: a shorter series is tested point by point."""
WALK_CORRECTION = math.sqrt(1.5)
"""Widens the scatter: block medians of a random walk share part of their path, so differences correlate by 1/4."""
SLOWING_SHARE, SLOWING_ERRORS = 0.9, 1.5
"""A cache that fills, no leak, grows in the last third slower than at this share of the first third's speed, by more
than this number of standard errors."""
LEAK_SHARE, GROWTH_SHARE, LENGTH_SHARE = 0.001, 0.02, 0.1
"""Least growth of each kind as a share of the level, and never below 1 MiB. A run that fits has room for 10 %."""
KERNEL_BYTES = {LIVE: 3 * GIB // 4, OWN: 3 * GIB // 2, RESIDENT: 3 * GIB // 2}
"""Most growth that kernels explain. PyTorch 2.13 grew by 0.52 GiB with the 1,024 products that oneDNN 3.12 keeps, with
any size of model, method and number of threads, and the process by up to 1.03 GiB: malloc kept pieces between them."""
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
    first_step: int = 0
    last_step: int = 0
    at_equal_shape: bool = False
    """Batch shapes were known and their effect was subtracted."""
    jumps: str | None = None
    """Cause jump: sizes and steps, for people."""


class _Series(NamedTuple):
    """One memory column without its empty cells: P points, with the S batch shapes that are known."""

    name: str
    steps_P: np.ndarray
    values_P: np.ndarray
    shapes_PS: np.ndarray

    def after(self, start: int) -> "_Series":
        """Return the points from index `start` on."""
        return _Series(self.name, self.steps_P[start:], self.values_P[start:], self.shapes_PS[start:])

    def varying_shapes(self) -> np.ndarray:
        """Return the columns of `shapes_PS` that vary."""
        return self.shapes_PS[:, self.shapes_PS.min(axis=0) < self.shapes_PS.max(axis=0)]

    def growth(self, cause: Cause, total: float, **details: Any) -> Growth:
        """Return the finding over all points; `details` are more fields of `Growth`."""
        first, last, shapes_known = int(self.steps_P[0]), int(self.steps_P[-1]), self.shapes_PS.shape[1] > 0
        fields = {"slope_bytes_per_step": total / (last - first), "at_equal_shape": shapes_known} | details
        return Growth(
            cause=cause, series=self.name, growth_bytes=round(total), first_step=first, last_step=last, **fields
        )


def classify(rows: Rows) -> list[Growth]:
    """Return all causes of growth, a leak first, then by bytes; without any, how the series behave. Never empty."""
    columns = {name: np.array([row.get(name) for row in rows], dtype=np.float64) for name in COLUMNS}
    if all(row.get(RETRIES, 0) is None for row in rows):
        columns[RESERVED][:] = np.nan
    every = {name: one for name in MEMORY if (one := _series(columns, name, columns[name])) is not None}
    if OWN in every:
        every.pop(RESIDENT, None)  # It also counts mapped files, which grow as they are read.
    if not every:
        return [Growth(cause="too_short")]
    kernels = _kernels(columns, every)
    if kernels is not None:
        every = {name: one for name, one in every.items() if name not in KERNEL_BYTES}
    leaks = [leak for name, one in every.items() if name != RESERVED and (leak := _leak(one)) is not None]
    causes = (kernels, _fragmentation(columns, every), _length(every) if every else None)
    explained = [growth for growth in causes if growth is not None]
    found = leaks[:1] + sorted(explained, key=lambda growth: -growth.growth_bytes)
    described = map(_describe, every.values())
    return found or [max(described, key=lambda growth: (growth.cause != "steady", growth.growth_bytes))]


def _series(columns: Mapping[str, np.ndarray], name: str, values: np.ndarray) -> _Series | None:
    """Return the series of `values`, one for each row; None if too few are known."""
    known, with_memory = ~np.isnan(values), ~np.isnan([columns[column] for column in MEMORY]).all(axis=0)
    if known.sum() < max(LEAST_STEPS, KNOWN_SHARE * with_memory.sum()):
        return None
    shapes = {shape: columns[shape][known] for shape in SHAPES if not np.isnan(columns[shape][known]).any()}
    if SHAPES[0] in shapes:
        shapes.pop(SHAPES[1], None)
    return _Series(name, columns["step"][known], values[known], np.array([*shapes.values()]).reshape(-1, known.sum()).T)


def _leak(series: _Series) -> Growth | None:
    """Find steady growth at equal shape, from the end of the warm-up and the longest batch on."""
    shapes_PS = series.shapes_PS
    longest = np.argmax(shapes_PS >= RECORD_SHARE * shapes_PS.max(axis=0), axis=0) + 1
    late = series.after(max(round(len(shapes_PS) * WARM_UP_SHARE), *longest, 0))
    values = _at_equal_shape(late) if len(late.steps_P) >= LEAST_POINTS[series.name] else None
    if values is None:
        return None
    times, levels = _block_levels(late.steps_P, values)
    slopes = np.diff(levels) / np.diff(times)
    mean, deviation = float(slopes.mean()), float(slopes.std(ddof=1))
    growth, third = mean * float(late.steps_P[-1] - late.steps_P[0]), len(slopes) // 3
    first, last = float(slopes[:third].mean()), float(slopes[-third:].mean())
    slowing = last < SLOWING_SHARE * first and first - last > SLOWING_ERRORS * deviation * math.sqrt(2 / third)
    if growth < max(MIB, LEAK_SHARE * float(np.median(late.values_P))) or slowing:
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
    shapes_PS = series.varying_shapes()
    in_time = np.array([np.corrcoef(series.steps_P, shape)[0, 1] for shape in shapes_PS.T])
    if (in_time > MOVES_WITH_TIME).any():
        return None
    columns = np.column_stack([series.steps_P, shapes_PS[:, in_time >= -MOVES_WITH_TIME]])
    time_and_shapes = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    terms = np.column_stack([time_and_shapes[:, 1:], time_and_shapes[:, 1:] ** 2])
    design = np.column_stack([np.ones(len(columns)), time_and_shapes[:, 0], terms])
    weights = np.linalg.lstsq(design, series.values_P, rcond=None)[0][2:]
    return series.values_P - (terms - terms.mean(axis=0)) @ weights


def _fragmentation(columns: Mapping[str, np.ndarray], every: Mapping[str, _Series]) -> Growth | None:
    """Find growth of reserved memory beyond the highest peak so far."""
    needed = columns[PEAK if PEAK in every else LIVE]
    excess = _series(columns, RESERVED, columns[RESERVED] - np.fmax.accumulate(needed))
    late = None if excess is None else excess.after(round(len(excess.steps_P) * WARM_UP_SHARE))
    if late is None or len(late.steps_P) < LEAST_POINTS[RESERVED]:
        return None
    total, slope, settled = _rise(late)
    if settled or total < max(FRAGMENT_BYTES, FRAGMENT_SHARE * float(every[RESERVED].values_P[-1])):
        return None
    return late.growth("fragmentation", total, slope_bytes_per_step=slope)


def _rise(series: _Series) -> tuple[float, float, bool]:
    """Return growth from the first block to the last, per step too, and whether the second half has little of it."""
    times, levels = _block_levels(series.steps_P, series.values_P)
    total = float(levels[-1] - levels[0])
    settled = levels[-1] - levels[len(levels) // 2] < SETTLED_SHARE * total
    return total, total / float(times[-1] - times[0]), settled


def _length(every: Mapping[str, _Series]) -> Growth | None:
    """Find growth that comes with batches longer than earlier ones."""
    series = next(every[name] for name in (PEAK, RESERVED, OWN, RESIDENT, LIVE) if name in every)
    shapes_PS, highest = series.varying_shapes(), np.maximum.accumulate(series.values_P)
    rises, total = np.diff(highest), float(highest[-1] - highest[0])
    long = np.any(shapes_PS[1:] >= LONG_SHARE * np.maximum.accumulate(shapes_PS)[1:], axis=1)
    if total < max(MIB, LENGTH_SHARE * float(highest[0])) or rises[long].sum() < EXPLAINED_SHARE * total:
        return None
    follows = max(float(np.corrcoef(series.values_P, shape)[0, 1]) for shape in shapes_PS.T)
    if long.mean() > 1 - EXPLAINED_SHARE and follows < EXPLAINED_SHARE:
        return None  # Long batches are so common that any growth meets them.
    return series.growth("length", total)


def _kernels(columns: Mapping[str, np.ndarray], every: Mapping[str, _Series]) -> Growth | None:
    """Find growth of the process in steps with new shapes, up to what kept kernels can take."""
    on_host = [every[name] for name in (LIVE, OWN, RESIDENT) if name in every]
    for series in on_host:
        known = ~np.isnan([columns[series.name], columns[KERNEL_SHAPES]]).any(axis=0)
        if known.sum() < LEAST_STEPS:
            return None
        values, shapes = columns[series.name][known], columns[KERNEL_SHAPES][known]
        total, is_new = float(values[-1] - values[0]), np.diff(shapes) != 0  # A resumed process counts anew.
        if not max(MIB, GROWTH_SHARE * values[0]) <= total <= KERNEL_BYTES[series.name]:
            return None
        if np.diff(values)[is_new].sum() < EXPLAINED_SHARE * total:
            return None
    return on_host[-1].growth("kernels", total) if on_host else None


def _describe(series: _Series) -> Growth:
    """Describe a series without a cause: steady, jumping, or unclear."""
    total, _, settled = _rise(series)
    if total < max(MIB, GROWTH_SHARE * float(series.values_P[0])):
        return series.growth("steady", total)
    if jumps := _jumps(series, total):
        return series.growth("jump", total, jumps=jumps)
    return series.growth("steady" if settled else "unclear", total)


def _jumps(series: _Series, total: float) -> str | None:
    """Describe a few jumps that explain nearly all growth, the last one after the warm-up."""
    changes = np.diff(series.values_P)
    usual = np.median(np.abs(changes - np.median(changes)))
    at = np.flatnonzero(np.abs(changes) > JUMP_CHANGES * usual)
    if not 0 < len(at) <= MOST_JUMPS or at[-1] + 1 < len(series.values_P) * WARM_UP_SHARE:
        return None
    if changes[at].min() < MIB or changes[at].sum() < EXPLAINED_SHARE * total:
        return None
    size, steps = readable_size(round(changes[at].max())), ", ".join(str(int(step)) for step in series.steps_P[at + 1])
    return f"jumps by {size} at step {steps}" if len(at) == 1 else f"jumps by up to {size} at steps {steps}"
