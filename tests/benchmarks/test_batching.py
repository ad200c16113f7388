"""The batching benchmark: figures of a plan, the contestants' batches, and the bars of short and long runs."""

import numpy as np
import pytest

from benchmarks.batching import mode_bars
from benchmarks.batching_cases import CAPACITY, Batches, batch_rebalance, group_by_length, ours, random_order

LENGTHS = np.clip(np.exp(np.random.default_rng(3).normal(5.25, 1, 2400)).astype(np.int32), 8, 4096)


def test_figures_of_a_plan_equal_those_counted_by_hand():
    batches = Batches(
        rows=np.arange(6),
        bounds=np.array([0, 2, 3, 4, 6]),
        padded_tokens=np.array([16, 8, 8, 32]),
        step_bounds=np.array([0, 2, 4]),
        ranks=2,
    )
    figures = batches.figures(np.array([4, 8, 8, 8, 2, 16]))
    assert figures["padding_percent"] == pytest.approx(100 * 18 / 64, abs=0.01)
    assert figures["straggler_percent"] == pytest.approx(100 * (1 - 64 / 96), abs=0.01)
    assert (figures["largest_tokens"], figures["steps"], figures["batches_per_step"]) == (32, 2, 2.0)


@pytest.mark.parametrize("make", [random_order, group_by_length, batch_rebalance])
def test_a_rival_uses_a_row_at_most_once_per_epoch_and_fills_its_steps(make):
    batches = make(LENGTHS, 32, 1)
    assert np.bincount(batches.rows).max() == 1
    assert len(batches.padded_tokens) == len(batches.bounds) - 1 == batches.step_bounds[-1]
    assert (np.diff(batches.step_bounds) == 32).all() and 32 % batches.ranks == 0


@pytest.mark.parametrize(("mode", "constant_shape"), [("bucketed", False), ("packed", True), ("fixed", False)])
def test_our_plan_has_every_row_once(mode, constant_shape):
    batches = ours(LENGTHS, mode=mode, constant_shape=constant_shape, ranks=2, tokens_per_step=100_000, epochs=1)
    assert sorted(batches.rows.tolist()) == list(range(len(LENGTHS)))
    assert (set(batches.padded_tokens.tolist()) == {CAPACITY}) == constant_shape


def test_a_short_run_has_only_the_bar_of_the_largest_micro_batch():
    figures = {"largest_tokens": 9, "straggler_percent": 9.0, "randomness": 1.0, "padding_percent": 0.6}
    assert [bar.holds for bar in mode_bars("x", ("packed", 32), figures, few_steps=True)] == [True]
    bars = mode_bars("x", ("packed", 32), figures, few_steps=False)
    assert [bar.name for bar in bars if not bar.holds] == ["x: straggler %", "x: padding %"]
