"""Labelled rows from the source to the reference: each is followed by its mismatch."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lean_finetune.config.load import load_params
from lean_finetune.core.atomic_files import read_json
from lean_finetune.evaluate.evaluate_run import _choose_rows
from lean_finetune.plan.batch_plan import read_plan
from lean_finetune.preferences.label_figures import HeldoutLabels
from lean_finetune.preferences.labels import COLUMN, other_rows
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.reference_table import identity, read_table
from lean_finetune.step.token_rows import TokenRows
from stages.bucket import main as bucket
from stages.reference import main as reference
from tests.workspace import error, invoke, write_rows

KTO = {"train__objective": "kto"}
NO_HELDOUT = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}


def row(question: str, answer: str, label: object = True) -> dict[str, object]:
    return {"prompt": question, "completion": answer, "label": label}


def rows(count: int) -> list[dict[str, object]]:
    return [row(f"Is {n} even?", f" Answer {n}{' and more' * (n % 4)}.", n % 3 == 0) for n in range(count)]


def test_a_row_is_followed_by_its_prompt_with_the_answer_to_another(run, tmp_path, tiny_dir):
    good = rows(24)
    left_out = [good[3], row("Empty?", " "), row("Label?", "No.", "maybe")]
    source = write_rows(tmp_path / "rows.jsonl", [*good, {**good[4], "label": True}, *left_out])
    assert good[4]["label"] is False
    settings = {"data__on_bad_row": "skip", "data__max_length": 64, "data__drop_duplicates": True}
    result = run(source, **settings, **KTO)
    assert result.exit_code == 0, result.output
    figures = json.loads(Path("data/tokens/figures.json").read_text())
    # The same answer with another label is no duplicate.
    assert figures["train_rows"] + figures["heldout_rows"] == 25
    assert [figures[f"{name}_rows"] for name in ("duplicate", "empty_answer", "bad")] == [1, 1, 1]
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    labels = {(one["prompt"], one["completion"]): one["label"] for one in good}
    seen = []
    for split in ("train", "heldout"):
        tokens = TokenRows(Path("data/tokens"), split)
        used = tokens.used.reshape(-1, 2)
        found = tokens.column(COLUMN)
        assert found is not None and (used[:, 0] % 2 == 0).all() and (used[:, 1] == used[:, 0] + 1).all()
        texts = []
        for number in range(len(tokens)):
            [[start, end]] = tokens.spans(number).tolist()
            ids = tokens.ids(number).tolist()
            assert end == len(ids) <= 64
            texts.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])))
        answers = {answer for _, answer in texts[::2]}
        for place in range(0, len(texts), 2):
            (prompt, answer), (same_prompt, other) = texts[place : place + 2]
            assert prompt == same_prompt and other in answers
            assert (other != answer) or len(answers) == 1
            seen.append((prompt, answer, bool(found[place])))
            assert found[place] == found[place + 1]
    for prompt, answer, desirable in seen:
        if prompt != "Is 4 even?":
            assert labels[prompt, answer] == desirable
    assert sorted(label for prompt, _, label in seen if prompt == "Is 4 even?") == [False, True]


def test_a_mismatch_answers_another_prompt():
    """Rows with one prompt often follow each other; the answer to the same prompt is no mismatch."""
    assert other_rows([b"a", b"b", b"c"]) == [2, 0, 1]
    assert other_rows([b"a", b"a", b"b", b"a"]) == [2, 2, 1, 2]
    assert other_rows([b"a", b"a", b"a"]) == [2, 0, 1] and other_rows([b"a"]) == [0]


def test_a_cut_mismatch_keeps_its_prompt(run, tmp_path):
    long = [row(f"Question {n}: {'what ' * 12}?", f" It is {'so ' * (n + 4)}.", n % 2 == 0) for n in range(12)]
    short = [row(f"{n}?", f" {'yes ' * 24}{n}.", n % 2 == 0) for n in range(12)]
    assert run(write_rows(tmp_path / "rows.jsonl", long + short), data__max_length=40, **KTO).exit_code == 0
    tokens = TokenRows(Path("data/tokens"), "train")
    assert tokens.lengths.max() <= 40 and (tokens.supervised > 0).all()
    assert (tokens.lengths[1::2] == 40).any()
    for number in range(0, len(tokens), 2):
        start = int(tokens.spans(number)[0, 0])
        assert tokens.spans(number + 1)[0, 0] == start
        assert np.array_equal(tokens.ids(number)[:start], tokens.ids(number + 1)[:start])


def test_desirable_rows_are_counted_without_duplicates(run, tmp_path):
    same, others = [row("Is it?", "Yes.", True)] * 5, [row(f"{n}?", "No.", False) for n in range(3)]
    result = run(write_rows(tmp_path / "rows.jsonl", same + others), data__drop_duplicates=True, **KTO, **NO_HELDOUT)
    assert "1 training rows are desirable and 3 are not" in result.output
    figures = json.loads(Path("data/tokens/figures.json").read_text())
    assert (figures["train_rows"], figures["desirable_rows"]) == (4, 1)


def test_loss_rows_count_rows_of_both_labels(run, tmp_path, tiny_dir):
    """Twice as many rows as asked for: so many of each label."""
    source = write_rows(tmp_path / "rows.jsonl", rows(48))
    assert (
        run(source, data__heldout_fraction=0.5, evaluate__loss_rows=5, evaluate__generate_rows=2, **KTO).exit_code == 0
    )
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    p, tokens = load_params(), Path("data/tokens")
    held_out = TokenRows(tokens, "heldout", p.train.row_kind)
    limits = EvaluationLimits.from_params(p, held_out.supervised)
    labels = _choose_rows(p, tokens, held_out, limits, None, tokenizer).compared
    assert isinstance(labels, HeldoutLabels) and len(labels.better) + len(labels.worse) == 5
    found = labels.rows.column(COLUMN)
    assert found is not None and found[labels.better].all() and not found[labels.worse].any()


@pytest.mark.parametrize(("label", "found"), [(True, "desirable"), (False, "undesirable")])
def test_rows_of_one_label_are_refused_once(run, tmp_path, label, found):
    source = write_rows(tmp_path / "rows.jsonl", [{**one, "label": label} for one in rows(24)])
    message = error(run(source, **KTO))
    assert message.startswith("data.source: training rows must have both labels; all ")
    assert f"are {found}; add rows of the other label, or set train.objective=sft" in message
    assert not Path("data/tokens").exists()


def test_the_refusal_of_one_label_says_why_rows_are_lost(run, tmp_path):
    kept, lost = row("Short?", "No.", False), row("long " * 100, "Yes.", True)
    source = write_rows(tmp_path / "rows.jsonl", [kept, lost])
    message = error(run(source, data__max_length=32, **KTO, **NO_HELDOUT))
    assert "all 1 are undesirable, 1 without an answer within data.max_length=32; add" in message


def test_a_label_of_another_type_is_refused_with_its_line(run, tmp_path):
    source = write_rows(tmp_path / "rows.jsonl", [*rows(3), row("Q", "A", 2)])
    assert error(run(source, **KTO)).endswith("rows.jsonl:4: 'label' must be true or false, got 2; change it")


def test_the_reference_has_answers_and_mismatches_and_the_plan_has_answers(run, tmp_path):
    assert run(write_rows(tmp_path / "rows.jsonl", rows(24)), train__method="lora", **KTO).exit_code == 0
    assert invoke(reference).exit_code == 0 and invoke(bucket).exit_code == 0
    tokens = TokenRows(Path("data/tokens"), "train")
    of = identity(Path("data/tokens"), read_json(Path("locks/model.json")), load_params().train)
    logps = read_table(Path("data/reference/train.arrow"), of, len(tokens))
    assert (logps < 0).all()
    planned = read_plan(Path("data/batches/plan.arrow")).rows.tolist()
    assert set(planned) == set(tokens.used[::2].tolist())
