"""Preference pairs in the plan: both rows in one micro-batch, and both counted by the step."""

from dataclasses import replace

import numpy as np
import pytest

from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.plan.batch_plan import read_plan, write_plan
from lean_finetune.plan.micro_batches import MicroBatchSettings
from lean_finetune.plan.optimizer_steps import RowIndex
from lean_finetune.plan.planner import PlanSettings

PAIR, LABELLED = KINDS["pair"], KINDS["labelled"]
BUCKET = MicroBatchSettings(
    mode="bucketed", max_tokens=128, pad_multiple=4, constant_shape=False, fixed_rows=6, ranks=1
)


def index_of(pairs: int) -> RowIndex:
    lengths = np.random.default_rng(0).integers(4, 40, 2 * pairs).astype(np.int32)
    dropped = np.zeros(2 * pairs, bool)
    dropped[6:8] = True
    return RowIndex(
        lengths=lengths,
        supervised=lengths // 2,
        sources=np.zeros(2 * pairs, np.uint16),
        dropped=dropped,
        weights=(1.0,),
    )


@pytest.mark.parametrize("mode", ["bucketed", "packed", "fixed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pairs_stay_together_and_every_pair_is_used_once(mode, ranks, tmp_path):
    index = index_of(40)
    bucket = replace(BUCKET, mode=mode, ranks=ranks)
    settings = PlanSettings(micro_batches=bucket, seed=1, epochs=2, tokens_per_step=300, weights=(1.0,), kind=PAIR)
    plan = settings.plan(index)
    assert (plan.rows[::2] % 2 == 0).all() and (plan.rows[1::2] == plan.rows[::2] + 1).all()
    used = np.bincount(plan.rows, minlength=80)
    assert (used == np.where(index.dropped, 0, 2)).all()
    for step in list(plan.steps)[:-1]:
        tokens = [int(index.lengths[one.rows].sum()) for one in step]
        last = max(int(index.lengths[one.rows].reshape(-1, 2).sum(1).max(initial=0)) for one in step)
        assert sum(tokens) < 300 + last
        for one in step:
            if len(one.rows) and mode != "fixed":
                assert one.padded_tokens <= 128 and one.supervised == index.supervised[one.rows].sum()
    longest = index.lengths[~index.dropped].max()
    assert index.lengths[plan.micro_batch(0).rows].max() == longest or mode == "packed"
    write_plan(tmp_path / "plan.arrow", [plan])
    again = read_plan(tmp_path / "plan.arrow")
    assert again.kind is PAIR and (again.rows == plan.rows).all()


def test_a_pair_that_does_not_fit_is_refused():
    settings = PlanSettings(
        micro_batches=replace(BUCKET, max_tokens=64),
        seed=1,
        epochs=1,
        tokens_per_step=300,
        weights=(1.0,),
        kind=KINDS["pair"],
    )
    with pytest.raises(UserError, match="^bucket.max_tokens: the longest pair of rows .* got 64; raise"):
        settings.plan(index_of(40))


@pytest.mark.parametrize("mode", ["bucketed", "packed", "fixed"])
def test_labelled_rows_leave_room_for_their_mismatches(mode):
    index = index_of(40)
    bucket = replace(BUCKET, mode=mode)
    settings = PlanSettings(micro_batches=bucket, seed=1, epochs=1, tokens_per_step=200, weights=(1.0,), kind=LABELLED)
    plan = settings.plan(index)
    assert (np.sort(plan.rows) == np.flatnonzero(~index.dropped)[::2]).all()
    for step in list(plan.steps)[:-1]:
        tokens = [int(index.lengths[row]) for one in step for row in one.rows]
        assert sum(tokens) >= 200 > sum(tokens) - max(tokens)
        for one in step:
            assert one.supervised == index.supervised[one.rows].sum() and one.kind is LABELLED
            for rows in (one.rows, one.rows + 1):
                lengths = index.lengths[rows]
                assert (lengths.sum() if one.flat else lengths.max()) <= one.length
