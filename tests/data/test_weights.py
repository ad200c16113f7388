"""Rows with weights from the source to the index: a column that data.columns names."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.islands.attachments import read_attached
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.weights.attachment import WeightAttachment
from tests.data.common import read_tokens
from tests.workspace import error, write_rows

NAMED = {"data__columns": {"weight": "quality"}}
ALL_TRAINED = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"What is {number}?", "completion": f" It is {number}.", **more}


def index_of(split: str) -> list[dict[str, Any]]:
    return read_tokens(Path(f"data/tokens/{split}-index.arrow"))


def test_training_rows_have_their_weights_and_held_out_ones_none(run, tmp_path):
    """Weights of other rows; a held-out loss that changes with weights."""
    weights = [0.5, 1, 2.5, 1e-6, 1e6, "3"] * 4
    source = write_rows(tmp_path / "rows.jsonl", [row(n, quality=one) for n, one in enumerate(weights)])
    assert run(source, **NAMED).exit_code == 0
    rows = TokenRows(Path("data/tokens"), "train")
    [found] = rows.attached
    assert isinstance(found, WeightAttachment)
    numbers = [rows.value("source_row", number) for number in range(len(rows))]
    assert found.weights.tolist() == pytest.approx([float(weights[number]) for number in numbers])
    assert len(index_of("heldout")) > 0 and read_attached(Path("data/tokens/heldout-index.arrow")) == ()


def test_of_equal_rows_the_first_is_kept_with_its_weight(run, tmp_path):
    """A held-out row that is trained under another weight."""
    source = write_rows(tmp_path / "rows.jsonl", [row(1, quality=2), row(1, quality=3), row(2, quality=4)])
    assert run(source, **NAMED, **ALL_TRAINED, data__drop_duplicates=True).exit_code == 0
    assert [(one["weight"], one["dropped"]) for one in index_of("train")] == [(2.0, False), (3.0, True), (4.0, False)]


def test_rows_of_a_source_without_weights_have_weight_1(run, tmp_path):
    with_weights = write_rows(tmp_path / "a.jsonl", [row(1, quality=4)])
    without = write_rows(tmp_path / "b.jsonl", [row(2)])
    sources = [{"source": str(with_weights), "columns": NAMED["data__columns"]}, {"source": str(without)}]
    assert run(sources, **ALL_TRAINED).exit_code == 0
    assert [one["weight"] for one in index_of("train")] == [4.0, 1.0]


def test_rows_without_weights_have_no_column(run, tmp_path):
    """Tokens that change for everybody."""
    source = write_rows(tmp_path / "rows.jsonl", [row(1, weight=1), row(2)])
    assert run(source, **ALL_TRAINED).exit_code == 0
    assert all("weight" not in one for one in index_of("train"))


@pytest.mark.parametrize("weight", [0, -1, 1e7, 1e-7, "high", "nan", True, None, [1], 10**999], ids=str)
def test_an_unusable_weight_is_refused_with_its_line(run, tmp_path, weight):
    """A row that trains backwards, or a sum that is no number."""
    source = write_rows(tmp_path / "rows.jsonl", [row(1, quality=1), row(2, quality=weight)])
    message = error(run(source, **NAMED))
    assert f"{source}:2: 'quality' must be a number from 1e-06 to 1,000,000, which multiplies the loss" in message


def test_a_weight_that_is_no_json_is_refused_with_its_line(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(1, quality=1)) + "\n" + json.dumps(row(2, quality=float("nan"))) + "\n")
    assert f"{path}:2: " in error(run(path, **NAMED))


def test_a_row_without_the_column_is_refused_with_its_line(run, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [row(1, quality=1), row(2)])
    assert f'{source}:2: the row has no column "quality", which data.columns names' in error(run(source, **NAMED))


def test_a_weight_that_nothing_names_is_refused_with_the_remedy(run, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [row(1, sample_weight=0.5)])
    message = error(run(source))
    assert "'sample_weight' is 0.5, and is not read; name it as data.columns={weight: sample_weight} to" in message


PAIR = {"prompt": "Q?", "chosen": " A.", "rejected": " B."}
OTHER_KINDS = {"dpo": PAIR, "kto": {"prompt": "Q?", "completion": " A.", "label": True}}


@pytest.mark.parametrize(("objective", "given"), OTHER_KINDS.items())
def test_answers_that_are_compared_have_no_weights(run, tmp_path, objective, given):
    """Weights that the loss would ignore."""
    source = write_rows(tmp_path / "rows.jsonl", [{**given, "weight": 0.5}] * 2)
    message = error(run(source, train__objective=objective))
    assert "'weight' is 0.5, and is not read; train.objective trains" in message
    assert "whose loss has no weights: remove it" in message
    named = error(run(source, train__objective=objective, data__columns={"weight": "weight"}))
    assert 'have no key "weight"; the keys to give a column for are' in named
