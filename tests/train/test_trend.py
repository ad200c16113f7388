"""Statistics of memory series: tabulated values, and what must not pass for a trend."""

import numpy as np
import pytest

from lean_finetune.train.monitor.trend import LEAST_POINTS, at_equal_shape, steady_trend, t_tail

STEPS = np.arange(120.0)
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("t", "freedom", "chance"), [(6.314, 1, 0.05), (2.92, 2, 0.05), (2.821, 9, 0.01)])
def test_t_tail_matches_published_tables(t: float, freedom: int, chance: float):
    assert t_tail(t, freedom) == pytest.approx(chance, rel=2e-3)
    assert t_tail(-t, freedom) == pytest.approx(1 - chance, rel=2e-3)


def test_straight_line_is_a_steady_trend_with_its_slope():
    trend = steady_trend(STEPS, 5 + 2 * STEPS)
    assert trend.slope_per_step == pytest.approx(2) and trend.growth == pytest.approx(2 * 119)
    assert trend.confidence > 0.9999 and trend.steady


@pytest.mark.parametrize("fading", [10, 30, 60, 100])
def test_fading_growth_is_not_steady(fading: int):
    """A cache that fills is reported as a leak."""
    assert not steady_trend(STEPS, 1 - np.exp(-STEPS / fading) + RNG.normal(0, 1e-3, len(STEPS))).steady


def test_jump_and_fall_are_no_trend():
    assert steady_trend(STEPS, 1e9 * (STEPS > 50)).confidence < 0.9
    assert steady_trend(STEPS, -STEPS).confidence < 0.01


def test_too_few_points_are_refused():
    with pytest.raises(ValueError, match=f"takes {LEAST_POINTS} points, got 14"):
        steady_trend(STEPS[:14], STEPS[:14])


def test_effect_of_shape_is_subtracted():
    shape = RNG.uniform(1, 10, len(STEPS))
    values = at_equal_shape(STEPS, STEPS + 3 * shape + shape**2, [shape])
    assert values is not None
    assert np.diff(values) == pytest.approx(np.ones(119), abs=1e-6)


def test_shapes_that_grow_with_time_hide_growth_and_others_do_not():
    """Growth with batch length is reported as a leak, or shrinking batches hide one."""
    assert at_equal_shape(STEPS, STEPS, [STEPS + RNG.normal(0, 5, 120)]) is None
    assert at_equal_shape(STEPS, STEPS, [-STEPS]) is STEPS
    assert at_equal_shape(STEPS, STEPS, [np.ones(120)]) is STEPS
