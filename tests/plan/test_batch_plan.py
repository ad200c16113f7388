"""The plan file: read back as written, seen step by step, and refused when it cannot be right."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.core.atomic_files import sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import SCHEMA, MicroBatch, Plan, plan_settings_hash, read_plan, write_plan
from lean_finetune.plan.micro_batches import MicroBatchSettings
from tests.plan.common import all_batches


def batch(**given) -> MicroBatch:
    values: dict[str, Any] = {"epoch": 0, "step": 0, "rows": np.array([0]), "length": 8, "supervised": 1}
    return MicroBatch(**(values | given))


def written(tmp_path, batches, *, ranks=1):
    write_plan(tmp_path / "plan.arrow", [Plan.of(batches, ranks=ranks)])
    return tmp_path / "plan.arrow"


@pytest.mark.parametrize("flat", [False, True])
def test_a_plan_reads_back_as_it_was_written_over_several_parts(tmp_path, flat):
    batches = [
        batch(
            epoch=k // 50,
            step=k // 4,
            rank=k % 2,
            rows=np.arange(k % 3 + 1) + k,
            length=8 + k % 5,
            supervised=k + 1,
            flat=flat,
        )
        for k in range(100)
    ]
    write_plan(tmp_path / "plan.arrow", [Plan.of(batches[k : k + 20], ranks=2) for k in range(0, 100, 20)])
    plan = read_plan(tmp_path / "plan.arrow")
    assert (plan.ranks, plan.flat, len(plan), len(plan.steps)) == (2, flat, 100, 25)
    for before, after in zip(batches, all_batches(plan), strict=True):
        for name in ("epoch", "step", "rank", "length", "supervised", "flat", "padded_tokens"):
            assert getattr(before, name) == getattr(after, name)
        assert before.rows.tolist() == after.rows.tolist()
    assert plan.padded_tokens.tolist() == [one.padded_tokens for one in batches]
    assert plan.supervised_per_step[:2] == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8]


def test_joined_rows_count_once_and_padded_rows_as_often_as_there_are_rows():
    rows = np.arange(3)
    assert batch(rows=rows, length=40).padded_tokens == 120
    assert batch(rows=rows, length=40, flat=True).padded_tokens == 40


def test_steps_are_a_sequence():
    plan = Plan.of([batch(step=k // 2, length=8 + k) for k in range(6)])
    assert [[one.length for one in step] for step in plan.steps] == [[8, 9], [10, 11], [12, 13]]
    assert [one.length for one in plan.steps[-1]] == [12, 13]
    assert [[one.length for one in step] for step in plan.steps[1:]] == [[10, 11], [12, 13]]
    with pytest.raises(IndexError):
        plan.steps[3]


@pytest.mark.parametrize(
    "faulty",
    [
        [{"step": 1}],
        [{"step": 0}, {"step": 2}],
        [{"step": 0}, {"step": 1}, {"step": 0}],
        [{"rows": np.array([], np.int32)}],
        [{"rows": np.array([-1])}],
        [{"length": 0}],
        [{"supervised": 0}],
        [{"rank": 1}],
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(tmp_path, faulty):
    """A training loop that trusted it would divide a loss by the tokens of another step, or read past a file."""
    with pytest.raises(UserError, match=r"record \d cannot be right .*; delete it and run `dvc repro`") as caught:
        read_plan(written(tmp_path, [batch(**given) for given in faulty]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks_of_steps", [[[0]], [[0, 1], [0]], [[0, 1, 0], [1]], [[0, 1], [1, 0]]])
def test_a_plan_that_leaves_a_gpu_without_work_is_refused(tmp_path, ranks_of_steps):
    batches = [batch(step=step, rank=rank) for step, ranks in enumerate(ranks_of_steps) for rank in ranks]
    with pytest.raises(UserError, match="cannot be right"):
        read_plan(written(tmp_path, batches, ranks=2))


def test_an_empty_plan_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no micro-batch"):
        read_plan(written(tmp_path, []))


@pytest.mark.parametrize("metadata", [None, {"layout": "round", "ranks": "1"}, {"layout": "flat", "ranks": "0"}])
def test_a_plan_of_unknown_layout_is_refused(tmp_path, metadata):
    """Rows of a flat plan padded one by one would be other tensors than those the estimate traced."""
    schema = SCHEMA.with_metadata(metadata)
    values = [[0], [0], [0], [[0]], [8], [1]]
    arrays = [pa.array(value, field.type) for value, field in zip(values, schema, strict=True)]
    with pa.OSFile(str(tmp_path / "plan.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    with pytest.raises(UserError, match=r"layout .* of .* ranks is unknown; delete it"):
        read_plan(tmp_path / "plan.arrow")


def test_parts_of_different_layout_are_never_one_plan(tmp_path):
    parts = [Plan.of([batch()]), Plan.of([batch(step=1, flat=True)])]
    with pytest.raises(ValueError, match="must agree"):
        write_plan(tmp_path / "plan.arrow", parts)


def test_a_plan_has_a_hash_of_its_settings_without_the_number_of_gpus(tmp_path):
    """A checkpoint may resume with another number of GPUs, but never with other micro-batches."""

    def cut(ranks: int, **changed: Any) -> str:
        values: dict[str, Any] = {"mode": "bucketed", "max_tokens": 64, "pad_multiple": 8}
        cutting = MicroBatchSettings(**{**values, "constant_shape": False, "fixed_rows": 8, "ranks": ranks, **changed})
        batch = MicroBatch(epoch=0, step=0, rows=np.array([0], np.int32), length=8, supervised=4)
        write_plan(tmp_path / "plan.arrow", [Plan.of([batch], ranks=1)], settings_hash=sha256_json(cutting.deciding))
        return plan_settings_hash(tmp_path / "plan.arrow")

    assert cut(1) == cut(2) == cut(1, fixed_rows=9) == cut(1, constant_shape=True)
    others = [cut(1, max_tokens=128), cut(1, pad_multiple=16), cut(1, mode="packed"), cut(1, mode="fixed")]
    assert len({cut(1), *others}) == 5
