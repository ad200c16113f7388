"""Statistics of a memory series: its trend, its jumps and its period.

Memory noise is seldom independent from step to step. A long series is therefore reduced to the medians of `BLOCKS`
equal blocks, and the trend is a t-test on the differences between neighbouring medians. A cache that fills and empties
inside a block, or a single large batch, has no effect. A single jump, however high, is one large difference among many
small ones, and fails the test. So does a random walk, whose differences are independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS, BLOCK_POINTS = 11, 3
"""Number of blocks, and their least length: a shorter series is tested point by point."""
LEAST_POINTS = 15
"""A trend over fewer points cannot be distinguished from chance."""
WALK_CORRECTION = math.sqrt(1.5)
"""Widens the scatter: block medians of a random walk share part of their path, so differences correlate by 1/4."""
STEADY_SHARE = 2 / 3
"""A trend is steady if the last third of the series grows at this share of the mean or faster …"""
SLOWING_SHARE, SLOWING_ERRORS = 0.9, 1.5
"""… and is not below this share of the first third by more than this number of standard errors: a cache that fills."""
MOVES_WITH_TIME = 0.5
"""Above this correlation, growth with batch shape cannot be distinguished from growth with time."""
JUMP_CHANGES = 10
"""A jump exceeds the median change by this factor; a change of normal noise does so once in 10 ** 11."""
PERIODS, PERIODIC, SIMILAR = 4, 0.6, 0.9
"""Least number of cycles, least autocorrelation, and the share of the highest that counts as equally high."""
MAX_CONFIDENCE = 0.999999
"""Highest confidence that is reported: the tests are approximations."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Growth of a series per step, and how certain it is."""

    slope_per_step: float
    growth: float
    """Over the whole series."""
    confidence: float
    """1 minus the probability of such growth by chance."""
    steady: bool
    """The series grows at its end as fast as before."""


def steady_trend(steps: np.ndarray, values: np.ndarray) -> Trend:
    """Test a series for growth: one-sided t-test on the differences between block medians.

    Raises:
        ValueError: there are fewer than `LEAST_POINTS` points.
    """
    times, levels = block_levels(steps, values)
    slopes = np.diff(levels) / np.diff(times)
    mean, deviation = float(slopes.mean()), float(slopes.std(ddof=1))
    third = len(slopes) // 3
    first, last = float(slopes[:third].mean()), float(slopes[-third:].mean())
    slowing = last < SLOWING_SHARE * first and first - last > SLOWING_ERRORS * deviation * math.sqrt(2 / third)
    if deviation > 0:
        t = mean / (deviation * WALK_CORRECTION) * math.sqrt(len(slopes))
        confidence = min(1 - t_tail(t, len(slopes) - 1), MAX_CONFIDENCE)
    else:
        confidence = MAX_CONFIDENCE if mean > 0 else 0.0
    return Trend(
        slope_per_step=float(np.median(slopes)),
        growth=mean * float(steps[-1] - steps[0]),
        confidence=confidence,
        steady=mean > 0 and last >= STEADY_SHARE * mean and not slowing,
    )


def block_levels(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean step and median value of each block; of a short series, its points.

    Raises:
        ValueError: there are fewer than `LEAST_POINTS` points.
    """
    if len(values) < LEAST_POINTS:
        raise ValueError(f"a trend takes {LEAST_POINTS} points, got {len(values)}")
    if len(values) < BLOCKS * BLOCK_POINTS:
        return steps, values
    times = np.array([block.mean() for block in np.array_split(steps, BLOCKS)])
    return times, np.array([np.median(block) for block in np.array_split(values, BLOCKS)])


def at_equal_shape(steps: np.ndarray, values: np.ndarray, shapes: Sequence[np.ndarray]) -> np.ndarray | None:
    """Subtract what batch shapes explain; return None where shapes grow with time and could explain everything.

    Memory is fitted as a quadratic function of each shape plus a line in time, so that growth is not attributed to
    shape. Shapes that shrink with time can only hide growth and are not used.
    """
    varying = [shape for shape in shapes if shape.min() < shape.max()]
    correlations = [float(np.corrcoef(steps, shape)[0, 1]) for shape in varying]
    if any(correlation > MOVES_WITH_TIME for correlation in correlations):
        return None
    used = [_standardised(s) for s, c in zip(varying, correlations, strict=True) if c >= -MOVES_WITH_TIME]
    if not used:
        return values
    terms = np.stack([term for shape in used for term in (shape, shape**2)], axis=1)
    design = np.column_stack([np.ones(len(steps)), _standardised(steps), terms])
    weights = np.linalg.lstsq(design, values, rcond=None)[0][2:]
    return values - (terms - terms.mean(axis=0)) @ weights


def find_jumps(values: np.ndarray) -> np.ndarray:
    """Return indices of points that differ from the previous one far more than the series usually changes."""
    changes = np.diff(values)
    usual = np.median(np.abs(changes - np.median(changes)))
    return np.flatnonzero(np.abs(changes) > JUMP_CHANGES * usual) + 1


def find_period(values: np.ndarray) -> int | None:
    """Return the period of a series in points, if it repeats at least `PERIODS` times; else None.

    The period is the lag of the highest autocorrelation after the first negative one. Autocorrelated noise has its
    highest before that lag.
    """
    values = values - np.polyval(np.polyfit(np.arange(len(values)), values, 1), np.arange(len(values)))
    lags = range(1, len(values) // PERIODS + 1)
    pairs = [(values[:-lag], values[lag:]) for lag in lags]
    correlations = np.array([np.corrcoef(*pair)[0, 1] if min(map(np.ptp, pair)) > 0 else 0.0 for pair in pairs])
    negative = np.flatnonzero(correlations < 0)
    if not len(negative) or (after := correlations[negative[0] :]).max() < PERIODIC:
        return None
    # A multiple of the period has the same autocorrelation but for noise: take the first.
    return lags[int(negative[0] + np.flatnonzero(after > SIMILAR * after.max())[0])]


def t_tail(t: float, freedom: int) -> float:
    """Return P(T > t) for Student's t; Abramowitz and Stegun 26.7.3 (odd `freedom`) and 26.7.4 (even)."""
    angle = math.atan(t / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + total) if odd else total
    return (1 - inside) / 2


def _standardised(values: np.ndarray) -> np.ndarray:
    """Shift and scale to mean 0 and standard deviation 1."""
    return (values - values.mean()) / values.std()
