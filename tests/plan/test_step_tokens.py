"""train.tokens_per_step: auto: a hundred steps where the rows allow it, for few rows and for many."""

import numpy as np
import pytest

from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.plan.optimizer_steps import RowIndex, run_steps
from lean_finetune.plan.step_tokens import MOST_STEP_TOKENS, StepTokens, step_tokens_of, with_step_tokens
from tests.plan.common import index_of, log_normal_lengths

PARAMS = with_flags(load_params(COMMON_PARAMS), ["train.tokens_per_step=auto"])


def step_of(index: RowIndex | None, *flags: str, share: float = 1.0) -> StepTokens:
    return step_tokens_of(index, with_flags(PARAMS, list(flags)).train, share=share)


def steps_with(index: RowIndex, tokens: int, epochs: int = 3) -> int:
    """Optimizer steps that the rows really have."""
    return sum(len(part) for part in run_steps(index, seed=17, epochs=epochs, tokens_per_step=tokens))


@pytest.mark.parametrize("rows", [100, 1000, 10_000, 100_000])
def test_rows_give_a_hundred_steps_or_more(rows: int):
    """9 steps for 1,000 rows, in which nothing is learnt; or a step of one row for 100,000."""
    lengths = np.minimum(log_normal_lengths(rows), 2048)
    index = index_of(lengths)
    step = step_of(index)
    steps = steps_with(index, step.tokens)
    assert lengths.max() <= step.tokens <= MOST_STEP_TOKENS
    if step.tokens > lengths.max():
        assert steps >= 95
        # Half as much again would leave less.
        assert step.tokens == MOST_STEP_TOKENS or steps_with(index, 2 * step.tokens) < 100
    expected = int(step.reason.rpartition("about ")[2].partition(" ")[0].replace(",", ""))
    assert steps == pytest.approx(expected, rel=0.1)


def test_ten_million_rows_have_the_largest_step():
    step = step_of(index_of(log_normal_lengths(1000)), share=10_000)
    assert step.tokens == MOST_STEP_TOKENS and step.reason.startswith("the most that it takes: about ")


def test_few_rows_have_steps_of_the_longest_row():
    """Else a step is one row, and the longest one weighs more than all others together."""
    step = step_of(index_of([100] * 20 + [900]))
    assert (step.tokens, step.reason) == (900, "the tokens of the longest row: about 9 steps in all")
    longest = step_of(index_of([100_000, 10, 20]))
    assert longest.tokens == 100_000


def test_dropped_rows_weights_and_epochs_count_as_they_are_trained():
    lengths = np.full(4000, 100)
    alone = step_of(index_of(lengths))
    dropped = np.arange(4000) >= 2000
    assert step_of(index_of(lengths, dropped=dropped)).tokens == step_of(index_of(lengths[:2000])).tokens < alone.tokens
    halves = {"sources": np.arange(4000) % 2, "weights": (0.5, 0.5)}
    assert step_of(index_of(lengths, **halves)).tokens == step_of(index_of(lengths[:2000])).tokens
    assert step_of(index_of(lengths), "train.epochs=6").tokens > alone.tokens


def test_it_depends_on_rows_alone():
    """Another number of GPUs, or other micro-batches, would train another model."""
    index = index_of(log_normal_lengths(1000))
    others = [
        "hardware.num_gpus=4 train.sharding=zero3",
        "bucket.mode=packed bucket.max_tokens=32768",
        "bucket.mode=fixed bucket.fixed_rows=2",
        "hardware.num_gpus=2 train.context_parallel=2 train.sharding=zero3",
    ]
    assert {step_of(index, *flags.split()) for flags in others} == {step_of(index)}


@pytest.mark.parametrize("kind", [KINDS["pair"], KINDS["labelled"]])
def test_a_pair_counts_with_both_of_its_rows(kind: RowKind):
    flags = {KINDS["pair"]: "train.objective=dpo", KINDS["labelled"]: "train.objective=kto"}
    index = index_of([100, 300] * 4000)
    unit = 400 if kind is KINDS["pair"] else 100
    assert step_of(index, flags[kind]).tokens == step_of(index_of([unit] * 4000)).tokens


def test_a_number_is_kept_and_no_rows_mean_the_largest_step():
    assert step_of(index_of([10, 20]), "train.tokens_per_step=7") == StepTokens(
        tokens=7, reason="as set", is_auto=False
    )
    none = step_of(None)
    assert none.text == "train.tokens_per_step: auto is 65536, the most that it takes, as no rows are known"
    assert with_step_tokens(PARAMS, none).train.step_tokens == 65536
