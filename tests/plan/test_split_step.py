"""Splitting a step after an out-of-memory error: its rows stay, its micro-batches shrink."""

import numpy as np
import pytest

from lean_finetune.plan.batch_plan import MicroBatch
from lean_finetune.step.batch_stream import split_micro_batches

LENGTHS = np.array([90, 80, 70, 60, 31, 20, 10, 5], np.int32)
SUPERVISED = np.arange(11, 19, dtype=np.int32)


def micro_batch(rows: list[int], *, flat: bool, length: int | None = None) -> MicroBatch:
    planned = LENGTHS[rows]
    return MicroBatch(
        epoch=1,
        step=7,
        rows=np.array(rows, np.int32),
        length=length or int(planned.sum() + 4 if flat else planned.max() + 6),
        supervised=int(SUPERVISED[rows].sum()),
        flat=flat,
    )


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 95, 100, 190, 280])
def test_the_same_rows_in_the_same_order_within_the_size(flat: bool, max_tokens: int):
    """A step that drops, repeats or reorders rows trains something else; one that is not smaller fails again."""
    step = [micro_batch([0, 1, 2, 3], flat=flat), micro_batch([4, 5, 6], flat=flat), micro_batch([7], flat=flat)]
    found = split_micro_batches(step, max_tokens, LENGTHS, SUPERVISED)
    assert np.concatenate([one.rows for one in found]).tolist() == list(range(8))
    for one in found:
        assert one.padded_tokens <= max_tokens or len(one.rows) == 1
        assert one.supervised == SUPERVISED[one.rows].sum() and (one.step, one.epoch, one.flat) == (7, 1, flat)
        assert one.length >= (LENGTHS[one.rows].sum() if flat else LENGTHS[one.rows].max())


def test_what_is_small_enough_is_left_alone():
    """Splitting micro-batches that fit: slower for nothing, and other roundings."""
    step = [micro_batch([0, 1, 2], flat=False), micro_batch([4, 5], flat=False)]
    found = split_micro_batches(step, 200, LENGTHS, SUPERVISED)
    assert [one.rows.tolist() for one in found] == [[0, 1], [2], [4, 5]]
    assert found[-1] is step[-1]


def test_joined_rows_are_split_by_tokens_and_lose_their_padding():
    """Halves by rows: 90 tokens in one and 30 in the other would fail again."""
    (first, second) = split_micro_batches([micro_batch([0, 4, 5, 6], flat=True, length=200)], 100, LENGTHS, SUPERVISED)
    assert (first.rows.tolist(), first.length) == ([0], 90)
    assert (second.rows.tolist(), second.length) == ([4, 5, 6], 61)
