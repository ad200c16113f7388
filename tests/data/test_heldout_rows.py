"""Held-out rows: a share, none, or those of data.heldout_source."""

from pathlib import Path

import pyarrow as pa
import pytest

from lean_finetune.core.atomic_files import read_json
from lean_finetune.pinning.locate import describe_data
from lean_finetune.step.token_rows import TokenRows
from tests.data.common import chat_row, meta
from tests.workspace import error, write_rows

OUT = Path("data/tokens")
ROWS = [chat_row(f"What is {n}?", f"{n}.") for n in range(30)]
ONE_PROMPT = [chat_row("Write a poem.", f"Poem {n}.") for n in range(30)]
NO_SHARE = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}


@pytest.fixture
def run_rows(run):
    """A function that writes rows, pins and tokenizes them."""

    def write_and_run(rows, **values):
        return run(write_rows(Path("rows.jsonl"), rows), **{"data__heldout_fraction": 0.05} | values)

    return write_and_run


def test_all_rows_of_the_heldout_source_and_no_others_are_held_out(run_rows):
    write_rows(Path("test.jsonl"), [{"question": f"Is {n}?", "answer": "Yes."} for n in range(7)])
    heldout = [{"source": "test.jsonl", "columns": {"prompt": "question", "completion": "answer"}, "rows": 5}]
    result = run_rows(ROWS, data__heldout_fraction=0, data__heldout_source=heldout, data__max_rows=20)
    assert result.exit_code == 0, result.stderr
    assert len(TokenRows(OUT, "train")) == 20
    found = pa.ipc.open_file(pa.memory_map(str(OUT / "heldout/00000.arrow"))).read_all()
    assert found["source_file"].to_pylist() == [1] * 5 and found["source_row"].to_pylist() == list(range(5))
    assert [source["heldout_rows"] for source in meta(OUT)["sources"]] == [0, 5]
    assert describe_data(read_json(Path("locks/data.json"))) == "rows.jsonl, test.jsonl (held out)"


def test_without_held_out_rows_all_are_trained(run_rows):
    result = run_rows(ROWS, **NO_SHARE)
    assert result.exit_code == 0, result.stderr
    assert len(TokenRows(OUT, "train")) == 30 and len(TokenRows(OUT, "heldout")) == 0
    assert read_json(Path("data/tokens/figures.json"))["heldout_rows"] == 0


def test_one_prompt_in_all_rows_names_two_remedies(run_rows):
    """Its rows are held out together, so any share holds out all or none of them."""
    refusal = error(run_rows(ONE_PROMPT))
    assert refusal.startswith("data.heldout_fraction: leaves no row to ")
    assert "rows with the same prompt are held out together" in refusal
    assert "data.heldout_source" in refusal and "set it to 0" in refusal
    assert run_rows(ONE_PROMPT, **NO_SHARE).exit_code == 0
    write_rows(Path("test.jsonl"), ROWS[:3])
    assert run_rows(ONE_PROMPT, data__heldout_fraction=0, data__heldout_source="test.jsonl").exit_code == 0


def test_trained_rows_are_not_held_out_under_another_name(run_rows):
    """An evaluation on trained rows measures memory, not learning."""
    write_rows(Path("elsewhere/same.jsonl"), ROWS)
    refusal = error(run_rows(ROWS, data__heldout_fraction=0, data__heldout_source="elsewhere"))
    assert refusal.startswith("data.heldout_source: same.jsonl has the content of a data.source file (rows.jsonl)")


def test_a_heldout_source_without_a_usable_row_is_refused(run_rows):
    write_rows(Path("test.jsonl"), [chat_row("word " * 600)])
    refusal = error(run_rows(ROWS, data__heldout_fraction=0, data__heldout_source="test.jsonl"))
    assert refusal.startswith("data.heldout_source: leaves no row to evaluate on, 1 without an answer")
