"""Each default of a new project for 100 rows, for 1,000 and for ten million: what it gives, by the plan alone."""

from dataclasses import dataclass

import numpy as np
import pytest

from lean_finetune.config.load import COMMON_PARAMS, load_params
from lean_finetune.config.schema import Params
from lean_finetune.plan.planner import steps_of_epoch
from lean_finetune.plan.step_tokens import step_tokens_of
from lean_finetune.step.run_optimizer import learning_rate
from lean_finetune.train.heldout_loss import heldout_steps
from tests.plan.common import index_of, log_normal_lengths

PARAMS = load_params(COMMON_PARAMS)
FORWARD_SHARE = 1 / 3
"""Computing of a row without its backward pass."""


@dataclass(frozen=True)
class Size:
    """What the defaults give for a number of rows, of which a share is held out."""

    p: Params
    rows: int
    lengths: np.ndarray
    """Of a sample."""

    @property
    def trained(self) -> float:
        return self.rows * (1 - self.p.data.heldout_fraction)

    @property
    def heldout(self) -> float:
        return self.rows * self.p.data.heldout_fraction

    @property
    def mean(self) -> float:
        return float(self.lengths.mean())

    @property
    def tokens(self) -> float:
        return self.p.train.epochs * self.trained * self.mean

    @property
    def step_tokens(self) -> int:
        return step_tokens_of(index_of(self.lengths), self.p.train, share=self.trained / len(self.lengths)).tokens

    @property
    def steps(self) -> int:
        return self.p.train.epochs * steps_of_epoch(self.trained * self.mean, self.mean, self.step_tokens)


@pytest.fixture(params=[100, 1000, 10_000_000], ids="{:,} rows".format)
def size(request: pytest.FixtureRequest) -> Size:
    lengths = np.minimum(log_normal_lengths(min(request.param, 1000)), 1024)
    return Size(PARAMS, request.param, lengths)


def test_there_are_enough_steps_and_not_too_many(size: Size):
    """9 steps for 1,000 rows; ten million with the steps of a hundred."""
    assert size.lengths.max() <= size.step_tokens <= 65_536
    if size.rows == 100:  # As many as there can be with steps of the longest row.
        assert size.step_tokens == size.lengths.max() and size.steps >= 30
    else:
        assert 95 <= size.steps < 200_000


def test_the_learning_rate_warms_up_and_ends_near_zero(size: Size):
    """No warm-up, or one that takes the run."""
    train = size.p.train.model_copy(update={"lr": 1.0})
    rates = [learning_rate(step, size.steps, train) for step in np.linspace(0, size.steps - 1, 20).astype(int).tolist()]
    assert 0 < rates[0] <= 1.0 and max(rates[1:3]) > 0.95 and rates[-1] < 0.05
    warmup = round(train.warmup_fraction * size.steps)
    assert 2 <= warmup <= 0.06 * size.steps


def test_the_heldout_loss_is_seen_often_and_costs_little(size: Size):
    """No figure before the end of 45 steps, so that `keep: best` had one alone; or a tenth of the time."""
    every = heldout_steps(size.p.train, size.steps)
    assert every is not None
    figures = size.steps // every
    assert 10 <= figures and every <= 500
    rows = min(size.p.train.heldout_rows, size.heldout)
    assert FORWARD_SHARE * figures * rows * size.mean <= 0.2 * size.tokens


def test_evaluation_has_rows_and_takes_a_fraction_of_training(size: Size):
    """No row held out of 100; or half a million rows under two models."""
    assert (1 - size.p.data.heldout_fraction) ** size.rows < 0.01, "chance that no row is held out"
    assert size.p.evaluate.loss_rows is not None
    loss_rows = min(size.p.evaluate.loss_rows, size.heldout)
    assert loss_rows >= 5 and 2 * FORWARD_SHARE * loss_rows * size.mean <= 0.02 * size.tokens
    prompts = min(size.p.evaluate.generate_rows, size.heldout)
    assert 5 <= prompts <= 160


def test_checkpoints_are_by_the_clock_and_the_learning_rate_by_the_model(size: Size):
    """By steps, 45 have none and a hundred thousand fill the disk."""
    assert size.p.run.checkpoint_seconds == 60 and size.p.run.keep_checkpoints == 2 and size.p.train.lr == "auto"


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (9, 1), (45, 4), (100, 10), (4999, 499), (10**6, 500)])
def test_auto_is_ten_times_a_run_and_every_500_steps(steps: int, every: int):
    assert heldout_steps(PARAMS.train, steps) == every
    given = PARAMS.train.model_copy(update={"heldout_every_steps": 50})
    none = PARAMS.train.model_copy(update={"heldout_every_steps": None})
    assert heldout_steps(given, steps) == 50 and heldout_steps(none, steps) is None
