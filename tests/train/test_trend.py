"""The statistics behind growth, against tables and by what they must not mistake."""

import numpy as np
import pytest

from lean_finetune.train.monitor import trend
from lean_finetune.train.monitor.trend import (
    BLOCKS,
    LEAST_POINTS,
    at_equal_shape,
    meet_confidence,
    rising_confidence,
    steady_trend,
)

STEPS = np.arange(120.0)
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    [(6.314, 1, 0.05), (2.92, 2, 0.05), (2.353, 3, 0.05), (2.571, 5, 0.025), (2.821, 9, 0.01), (4.144, 10, 0.001)],
)
def test_tails_of_students_t_are_those_of_the_tables(t: float, freedom: int, chance: float):
    assert trend.t_tail(t, freedom) == pytest.approx(chance, rel=2e-3)
    assert trend.t_tail(-t, freedom) == pytest.approx(1 - chance, rel=2e-3)


def test_tails_of_the_normal_distribution_are_those_of_the_tables():
    assert trend.normal_tail(1.96) == pytest.approx(0.025, rel=1e-3)


def test_a_line_has_its_slope_and_is_steady():
    found = steady_trend(STEPS, 5 + 2 * STEPS)
    assert found.slope_per_step == pytest.approx(2) and found.growth == pytest.approx(2 * 119)
    assert found.confidence > 0.9999 and found.steady


def test_a_jump_is_no_growth_however_high():
    assert steady_trend(STEPS, 1e9 * (STEPS > 50)).confidence < 0.9


@pytest.mark.parametrize("fading", [10, 30, 60, 100])
def test_growth_that_fades_is_not_steady(fading: int):
    found = steady_trend(STEPS, 1 - np.exp(-STEPS / fading) + DRAW.normal(0, 1e-3, len(STEPS)))
    assert not found.steady


def test_a_fall_is_no_growth():
    found = steady_trend(STEPS, -STEPS)
    assert found.confidence < 0.01 and not found.steady


def test_too_few_points_are_refused():
    """Nothing can be said of a few points."""
    with pytest.raises(ValueError, match=f"takes {LEAST_POINTS} points, got 14"):
        steady_trend(STEPS[:14], STEPS[:14])


def test_uneven_jumps_rise():
    levels = np.array([0, 0, 0, 1, 1, 5, 5, 5, 6, 6, 6.0])
    assert rising_confidence(levels) > 0.999
    assert rising_confidence(levels[::-1]) == rising_confidence(np.zeros(BLOCKS)) == 0
    assert rising_confidence(DRAW.permutation(levels)) < 0.99


def test_what_shapes_explain_is_taken_out():
    shape = DRAW.uniform(1, 10, len(STEPS))
    bare = at_equal_shape(STEPS, STEPS + 3 * shape + shape**2, [shape])
    assert bare is not None
    assert np.diff(bare) == pytest.approx(np.ones(119), abs=1e-6)


def test_shapes_that_rise_with_time_explain_all_and_those_that_fall_nothing():
    """Growth by length taken for a leak, or a fall by length for the lack of one."""
    assert at_equal_shape(STEPS, STEPS, [STEPS + DRAW.normal(0, 5, 120)]) is None
    assert at_equal_shape(STEPS, STEPS, [-STEPS]) is STEPS
    assert at_equal_shape(STEPS, STEPS, [np.ones(120)]) is STEPS


def test_meeting_by_chance_is_counted_exactly():
    """All of 3 rises among 5 long batches of 20: 10 of the 1140 ways to choose 3."""
    assert meet_confidence(3, 3, 5, 20) == pytest.approx(1 - 10 / 1140)
    assert meet_confidence(20, 20, 20, 20) == pytest.approx(0, abs=1e-9)


def test_equal_ranks_agree_and_constants_do_not():
    assert trend.ranks_agree(STEPS, STEPS**3) > 0.9999
    assert trend.ranks_agree(STEPS, -STEPS) < 1e-4
    assert trend.ranks_agree(STEPS, np.ones(120)) == 0
