"""The batching benchmark: all contestants hold whole rows and are judged by one measure, and the stage really runs."""

import numpy as np
import pytest

from benchmarks import batching
from benchmarks import batching_cases as cases
from benchmarks.batching_cases import Batches, batch_rebalance, group_by_length, grouped, ours, random_order

LENGTHS = np.clip(np.exp(np.random.default_rng(3).normal(5.25, 1, 2400)).astype(np.int32), 8, 4096)


def test_figures_are_those_of_the_micro_batches():
    """Two GPUs, two steps: padding and waiting counted by hand."""
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
def test_a_rivals_micro_batches_hold_each_row_at_most_once_an_epoch_and_fill_whole_turns(make):
    batches = make(LENGTHS, 32, 1)
    assert np.bincount(batches.rows).max() == 1
    assert len(batches.padded_tokens) == len(batches.bounds) - 1 == batches.step_bounds[-1]
    assert (np.diff(batches.step_bounds) == 32).all() and 32 % batches.ranks == 0
    assert batches.figures(LENGTHS)["padding_percent"] > 0


@pytest.mark.parametrize(("mode", "constant_shape"), [("bucketed", False), ("packed", True), ("fixed", False)])
def test_ours_are_the_stages_own_plan_of_all_rows(mode, constant_shape):
    batches = ours(LENGTHS, mode=mode, constant_shape=constant_shape, ranks=2, tokens_per_step=100_000, epochs=1)
    assert sorted(batches.rows.tolist()) == list(range(len(LENGTHS)))
    assert (set(batches.padded_tokens.tolist()) == {cases.CAPACITY}) == constant_shape


def test_sorted_steps_are_far_from_random():
    by_length = [np.argsort(LENGTHS).tolist()]
    assert grouped(by_length, LENGTHS, 16).figures(LENGTHS)["randomness"] > 4  # type: ignore[operator]


def test_few_steps_promise_the_budget_alone_and_many_all_of_it():
    figures = {"largest_tokens": 9, "straggler_percent": 9.0, "randomness": 1.0, "padding_percent": 0.6}
    name = "ours, packed, 8 GPUs, 32 per step"
    assert [bar.holds for bar in batching._bars(name, figures, few_steps=True)] == [True]
    bars = batching._bars(name, figures, few_steps=False)
    assert [bar.name.rpartition(": ")[2] for bar in bars if not bar.holds] == ["straggler %", "padding %"]


def test_the_stage_is_timed_as_users_run_it(tmp_path):
    cases.prepare_stage(tmp_path, LENGTHS, mode="packed", ranks=2, tokens_per_step=100_000)
    usage = cases.run_stage(tmp_path)
    assert (tmp_path / "data/batches/plan.arrow").exists() and (tmp_path / "data/batches/figures.json").exists()
    assert usage.wall_s > 0 and usage.peak_rss_bytes > 30 << 20
