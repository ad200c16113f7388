"""Preference pairs from rows to the reference: two rows of tokens that stay together, and what is computed of them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import Command

from lean_finetune.evaluate import reference_run
from lean_finetune.step.token_rows import TokenRows
from stages.bucket import main as bucket
from stages.estimate import main as estimate
from stages.evaluate import main as evaluate
from stages.reference import main as reference
from stages.train import main as train
from tests.workspace import error, invoke, lay_out, write_verdict

PAIRS = {"train__objective": "dpo"}
NO_HELDOUT = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}


def pair(question: str, chosen: str = "Yes, that is so.", rejected: str = "No.") -> dict[str, str]:
    return {"instruction": question, "chosen": chosen, "rejected": rejected}


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_are_two_rows_that_are_kept_or_left_out_together(run, tmp_path):
    """Figures that count rows of tokens where rows of the data are meant; half a pair that is trained."""
    good = [pair(f"Is {number} a number?") for number in range(12)]
    cut = pair("How?", "alike " * 400 + "end", "alike " * 400 + "stop")
    rows = [*good, good[3], pair("Empty?", rejected=" "), pair("Same?", rejected="Yes, that is so."), cut]
    source = written(tmp_path / "rows.jsonl", rows)
    result = run(source, data__on_bad_row="skip", data__max_length=128, data__drop_duplicates=True, **PAIRS)
    assert result.exit_code == 0, result.output
    figures = json.loads(Path("data/tokens/figures.json").read_text())
    assert figures["train_rows"] + figures["heldout_rows"] == 12 and figures["rows"] == 16
    names = ("duplicate_rows", "empty_answer_rows", "bad_rows", "no_answer_rows", "dropped_rows")
    assert [figures[name] for name in names] == [1, 1, 1, 1, 4]
    for split in ("train", "heldout"):
        tokens = TokenRows(Path("data/tokens"), split)
        used = tokens.used
        assert (used[::2] % 2 == 0).all() and (used[1::2] == used[::2] + 1).all()
        for chosen, rejected in used.reshape(-1, 2).tolist():
            prompt = int(tokens.spans(chosen)[0, 0])
            assert np.array_equal(tokens.ids(chosen)[:prompt], tokens.ids(rejected)[:prompt])
            assert tokens.spans(rejected)[0, 0] == prompt and tokens.supervised[chosen] > tokens.supervised[rejected]


def test_last_answers_after_different_turns_are_refused_with_their_line(run, tmp_path):
    question, more = ({"role": "user", "content": text} for text in ("Is 1 a number?", "Sure?"))

    def answers(*texts: str) -> list[dict[str, str]]:
        turns = [{"role": "assistant", "content": text} for text in texts]
        return [turn for one in turns for turn in (one, more)][:-1]

    def row(*rejected: str) -> dict[str, Any]:
        return {"prompt": [question], "chosen": answers("Yes.", "Very."), "rejected": answers(*rejected)}

    same, other = row("Yes.", "No."), row("No.", "No.")
    source = written(tmp_path / "rows.jsonl", [same, same, other])
    message = error(run(source, data__train_on="last_assistant", **PAIRS, **NO_HELDOUT))
    assert message.startswith(f"{source}:3: data.train_on=last_assistant compares the last answers")
    for train_on, rows, spans in (("last_assistant", [same, same], 1), ("assistant", [same, other], 2)):
        assert run(written(source, rows), data__train_on=train_on, **PAIRS, **NO_HELDOUT).exit_code == 0
        tokens = TokenRows(Path("data/tokens"), "train")
        assert [len(tokens.spans(number)) for number in range(4)] == [spans] * 4


def test_answers_that_are_equal_as_tokens_are_a_fault_of_their_row(run, tmp_path):
    """A lone surrogate becomes U+FFFD; the message said that data.max_length cut the difference off."""
    rows = [pair("Why?"), pair("How?", "Yes \ud800.", "Yes \udc80."), pair("Long?", "a" * 999, "a" * 999 + "b")]
    source = written(tmp_path / "rows.jsonl", rows)
    assert error(run(source, data__max_length=64, **PAIRS, **NO_HELDOUT)) == (
        f"{source}:2: both answers of the pair are the same as tokens, so there is no preference; remove the row"
    )


def test_a_side_without_pairs_counts_pairs(run, tmp_path):
    message = run(written(tmp_path / "rows.jsonl", [pair("Why?")]), **PAIRS).output
    assert "leaves no row to evaluate on (1 usable row; rows" in message or "to train on (1 usable row; rows" in message


def test_rows_of_the_other_kind_are_refused_with_the_objective_to_set(run, tmp_path):
    source = written(tmp_path / "rows.jsonl", [pair("Why?"), pair("How?")])
    assert "set train.objective=dpo" in run(source).output
    for row, message in (
        ({"prompt": "a", "completion": "b"}, "a row of one answer"),
        ({"q": "a", "a": "b"}, "data.format auto knows no format"),
    ):
        assert f"rows.jsonl:1: {message}" in run(written(tmp_path / "rows.jsonl", [row]), **PAIRS).output
    wrong = run(source, data__format="alpaca", **PAIRS)
    assert "data.format: train.objective trains preference pairs; got alpaca; use alpaca_preference" in wrong.output


def test_rows_of_another_objective_are_refused_by_each_stage_that_reads_them(run, tmp_path):
    """`dvc repro -s bucket` after a change of train.objective planned both answers of a pair as examples, silently."""
    source = written(tmp_path / "rows.jsonl", [pair(f"Is {number} a number?") for number in range(20)])
    rows = [{"prompt": f"{number}?", "completion": "Yes."} for number in range(20)]
    pairs, answers = "preference pairs", "rows of one answer"
    labelled = f"{answers} with a label"
    assert run(source, **PAIRS).exit_code == 0

    def refused(stage: Command, objective: str, found: str, wanted: str, split: str = "train") -> None:
        lay_out(tmp_path, train__objective=objective)
        assert error(invoke(stage)) == (
            f"data/tokens/{split}-index.arrow: its rows are {found}, and train.objective trains {wanted}; run `dvc "
            "repro tokenize`"
        )

    refused(bucket, "sft", pairs, answers)
    refused(reference, "kto", pairs, labelled)
    assert not Path("data/batches").exists() and not Path("data/reference").exists()
    lay_out(tmp_path, **PAIRS)
    assert invoke(bucket).exit_code == 0 and invoke(reference).exit_code == 0
    write_verdict(tmp_path)
    refused(train, "sft", pairs, answers)
    refused(evaluate, "kto", pairs, labelled, "heldout")
    lay_out(tmp_path)
    assert error(invoke(estimate)).startswith(f"data/batches/plan.arrow: its rows are {pairs}, and train.objective")
    assert run(written(tmp_path / "rows.jsonl", rows)).exit_code == 0
    refused(bucket, "dpo", answers, pairs)


def other_value(table: Path) -> None:
    """Change a log-probability that is computed."""
    values = np.frombuffer(table.read_bytes(), np.uint8).copy()
    whole = values[: len(values) // 4 * 4].view(np.float32)
    place = int(np.flatnonzero((whole < -1) & (whole > -1e4))[0])
    whole[place] -= 1
    table.write_bytes(values.tobytes())


def a_pipe(table: Path) -> None:
    table.unlink()
    os.mkfifo(table)


def a_directory(table: Path) -> None:
    table.unlink()
    (table / "in it").mkdir(parents=True)


def to_99_bytes(table: Path) -> None:
    os.truncate(table, 99)


SLOW = [pytest.param(damage, marks=pytest.mark.slow) for damage in (a_pipe, a_directory, to_99_bytes)]


@pytest.mark.parametrize("damage", [None, other_value, *SLOW])
def test_an_interrupted_reference_continues_to_the_same_bytes(run, tmp_path, monkeypatch, capsys, damage):
    """Unfinished work with another value was used, a truncated one was a traceback, and a pipe hung."""
    rows = [pair(f"Is {number} a number, or {'a word ' * (number % 5)}?") for number in range(20)]
    assert run(written(tmp_path / "rows.jsonl", rows), **PAIRS, train__method="lora").exit_code == 0
    assert invoke(reference).exit_code == 0
    tables = {path.name: path.read_bytes() for path in Path("data/reference").iterdir()}
    computed: list[list[int]] = []
    whole = reference_run.row_logps

    def stopping(model, weights, rows, numbers, pad_id, device):
        computed.append(numbers)
        if len(computed) == 3:
            raise KeyboardInterrupt
        return whole(model, weights, rows, numbers, pad_id, device)

    monkeypatch.setattr(reference_run, "row_logps", stopping)
    paths = {"tokens": "data/tokens", "model_lock": "locks/model.json", "precision": "unread", "out": "again"}
    again = {name: Path(path) for name, path in paths.items()}
    with pytest.raises(KeyboardInterrupt):
        reference_run.run_stage(**again)
    assert not Path("again").exists()
    [table] = Path("scratch/reference").glob("*/train.arrow")
    if damage is not None:
        damage(table)
        reference_run.run_stage(**again)
        assert {path.name: path.read_bytes() for path in Path("again").iterdir()} == tables
        assert f"note: unfinished work is not used: {table}: " in capsys.readouterr().err
        assert not list(Path("scratch/reference").iterdir())
        return
    reference_run.run_stage(**again)
    assert {path.name: path.read_bytes() for path in Path("again").iterdir()} == tables
    assert computed[2] == computed[3] and len({tuple(numbers) for numbers in computed}) == len(computed) - 1
    assert not list(Path("scratch/reference").iterdir())


def test_the_reference_has_the_precision_that_stage_estimate_chose(run, tmp_path):
    """For a planned GPU of another generation, it was computed in the precision of this machine."""
    source = written(tmp_path / "rows.jsonl", [pair(f"Is {number} a number?") for number in range(8)])
    planned = {"hardware__gpu": "A100-80GB", "run__device": "cpu", "train__method": "lora", **PAIRS, **NO_HELDOUT}
    assert run(source, **planned).exit_code == 0
    write_verdict(tmp_path, precision="bf16")
    tables = {}
    for precision in ("auto", "bf16", "fp32"):
        lay_out(tmp_path, data__source=str(source), train__precision=precision, **planned)
        assert invoke(reference).exit_code == 0
        tables[precision] = Path("data/reference/train.arrow").read_bytes()
    assert tables["auto"] == tables["bf16"] != tables["fp32"]


def test_supervised_fine_tuning_has_an_empty_reference(run, tmp_path):
    rows = [{"prompt": f"{number}?", "completion": "Yes."} for number in range(8)]
    assert run(written(tmp_path / "rows.jsonl", rows)).exit_code == 0
    assert invoke(reference).exit_code == 0 and len(list(Path("data/reference").iterdir())) == 2
