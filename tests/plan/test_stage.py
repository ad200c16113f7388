"""The bucket stage as a user runs it."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from lean_finetune.config.load import load_params
from lean_finetune.core.arrow_files import ArrowWriter
from lean_finetune.core.errors import UserError
from lean_finetune.plan.batch_plan import read_plan
from lean_finetune.plan.optimizer_steps import COLUMNS, read_index
from lean_finetune.plan.step_tokens import planned_step_tokens
from stages.bucket import main
from tests.plan.common import all_batches, log_normal_lengths, rows_by_step, write_index
from tests.workspace import error, invoke, lay_out

INDEX = Path("data/tokens/train-index.arrow")
NAMES = tuple(COLUMNS)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """A directory with params.yaml and an index of 300 rows, as `tokenize` writes it."""
    monkeypatch.chdir(tmp_path)
    lengths = np.minimum(log_normal_lengths(300), 512)
    write_index(tmp_path / INDEX, lengths, lengths // 2)
    return lay_out(tmp_path)


def test_the_stage_writes_the_same_bytes_twice_and_other_rows_for_another_seed(workspace):
    assert invoke(main).exit_code == 0
    plan, metrics = Path("data/batches/plan.arrow"), Path("data/batches/figures.json")
    first = plan.read_bytes(), metrics.read_bytes()
    assert invoke(main).exit_code == 0
    assert (plan.read_bytes(), metrics.read_bytes()) == first
    before = rows_by_step(read_plan(plan))
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("seed: 17", "seed: 18"))
    assert invoke(main).exit_code == 0
    assert rows_by_step(read_plan(plan)) != before


def test_a_plan_of_few_steps_says_what_gives_more(workspace):
    """70,000 tokens in a few steps of 4,096: a run that learns little, without a word."""

    def steps(**changes: int) -> tuple[int, str]:
        lay_out(workspace, **changes)
        done = invoke(main)
        assert done.exit_code == 0
        return json.loads(Path("data/batches/figures.json").read_text())["optimizer_steps"], done.stderr

    few, note = steps(train__epochs=6, train__tokens_per_step=4096)
    assert 40 < few < 60 and note.count("\n") == 1
    found = re.fullmatch(
        rf"note: {few} optimizer steps in all, and most fine-tunings take 100 or more: lower train\.tokens_per_step "
        r"\(now 4096; (\d+) gives about (\d+)\), or raise train\.epochs \(now 6; (\d+) gives about (\d+)\)\n",
        note,
    )
    assert found, note
    tokens, expected, epochs, expected_of_epochs = map(int, found.groups())
    more, note = steps(train__epochs=6, train__tokens_per_step=tokens)
    assert 100 <= more == pytest.approx(expected, rel=0.05) and note == ""
    assert steps(train__epochs=epochs, train__tokens_per_step=4096) == (expected_of_epochs, "")


def test_auto_steps_are_said_and_kept_where_later_stages_read_them(workspace):
    """9 steps for 1,000 rows; and a number that later stages would choose again, for other rows."""
    lay_out(workspace, train__tokens_per_step="auto", train__epochs=3)
    done = invoke(main)
    figures = json.loads(Path("data/batches/figures.json").read_text())
    tokens = figures["tokens_per_step"]
    assert done.stderr.count("\n") == 1 and figures["optimizer_steps"] >= 95 and tokens >= 512
    assert done.stderr.startswith(f"train.tokens_per_step: auto is {tokens}, the most that gives 100 optimizer steps")
    plan, train = Path("data/batches/plan.arrow"), load_params().train
    assert planned_step_tokens(plan, train) == tokens and figures["tokens_per_step_auto"] in done.stderr
    rows = rows_by_step(read_plan(plan))
    lay_out(workspace, train__tokens_per_step=tokens, train__epochs=3)
    assert invoke(main).stderr == "" and rows_by_step(read_plan(plan)) == rows
    refusal = "plan.arrow: was not planned with train.tokens_per_step: auto; run `dvc repro bucket`"
    with pytest.raises(UserError, match=refusal):
        planned_step_tokens(plan, train)


def test_rows_too_few_for_a_hundred_steps_get_no_advice_against_auto(workspace):
    lay_out(workspace, train__tokens_per_step="auto", train__epochs=3)
    write_index(workspace / INDEX, np.array([50] * 40 + [400]), np.full(41, 20))
    line, note = invoke(main).stderr.splitlines()
    assert line == "train.tokens_per_step: auto is 400, the tokens of the longest row: about 18 steps in all"
    assert note == "note: 18 optimizer steps in all, and most fine-tunings take 100 or more: add rows"


def test_a_hundred_epochs_of_the_same_rows_are_no_remedy(workspace):
    assert "raise train.epochs" not in (lay_out(workspace, train__tokens_per_step=65536), invoke(main))[1].stderr
    lay_out(workspace)
    write_index(workspace / INDEX, np.full(4, 100), np.full(4, 50))
    few = "2 optimizer steps in all, and most fine-tunings take 100 or more: add rows"
    assert invoke(main).stderr == f"note: {few}\n"


@pytest.mark.parametrize("mode", ["bucketed", "packed", "fixed"])
def test_the_figures_are_those_of_the_plan(workspace, mode):
    lay_out(workspace, bucket__mode=mode, hardware__num_gpus=2, train__sharding="ddp", train__tokens_per_step=8192)
    assert invoke(main).exit_code == 0
    metrics = json.loads(Path("data/batches/figures.json").read_text())
    plan = read_plan(Path("data/batches/plan.arrow"))
    batches = all_batches(plan)
    assert (metrics["mode"], plan.flat, plan.ranks) == (mode, mode == "packed", 2)
    assert metrics["optimizer_steps"] == len(plan.steps)
    assert metrics["micro_batches"] == len(batches)
    assert metrics["max_batch_tokens"] == max(batch.padded_tokens for batch in batches)
    assert metrics["max_batch_rows"] == max(len(batch.rows) for batch in batches)
    assert metrics["max_batch_length"] == max(batch.length for batch in batches)
    pairs = [(one.padded_tokens, other.padded_tokens) for one, other in zip(batches[::2], batches[1::2], strict=True)]
    waiting = 1 - sum(map(sum, pairs)) / (2 * sum(map(max, pairs)))
    assert metrics["straggler_percent"] == pytest.approx(100 * waiting, abs=1e-3)
    assert 0.5 < metrics["randomness"] < 1.5


def test_duplicates_and_weights_reach_the_plan(workspace):
    write_index(INDEX, [20] * 60, [5] * 60, sources=[0, 1] * 30, dropped=[True] + [False] * 59)
    sources = [{"source": "a.jsonl"}, {"source": "b.jsonl", "weight": 2}]
    lay_out(workspace, data__source=sources, train__epochs=1)
    assert invoke(main).exit_code == 0
    counts = np.bincount(read_plan(Path("data/batches/plan.arrow")).rows, minlength=60)
    assert counts.tolist() == [0, 2] + [1, 2] * 29


@pytest.mark.parametrize(
    ("lengths", "supervised", "others", "message"),
    [
        ([], [], {}, "has no training row"),
        ([40], [3], {"dropped": [True]}, "has no training row"),
        ([40, 50], [3, 3], {"sources": [0, 1]}, "row 1: its source is number 1 but data.source has 1; run `dvc repro`"),
        ([40, 2000], [3, 3], {}, "bucket.max_tokens: the longest row (train row 1: 2000 tokens, padded 2000)"),
        ([40, 50], [3, 0], {}, "row 1: needs 1 or more supervised tokens"),
        ([40, 50], [3, 50], {}, "fewer than its tokens, got 50 of 50"),
        ([40, 50], [3, None], {}, "column supervised must not hold nulls"),
        ([40, 50], [3, 3], {"names": ("tokens", *NAMES[1:])}, "column length must be int32, got None"),
    ],
)
def test_a_wrong_index_ends_in_one_line_and_writes_nothing(workspace, lengths, supervised, others, message):
    write_index(INDEX, lengths, supervised, **others)
    assert_refused(message)


@pytest.mark.parametrize("keep_bytes", [0, 100, -1])
def test_a_truncated_index_ends_in_one_line_and_writes_nothing(workspace, keep_bytes):
    INDEX.write_bytes(INDEX.read_bytes()[:keep_bytes])
    assert_refused(f"{INDEX}: not a complete Arrow file")


def test_a_missing_index_ends_in_one_line_and_keeps_the_last_plan(workspace):
    invoke(main)
    before = Path("data/batches/plan.arrow").read_bytes()
    INDEX.unlink()
    assert f"{INDEX}: file is missing" in error(invoke(main))
    assert Path("data/batches/plan.arrow").read_bytes() == before


def assert_refused(message: str) -> None:
    assert message in error(invoke(main))
    assert not list(Path("data").glob("*batches*")) and not Path("metrics").exists()


def test_all_record_batches_of_an_index_are_read(tmp_path):
    schema = pa.schema([(name, types[0]) for name, types in COLUMNS.items()])
    with ArrowWriter(tmp_path / "index.arrow", schema) as writer:
        for block in ([5, 6], [7]):
            values = [block, [1] * len(block), [0] * len(block), [False] * len(block)]
            arrays = [pa.array(value, field.type) for value, field in zip(values, schema, strict=True)]
            writer.write(pa.record_batch(arrays, schema=schema))
    index = read_index(tmp_path / "index.arrow", (1.0,))
    assert index.lengths.tolist() == [5, 6, 7]
    with pytest.raises(UserError, match="file is missing"):
        read_index(tmp_path / "other.arrow", (1.0,))
