"""Does a noisy series grow, and how sure is that? Memory's noise is seldom independent from step to step.

A series is cut into `BLOCKS` stretches, and each stretch becomes one level, its median: what happens inside a stretch
(a cache that fills and empties, one large batch) is then gone. Steady growth is asked of the differences between
neighbouring levels. For a random walk they are as good as independent, for noise around a level they scatter more
than their mean does; so the test errs on the side of silence in both cases, and a single jump, however high, is no
growth: it is one difference of many.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS = 11
BLOCK_POINTS = 3
"""A stretch of fewer makes a poor median: a series too short for such stretches is judged point by point."""
LEAST_POINTS = 15
"""Fewer points show no trend that could be told from chance."""
WALK_WIDENING = math.sqrt(1.5)
"""Of a random walk, levels of neighbouring stretches share part of their path: their differences correlate by 1/4."""
STEADY_SHARE = 2 / 3
"""Of the mean growth that the last third must still have: a filling cache has less …"""
SLOWING_SHARE, SLOWING_ERRORS = 0.9, 1.5
"""… and of the first third's, where it falls short of it by more standard errors than chance alone would often do."""
MOVES_WITH_TIME = 0.5
"""Correlation of lengths and time above which one cannot be told from the other."""
JUMP_CHANGES = 10
"""Times the median deviation of a series' changes: one of normal noise is that large once in 10 ** 11."""
PERIODS, PERIODIC, ALIKE = 4, 0.6, 0.9
"""A cycle must have been seen so often, its autocorrelation be higher than this, and near the highest there is."""
SUREST = 0.999999
"""What is said at most: the tests approximate."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How a series moves."""

    slope_per_step: float
    growth: float
    """Over the whole series."""
    confidence: float
    """That it grows: 1 minus the probability of such growth by chance."""
    steady: bool
    """It grows at the end as it did before."""


def steady_trend(steps: np.ndarray, values: np.ndarray) -> Trend:
    """The trend over at least `LEAST_POINTS` points: a t-test on the differences of levels.

    Raises:
        ValueError: there are fewer points.
    """
    times, levels = block_levels(steps, values)
    slopes = np.diff(levels) / np.diff(times)
    mean, scatter = float(slopes.mean()), float(slopes.std(ddof=1)) * WALK_WIDENING
    third = len(slopes) // 3
    first, last = float(slopes[:third].mean()), float(slopes[-third:].mean())
    error = float(slopes.std(ddof=1)) * math.sqrt(2 / third)
    slowing = last < SLOWING_SHARE * first and first - last > SLOWING_ERRORS * error
    if scatter > 0:
        surely = 1 - t_tail(mean / scatter * math.sqrt(len(slopes)), len(slopes) - 1)
    else:
        surely = 1.0 if mean > 0 else 0.0
    return Trend(
        slope_per_step=float(np.median(slopes)),
        growth=mean * float(steps[-1] - steps[0]),
        confidence=min(surely, SUREST),
        steady=mean > 0 and last >= STEADY_SHARE * mean and not slowing,
    )


def block_levels(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean step and median value of each stretch; of a short series, its points.

    Raises:
        ValueError: there are fewer than `LEAST_POINTS` points.
    """
    if len(values) < LEAST_POINTS:
        raise ValueError(f"a trend takes {LEAST_POINTS} points, got {len(values)}")
    if len(values) < BLOCKS * BLOCK_POINTS:
        return steps, values
    times = np.array([part.mean() for part in np.array_split(steps, BLOCKS)])
    return times, np.array([np.median(part) for part in np.array_split(values, BLOCKS)])


def rising_confidence(levels: np.ndarray) -> float:
    """That levels rise, in jumps however uneven: one-sided test of Mann and Kendall, corrected for ties."""
    count = len(levels)
    score = float(np.sign(levels[None, :] - levels[:, None])[np.triu_indices(count, 1)].sum())
    ties = np.unique(levels, return_counts=True)[1]
    variance = (_kendall_term(np.array([count])) - _kendall_term(ties)) / 18
    if score <= 0 or variance <= 0:
        return 0.0
    return min(1 - normal_tail((score - 1) / math.sqrt(variance)), SUREST)


def find_jumps(values: np.ndarray) -> np.ndarray:
    """Indices of the points that lie above or below the one before by far more than the series' usual change."""
    changes = np.diff(values)
    usual = np.median(np.abs(changes - np.median(changes)))
    return np.flatnonzero(np.abs(changes) > JUMP_CHANGES * usual) + 1


def find_period(values: np.ndarray) -> int | None:
    """Points after which a series repeats itself, seen at least `PERIODS` times; None where it does not.

    The lag with the highest autocorrelation after the first one below zero: noise that remembers itself has its highest
    one before, and a slow random walk none as high after.
    """
    values = values - np.polyval(np.polyfit(np.arange(len(values)), values, 1), np.arange(len(values)))
    lags = range(1, len(values) // PERIODS + 1)
    pairs = [(values[:-lag], values[lag:]) for lag in lags]
    likeness = np.array([np.corrcoef(*pair)[0, 1] if min(map(np.ptp, pair)) > 0 else 0.0 for pair in pairs])
    negative = np.flatnonzero(likeness < 0)
    if not len(negative):
        return None
    after = likeness[negative[0] :]
    if after.max() < PERIODIC:
        return None
    # Twice the period is as like, but for noise.
    return lags[int(negative[0] + np.flatnonzero(after > ALIKE * after.max())[0])]


def _kendall_term(counts: np.ndarray) -> float:
    """Sum of n (n - 1) (2 n + 5), of the variance of Kendall's score."""
    return float((counts * (counts - 1) * (2 * counts + 5)).sum())


def at_equal_shape(steps: np.ndarray, values: np.ndarray, shapes: Sequence[np.ndarray]) -> np.ndarray | None:
    """The values without what the batches' shapes explain; None where shapes grow with time and so explain all.

    What a shape explains is a square law, fitted together with a line in time so that growth is not taken for shape.
    Shapes that shrink with time can only hide growth, and are left as they are.
    """
    varying = [shape for shape in shapes if shape.min() < shape.max()]
    together = [float(np.corrcoef(steps, shape)[0, 1]) for shape in varying]
    if any(one > MOVES_WITH_TIME for one in together):
        return None
    used = [_standard(shape) for shape, one in zip(varying, together, strict=True) if one >= -MOVES_WITH_TIME]
    if not used:
        return values
    explained = np.stack([part for shape in used for part in (shape, shape**2)], axis=1)
    design = np.column_stack([np.ones(len(steps)), _standard(steps), explained])
    weights = np.linalg.lstsq(design, values, rcond=None)[0][2:]
    return values - (explained - explained.mean(axis=0)) @ weights


def _standard(values: np.ndarray) -> np.ndarray:
    """Mean 0, deviation 1."""
    return (values - values.mean()) / values.std()


def ranks_agree(one: np.ndarray, other: np.ndarray) -> float:
    """Confidence that two series rise and fall together: Spearman's correlation, one-sided."""
    if one.min() == one.max() or other.min() == other.max():
        return 0.0
    correlation = float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])
    return min(1 - normal_tail(correlation * math.sqrt(len(one) - 1)), SUREST)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Places in ascending order, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def meet_confidence(both: int, ones: int, others: int, among: int) -> float:
    """Confidence that two kinds of step do not meet by chance.

    Args:
        both: steps that are of both kinds.
        ones: steps of the first kind.
        others: steps of the second kind.
        among: all steps.
    """
    least, most = max(both, ones + others - among), min(ones, others)
    everywhere = _log_ways(among, ones)
    chance = sum(
        math.exp(_log_ways(others, k) + _log_ways(among - others, ones - k) - everywhere)
        for k in range(least, most + 1)
    )
    return max(0.0, min(1 - chance, SUREST))


def _log_ways(among: int, chosen: int) -> float:
    """Logarithm of the number of ways to choose."""
    return math.lgamma(among + 1) - math.lgamma(chosen + 1) - math.lgamma(among - chosen + 1)


def t_tail(t: float, freedom: int) -> float:
    """Probability that Student's t exceeds `t`; `freedom` is odd (Abramowitz and Stegun 26.7.3) or even (26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    square, odd = math.cos(angle) ** 2, freedom % 2
    term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + total) if odd else total
    return (1 - inside) / 2


def normal_tail(z: float) -> float:
    """Probability that a standard normal variable exceeds `z`."""
    return math.erfc(z / math.sqrt(2)) / 2
