"""The rows of each step: once an epoch or as often as their weight requires, in an order that only the seed decides."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_finetune.core.errors import UserError
from lean_finetune.plan.optimizer_steps import run_steps
from lean_finetune.plan.planner import randomness
from tests.plan.common import index_of, log_normal_lengths, runs, steps_of

SETTINGS = settings(max_examples=100, deadline=None)


def order_of(run) -> dict:
    return {key: run[key] for key in ("seed", "epochs", "tokens_per_step")}


@SETTINGS
@given(runs())
def test_every_row_comes_once_in_every_epoch(run):
    steps = steps_of(run["index"], **order_of(run))
    for epoch in range(run["epochs"]):
        rows = np.concatenate([rows for of, rows in steps if of == epoch])
        assert sorted(rows.tolist()) == list(range(len(run["index"].lengths)))
    epochs = [epoch for epoch, _ in steps]
    assert epochs == sorted(epochs)


@SETTINGS
@given(runs())
def test_a_step_ends_with_the_row_that_reaches_tokens_per_step(run):
    lengths = run["index"].lengths
    steps = steps_of(run["index"], **order_of(run))
    assert all(lengths[rows[:-1]].sum() < run["tokens_per_step"] for _, rows in steps)
    short = [epoch for epoch, rows in steps if lengths[rows].sum() < run["tokens_per_step"]]
    assert len(short) == len(set(short)), "only what is left at the end of an epoch may be a short step"


@SETTINGS
@given(runs())
def test_the_first_step_holds_the_longest_row_and_the_others_keep_their_order(run):
    """Without it memory peaks somewhere in the run, hours after the start."""
    lengths = run["index"].lengths
    (_, first), *others = steps_of(run["index"], **order_of(run))
    assert lengths[first].max() == lengths.max()
    shuffled = np.argsort(np.random.PCG64([run["seed"], 0]).random_raw(len(lengths)), kind="stable")
    place = np.empty(len(lengths), int)
    place[shuffled] = np.arange(len(lengths))
    starts = [place[rows[0]] for epoch, rows in others if epoch == 0]
    assert starts == sorted(starts)


@SETTINGS
@given(runs(), st.integers(1, 3))
def test_more_epochs_leave_the_earlier_ones_as_they_were(run, more):
    shorter = steps_of(run["index"], **order_of(run))
    longer = steps_of(run["index"], **order_of(run) | {"epochs": run["epochs"] + more})
    for (epoch, rows), (other_epoch, other_rows) in zip(shorter, longer, strict=False):
        assert epoch == other_epoch and rows.tolist() == other_rows.tolist()


def test_steps_are_random_draws_and_not_sorted_by_length():
    """Sorting all rows by length makes step means ten times more spread than chance and correlated."""
    lengths = log_normal_lengths(40_000)
    steps = [rows for _, rows in steps_of(index_of(lengths), seed=3, epochs=1, tokens_per_step=4096)][:-1]
    bounds = np.cumsum([0, *(len(rows) for rows in steps)])
    ours, sorted_by_length = (
        randomness(ordered, bounds) for ordered in (lengths[np.concatenate(steps)], np.sort(lengths)[: bounds[-1]])
    )
    assert ours is not None and 0.85 < ours < 1.15
    assert sorted_by_length is not None and sorted_by_length > 4
    means = np.array([np.log(lengths[rows]).mean() for rows in steps])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_the_order_of_rows_survives_an_upgrade_of_numpy():
    """First rows of seed 17 as every numpy release draws them: a change here would reorder everyone's training."""
    steps = steps_of(index_of(np.full(1000, 10)), seed=17, epochs=2, tokens_per_step=10_000)
    assert [rows[:6].tolist() for _, rows in steps] == [[334, 492, 381, 160, 141, 468], [897, 675, 475, 630, 122, 752]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.75]), min_size=1, max_size=3), st.integers(0, 99))
def test_a_row_is_used_as_often_as_its_weight_requires(weights, seed):
    """A mixture whose shares differ from params.yaml is another experiment."""
    sources = np.arange(300) % len(weights)
    index = index_of(np.full(300, 10), sources=sources, weights=tuple(weights))
    of_epochs: dict[int, Counter] = {epoch: Counter() for epoch in range(4)}
    for epoch, rows in steps_of(index, seed=seed, epochs=4, tokens_per_step=10**6):
        of_epochs[epoch].update(rows.tolist())
    for row, source in enumerate(sources):
        counts = [of_epochs[epoch][row] for epoch in range(4)]
        assert all(count in (int(weights[source]), -int(-weights[source] // 1)) for count in counts)
        assert sum(counts) == 4 * weights[source], "these weights come out even over four epochs"
    if 1.5 in weights:
        extra = [row for row, source in enumerate(sources) if weights[source] == 1.5 and of_epochs[0][row] == 2]
        assert 0.2 < len(extra) / sum(weights[source] == 1.5 for source in sources) < 0.8


def test_a_weight_of_one_changes_no_order_and_another_sources_weight_changes_no_draw():
    lengths, sources = np.full(200, 10), np.arange(200) % 2
    run = {"seed": 5, "epochs": 1, "tokens_per_step": 10**6}
    (_, even), *_ = steps_of(index_of(lengths), **run)
    (_, ones), *_ = steps_of(index_of(lengths, sources=sources, weights=(1.0, 1.0)), **run)
    assert even.tolist() == ones.tolist()
    halves = [steps_of(index_of(lengths, sources=sources, weights=(0.5, w)), **run)[0][1] for w in (1.0, 2.0)]
    taken = [sorted(row for row in rows.tolist() if row % 2 == 0) for rows in halves]
    assert taken[0] == taken[1]


def test_the_longest_row_comes_first_even_when_epoch_0_leaves_it_out():
    """With a small weight it may be drawn late: memory would peak there."""
    lengths = np.full(50, 10)
    lengths[7] = 99
    sources = np.zeros(50, int)
    sources[7] = 1
    late = 0
    for seed in range(8):
        index = index_of(lengths, sources=sources, weights=(1.0, 0.25))
        (epoch, first), *others = steps_of(index, seed=seed, epochs=4, tokens_per_step=100)
        assert 7 in first and not any(7 in rows for _, rows in others)
        assert [other for other, _ in others] == sorted(other for other, _ in others)
        late += epoch > 0
    assert late, "none of these seeds tries what the test is for"


def test_weights_that_leave_no_row_are_refused():
    index = index_of([10], weights=(1e-9,))
    with pytest.raises(UserError, match=r"data\.source: the weights leave no training row in 2 epochs; raise a weight"):
        next(run_steps(index, seed=1, epochs=2, tokens_per_step=100))


def test_a_run_is_planned_epoch_by_epoch():
    """Storing the order of all epochs would need memory that grows with train.epochs."""
    parts = run_steps(index_of(np.full(10, 10)), seed=1, epochs=10**9, tokens_per_step=30)
    assert [part.epoch for part in islice(parts, 4)] == [0, 0, 1, 2]
