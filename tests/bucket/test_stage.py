"""The bucket stage as a user runs it, and the form of its plan file."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from stages.bucket.__main__ import main
from stages.bucket.plan import RECORDS_PER_BLOCK, MicroBatch, read_plan, write_plan
from stages.bucket.steps import read_index
from stages.errors import UserError
from tests.bucket.common import all_batches, log_normal_lengths, rows_by_step

REPO = Path(__file__).resolve().parents[2]


def write_index(path: Path, lengths, supervised, names=("length", "supervised")) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = pa.record_batch([pa.array(lengths, pa.int32()), pa.array(supervised, pa.int32())], names=list(names))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """A directory with params.yaml and an index of 300 rows, as `tokenize` leaves it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    text = (REPO / "params.yaml").read_text().replace("progress: true", "progress: false")
    (tmp_path / "params.yaml").write_text(text)
    lengths = np.minimum(log_normal_lengths(300), 512)
    write_index(tmp_path / "data/tokens/index.arrow", lengths, lengths // 2)
    return tmp_path


def run_stage(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_the_stage_writes_the_same_bytes_twice_and_other_rows_for_another_seed(workspace):
    assert run_stage().exit_code == 0
    plan, metrics = Path("data/batches/plan.arrow"), Path("metrics/bucket.json")
    first = plan.read_bytes(), metrics.read_bytes()
    assert run_stage().exit_code == 0
    assert (plan.read_bytes(), metrics.read_bytes()) == first
    before = rows_by_step(read_plan(plan))
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("seed: 17", "seed: 18"))
    assert run_stage().exit_code == 0
    assert rows_by_step(read_plan(plan)) != before


def test_the_stage_reports_what_its_plan_holds(workspace):
    assert run_stage().exit_code == 0
    plan = read_plan(Path("data/batches/plan.arrow"))
    metrics = json.loads(Path("metrics/bucket.json").read_text())
    batches = all_batches(plan)
    assert metrics["optimizer_steps"] == len(plan.steps)
    assert metrics["max_batch_tokens"] == batches[0].padded_tokens == max(batch.padded_tokens for batch in batches)
    assert metrics["max_batch_rows"] == max(len(batch.rows) for batch in batches)
    assert metrics["max_batch_length"] == batches[0].length


@pytest.mark.parametrize(
    ("lengths", "supervised", "names", "told"),
    [
        ([], [], ("length", "supervised"), "holds no training row"),
        ([40, 2000], [3, 3], ("length", "supervised"), "bucket.max_tokens: the longest row (train row 1: 2000 tokens"),
        ([40, 50], [3, 0], ("length", "supervised"), "row 1: needs 1 or more supervised tokens"),
        ([40, 50], [3, 50], ("length", "supervised"), "fewer than its tokens, got 50 of 50"),
        ([40, 50], [3, None], ("length", "supervised"), "column supervised must not hold nulls"),
        ([40, 50], [3, 3], ("tokens", "supervised"), "column length must be int32, got None"),
    ],
)
def test_a_wrong_index_ends_in_one_line_and_writes_nothing(workspace, lengths, supervised, names, told):
    write_index(Path("data/tokens/index.arrow"), lengths, supervised, names)
    assert_refused(told)


@pytest.mark.parametrize("keep_bytes", [0, 5, 100, -1])
def test_an_index_cut_short_ends_in_one_line_and_writes_nothing(workspace, keep_bytes):
    path = Path("data/tokens/index.arrow")
    path.write_bytes(path.read_bytes()[:keep_bytes])
    assert_refused("data/tokens/index.arrow: not a whole Arrow file")


def test_a_missing_index_ends_in_one_line_and_keeps_the_last_plan(workspace):
    run_stage()
    before = Path("data/batches/plan.arrow").read_bytes()
    Path("data/tokens/index.arrow").unlink()
    result = run_stage()
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "data/tokens/index.arrow: file is missing" in result.stderr
    assert Path("data/batches/plan.arrow").read_bytes() == before


def assert_refused(told: str) -> None:
    result = run_stage()
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert told in result.stderr
    assert not list(Path("data").glob("*batches*")) and not Path("metrics").exists()


@pytest.mark.parametrize("steps", [[1], [0, 2], [0, 1, 0]])
def test_a_plan_whose_steps_do_not_follow_is_refused(tmp_path, steps):
    """A training loop that trusted them would divide a loss by the tokens of another step."""
    rows = np.zeros(1, np.int32)
    write_plan(tmp_path / "plan.arrow", [MicroBatch(epoch=0, step=s, rows=rows, length=8, supervised=1) for s in steps])
    with pytest.raises(UserError, match="cannot be right"):
        read_plan(tmp_path / "plan.arrow")


def test_an_empty_plan_is_refused(tmp_path):
    write_plan(tmp_path / "plan.arrow", [])
    with pytest.raises(UserError, match="holds no micro-batch"):
        read_plan(tmp_path / "plan.arrow")


def test_an_index_in_several_blocks_is_read_whole(tmp_path):
    schema = pa.schema([("length", pa.int32()), ("supervised", pa.int32())])
    with pa.OSFile(str(tmp_path / "index.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for block in ([5, 6], [7]):
            writer.write_batch(
                pa.record_batch([pa.array(block, pa.int32()), pa.array([1] * len(block), pa.int32())], schema=schema)
            )
    assert read_index(tmp_path / "index.arrow").lengths.tolist() == [5, 6, 7]


def test_a_plan_reads_back_as_it_was_written_over_several_blocks(tmp_path):
    written = [
        MicroBatch(epoch=0, step=k // 2, rows=np.arange(k % 3 + 1, dtype=np.int32), length=8 + k % 5, supervised=k + 1)
        for k in range(2 * RECORDS_PER_BLOCK + 10)
    ]
    write_plan(tmp_path / "plan.arrow", written)
    plan = read_plan(tmp_path / "plan.arrow")
    for before, after in zip(written, all_batches(plan), strict=True):
        assert (before.step, before.length, before.supervised) == (after.step, after.length, after.supervised)
        assert before.rows.tolist() == after.rows.tolist()
    assert plan.supervised_per_step[:2] == [1 + 2, 3 + 4]
