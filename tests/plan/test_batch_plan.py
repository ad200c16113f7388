"""The plan file: read back as written, and refused when it cannot be right."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.core.atomic_files import sha256_json
from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import SCHEMA, MicroBatch, Plan, plan_settings_hash, read_plan, write_plan
from tests.plan.common import all_batches, batch_settings_of


def batch(**given) -> MicroBatch:
    values: dict[str, Any] = {"epoch": 0, "step": 0, "rows": np.array([0]), "length": 8, "supervised": 1}
    return MicroBatch(**(values | given))


def written(tmp_path, batches, *, ranks=1):
    write_plan(tmp_path / "plan.arrow", [Plan.of(batches, ranks=ranks)])
    return tmp_path / "plan.arrow"


@pytest.mark.parametrize("flat", [False, True])
def test_a_plan_in_several_parts_reads_back_as_it_was_written(tmp_path, flat):
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
        for name in ("epoch", "step", "rank", "length", "supervised", "flat"):
            assert getattr(before, name) == getattr(after, name)
        assert before.rows.tolist() == after.rows.tolist()
        assert after.padded_tokens == after.length * (1 if flat else len(after.rows))
    assert plan.padded_tokens.tolist() == [one.padded_tokens for one in batches]


@pytest.mark.parametrize(
    ("ranks", "faulty"),
    [
        (1, [{"step": 1}]),
        (1, [{"step": 0}, {"step": 2}]),
        (1, [{"step": 0}, {"step": 1}, {"step": 0}]),
        (1, [{"rows": np.array([], np.int32)}]),
        (1, [{"rows": np.array([-1])}]),
        (1, [{"length": 0}]),
        (1, [{"supervised": 0}]),
        (1, [{"rank": 1}]),
        (2, [{"rank": 0}]),
        (2, [{"rank": 0}, {"rank": 1}, {"step": 1, "rank": 0}]),
        (2, [{"rank": 0}, {"rank": 1}, {"rank": 0}, {"step": 1, "rank": 1}]),
        (2, [{"rank": 0}, {"rank": 1}, {"step": 1, "rank": 1}, {"step": 1, "rank": 0}]),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused(tmp_path, ranks, faulty):
    """Training would divide a loss by the tokens of another step, read past a file, or leave a GPU waiting."""
    with pytest.raises(UserError, match=r"record \d cannot be right .*; delete it and run `dvc repro`"):
        read_plan(written(tmp_path, [batch(**given) for given in faulty], ranks=ranks))


def test_an_empty_plan_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no micro-batch"):
        read_plan(written(tmp_path, []))


@pytest.mark.parametrize("metadata", [None, {"layout": "round", "ranks": "1"}, {"layout": "flat", "ranks": "0"}])
def test_a_plan_of_unknown_layout_is_refused(tmp_path, metadata):
    """Packed rows would be padded one by one: other tensors than those that estimate traced."""
    schema = SCHEMA.with_metadata(metadata)
    arrays = [
        pa.array(value, field.type) for value, field in zip([[0], [0], [0], [[0]], [8], [1]], schema, strict=True)
    ]
    with ArrowWriter(tmp_path / "plan.arrow", schema) as writer:
        writer.write(pa.record_batch(arrays, schema=schema))
    with pytest.raises(UserError, match=r"layout .* of .* ranks is unknown; delete it"):
        read_plan(tmp_path / "plan.arrow")


def test_a_plan_has_a_hash_of_its_settings_without_the_number_of_gpus(tmp_path):
    """A checkpoint may resume with another number of GPUs, but never with other micro-batches."""

    def stored_hash(**changes: Any) -> str:
        settings_hash = sha256_json(batch_settings_of(**changes).deciding)
        write_plan(tmp_path / "plan.arrow", [Plan.of([batch()])], settings_hash=settings_hash)
        return plan_settings_hash(tmp_path / "plan.arrow")

    assert stored_hash() == stored_hash(ranks=2) == stored_hash(fixed_rows=9) == stored_hash(constant_shape=True)
    others: list[dict[str, Any]] = [{"max_tokens": 128}, {"pad_multiple": 16}, {"mode": "packed"}, {"mode": "fixed"}]
    assert len({stored_hash(), *(stored_hash(**changes) for changes in others)}) == 5
