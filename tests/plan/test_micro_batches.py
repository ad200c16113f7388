"""Micro-batches: they never change the rows of a step, memory peaks in the first one, padding is least."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_finetune.plan import micro_batches
from lean_finetune.plan.batch_plan import read_plan, write_plan
from lean_finetune.plan.bucketed import OVERHEAD_TOKENS, cheapest_splits
from lean_finetune.plan.micro_batches import split_steps
from lean_finetune.plan.optimizer_steps import run_steps
from lean_finetune.plan.planner import summarise
from tests.plan.common import (
    all_batches,
    batch_settings_of,
    index_of,
    log_normal_lengths,
    plan_of,
    rows_by_step,
    runs,
    steps_of,
)

SETTINGS = settings(max_examples=50, deadline=None)
RANKS = st.sampled_from([2, 3, 4])


@SETTINGS
@given(runs() | runs(RANKS))
def test_settings_and_number_of_gpus_change_no_step(run):
    """A lost or repeated row, or another result on another number of GPUs."""
    plan = plan_of(**run)
    order = {key: run[key] for key in ("seed", "epochs", "tokens_per_step")}
    steps = steps_of(run["index"], **order)
    assert rows_by_step(plan) == [sorted(rows.tolist()) for _, rows in steps]
    assert [step[0].epoch for step in plan.steps] == [epoch for epoch, _ in steps]


@pytest.mark.parametrize("mode", ["bucketed", "packed"])
def test_rows_of_a_million_tokens_are_padded_to_equal_parts_alone(mode):
    """Long rows, divided among 6 GPUs of which two groups train: 32-bit sums, or padding to a power of two."""
    index = index_of([1_000_001, 999_999, 7, 600_000])
    planned = batch_settings_of(mode=mode, max_tokens=1_000_002, pad_multiple=6, ranks=2)
    plan = plan_of(index, planned, tokens_per_step=3_000_000)
    assert sorted(plan.rows.tolist()) == [0, 1, 2, 3] and not (plan.length % 6).any()
    tokens = [index.lengths[batch.rows].sum() for batch in all_batches(plan)]
    waste = plan.padded_tokens - tokens
    assert plan.length.max() == 1_000_002 and waste.min() >= 0 and (mode != "packed" or waste.max() < 6)


@SETTINGS
@given(runs() | runs(RANKS))
def test_a_micro_batch_has_room_for_its_rows_and_stays_within_max_tokens(run):
    batch_settings = run["batch_settings"]
    for batch in all_batches(plan_of(**run)):
        lengths = run["index"].lengths[batch.rows]
        needed = int(lengths.sum() if batch_settings.flat else lengths.max(initial=0))
        assert batch.flat == batch_settings.flat
        assert batch.supervised == run["index"].supervised[batch.rows].sum()
        if not len(batch.rows):
            assert batch_settings.ranks > 1 and batch.padded_tokens == batch.length == 0
        elif batch_settings.constant_shape:
            assert needed <= batch.length == batch.padded_tokens == batch_settings.max_tokens
        else:
            assert batch.length == -(-needed // batch_settings.pad_multiple) * batch_settings.pad_multiple
        if batch_settings.mode == "fixed":
            assert len(batch.rows) <= batch_settings.fixed_rows
        else:
            assert batch.padded_tokens <= batch_settings.max_tokens


@SETTINGS
@given(runs() | runs(RANKS))
def test_no_later_micro_batch_is_larger_than_the_first_so_memory_cannot_run_out_late(run):
    plan = plan_of(**run)
    first, *others = all_batches(plan)
    for step in plan.steps:
        places = range(0, len(step), plan.ranks)
        turns = [max(one.padded_tokens for one in step[place : place + plan.ranks]) for place in places]
        assert turns == sorted(turns, reverse=True)
    if run["batch_settings"].mode != "fixed":
        assert run["index"].lengths[first.rows[0]] == run["index"].lengths.max()
        assert all(batch.padded_tokens <= first.padded_tokens and batch.length <= first.length for batch in others)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_budget_beyond_what_steps_need_does_not_inflate_the_first_micro_batch(ranks):
    """All short rows of step 0 padded to the run's longest row: several times the memory of any other step."""
    index = index_of(np.append(log_normal_lengths(2000), 1024))
    first, *others = all_batches(plan_of(index, batch_settings_of(max_tokens=2**20, ranks=ranks), tokens_per_step=4000))
    assert max(batch.padded_tokens for batch in others) <= first.padded_tokens < 2 * 4000


@SETTINGS
@given(runs(RANKS))
def test_every_rank_gets_the_same_number_of_micro_batches(run):
    """One GPU with a micro-batch more would leave the others waiting in the gradient's sum for ever."""
    ranks = run["batch_settings"].ranks
    for number, step in enumerate(plan_of(**run).steps):
        assert [batch.rank for batch in step] == list(range(ranks)) * (len(step) // ranks)
        sizes = [len(batch.rows) for batch in step][1 if number == 0 else 0 :]  # The run's first one must be full.
        idle = sizes.count(0)
        assert idle == 0 or (idle < ranks and max(sizes) <= 1), "idle GPUs though there are rows to give"


@SETTINGS
@given(runs(), st.integers(1, 40))
def test_blocks_of_any_size_give_the_same_plan(run, rows_per_block):
    """Blocks of steps are split together for speed alone."""
    expected = all_batches(plan_of(**run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "ROWS_PER_BLOCK", rows_per_block)
        parts = all_batches(plan_of(**run))
    assert [(one.step, one.length, one.rows.tolist()) for one in expected] == [
        (one.step, one.length, one.rows.tolist()) for one in parts
    ]


def cost(lengths: np.ndarray, starts: tuple[int, ...], cap_tokens: int) -> float:
    """Padded tokens and overhead of a split."""
    sizes = [int(lengths[start]) * (end - start) for start, end in itertools.pairwise([*starts, len(lengths)])]
    return sum(sizes) + OVERHEAD_TOKENS * len(sizes) if max(sizes) <= cap_tokens else float("inf")


@SETTINGS
@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=10), min_size=1, max_size=4),
    st.integers(60, 400),
    st.booleans(),
)
def test_no_other_split_of_a_step_is_cheaper(steps, cap_tokens, repeated):
    """The search prunes candidates; a wrong prune would waste padding without a sign.

    Rows of one length move in pieces, for speed: with them a split may cost a little more.
    """
    padded = [np.array(sorted(lengths if repeated else set(lengths), reverse=True), np.int64) * 8 for lengths in steps]
    bounds = np.cumsum([0, *map(len, padded)])
    begins = cheapest_splits(np.concatenate(padded), bounds, 8 * cap_tokens)
    for step, lengths in enumerate(padded):
        found = np.flatnonzero(begins[bounds[step] : bounds[step + 1]]).tolist()
        every = (
            (0, *others) for k in range(len(lengths)) for others in itertools.combinations(range(1, len(lengths)), k)
        )
        best = min(cost(lengths, starts, 8 * cap_tokens) for starts in every)
        assert found[0] == 0
        assert cost(lengths, tuple(found), 8 * cap_tokens) <= best * (1.1 if repeated else 1)


def test_padding_is_a_fraction_of_what_random_batches_of_the_same_rows_waste():
    lengths = log_normal_lengths(5000)
    plan = plan_of(index_of(lengths), batch_settings_of(max_tokens=8192), tokens_per_step=32_768)
    summary = summarise(plan, lengths, mode="bucketed")
    random_padded = sum(len(rows) * int(lengths[rows].max()) for rows in np.array_split(np.arange(5000), 625))
    assert summary["padding_percent"] < 0.2 * 100 * (1 - lengths.sum() / random_padded)
    padded = plan.padded_tokens.sum()
    assert summary["padding_percent"] == pytest.approx(100 * (padded - lengths.sum()) / padded, abs=1e-3)
    assert summary["tokens_per_step_mean"] == pytest.approx(lengths.sum() / len(plan.steps), abs=1e-2)


@pytest.mark.parametrize(("mode", "straggler", "padding"), [("bucketed", 1.5, 7.0), ("packed", 0.5, 0.1)])
def test_gpus_hardly_wait_for_each_other(mode, straggler, padding):
    """Dealt without regard to size, the largest micro-batch of eight makes the other seven wait half of their time."""
    lengths = np.clip(np.exp(np.random.default_rng(1).normal(5.25, 1, 200_000)).astype(np.int32), 8, 4096)
    plan = plan_of(
        index_of(lengths), batch_settings_of(mode=mode, max_tokens=16_384, ranks=8), tokens_per_step=32 * 16_000
    )
    summary = summarise(plan, lengths, mode=mode)
    assert summary["straggler_percent"] < straggler
    assert summary["padding_percent"] < padding
    tokens = np.bincount(plan.rank, weights=plan.padded_tokens)
    assert tokens.max() / tokens.mean() < 1.01


def test_packing_fills_micro_batches_to_the_brim():
    lengths = np.clip(log_normal_lengths(20_000), 4, 1024)
    batch_settings = batch_settings_of(mode="packed", max_tokens=4096, constant_shape=True)
    plan = plan_of(index_of(lengths), batch_settings, tokens_per_step=32 * 4096 - 800)
    assert set(plan.length.tolist()) == {4096}
    assert summarise(plan, lengths, mode="packed")["padding_percent"] < 1.5


def test_rows_that_only_best_fit_gets_into_two_micro_batches_go_into_two():
    """Spread evenly they need three: 600, 500 + 400, then 300 and 200 find no room."""
    lengths = [600, 500, 400, 300, 200, 1000]
    index = index_of(lengths, [1] * 6)
    batch_settings = batch_settings_of(mode="packed", max_tokens=1000, pad_multiple=1)
    plan = plan_of(index, batch_settings, tokens_per_step=10**6)
    assert sorted(index.lengths[batch.rows].sum() for batch in all_batches(plan)) == [1000, 1000, 1000]


@pytest.mark.parametrize("mode", ["bucketed", "packed", "fixed"])
def test_a_step_with_fewer_rows_than_gpus_leaves_gpus_idle(mode, tmp_path):
    """A run of days that ends in an error at the last rows of its epoch."""
    index, batch_settings = index_of([10, 11, 12]), batch_settings_of(mode=mode, ranks=8, fixed_rows=1)
    steps = run_steps(index, seed=1, epochs=2, tokens_per_step=10**6)
    write_plan(tmp_path / "plan.arrow", split_steps(steps, index, batch_settings))
    plan = read_plan(tmp_path / "plan.arrow")
    assert [[len(batch.rows) for batch in step] for step in plan.steps] == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2
    summary = summarise(plan, index.lengths, mode=mode)
    assert summary["micro_batches"] == 6 and summary["tokens_per_step_mean"] == 33


def test_fixed_takes_rows_as_they_come():
    """The way of others, for comparison: sorted, it would not show what they waste."""
    index = index_of(log_normal_lengths(40))
    plan = plan_of(index, batch_settings_of(mode="fixed", fixed_rows=8), seed=9, tokens_per_step=10**6)
    (_, order), *_ = steps_of(index, seed=9, epochs=1, tokens_per_step=10**6)
    assert sorted(batch.rows.tolist() for batch in all_batches(plan)) == sorted(order.reshape(-1, 8).tolist())
