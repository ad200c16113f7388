"""`fit --lengths`: lengths of a file of rows or of numbers, or with given quantiles; one line for each error."""

import json
from pathlib import Path

import numpy as np
import pytest

from lean_finetune.commands.fit import _length_flags
from lean_finetune.commands.row_lengths import of_quantiles, row_index
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError

SAMPLE = Path(__file__).parents[2] / "data/raw/sample.jsonl"


@pytest.fixture(scope="module")
def params() -> Params:
    return with_flags(load_params(COMMON_PARAMS), ["model.name=tiny", "data.max_length=64"])


def test_a_sample_has_the_quantiles_and_is_the_same_each_time():
    """Another staircase each time, or for other rows than the user has."""
    lengths = of_quantiles("p50=400, p99=3000, max=4096")
    assert np.percentile(lengths, [50, 99]) == pytest.approx([400, 3000], rel=0.01) and lengths.max() == 4096
    assert np.array_equal(lengths, of_quantiles("p99=3000,p50=400,max=4096"))
    assert of_quantiles("p50=9,p99=20").max() == 20 and len(set(of_quantiles("p50=8,p99=8").tolist())) == 1


def test_lines_are_numbers_or_objects(tmp_path: Path, params: Params):
    """A length taken for a row of text."""
    path = tmp_path / "lengths.txt"
    path.write_text('12\n\n{"tokens": 400}\n')
    index = row_index(str(path), params, truncates=True)
    assert index.lengths.tolist() == [12, 400] and index.supervised.tolist() == [11, 399]
    cut = index.shortened(100)
    assert cut.lengths.tolist() == [12, 100] and cut.supervised.tolist() == [11, 99]


def test_rows_are_tokenized_as_for_training(tmp_path: Path, params: Params):
    """Characters counted instead of tokens, prompts counted as trained, or rows without their end."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(SAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)[:50]), encoding="utf-8")
    whole, cut = (row_index(str(path), params, truncates=truncates) for truncates in (False, True))
    assert len(whole.lengths) == 50 and whole.lengths.max() > 64 == cut.lengths.max()
    assert 0 < len(cut.lengths) < 50, "no answer is left of some rows"
    assert ((whole.supervised > 0) & (whole.supervised < whole.lengths)).all()
    assert cut.lengths.min() == whole.lengths.min()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("p50=400", '--lengths: must be a file of rows, a file with a number or {"tokens": n} in each line, or p50='),
        ("p50=400,p99=3k", "--lengths: must be a file of rows"),
        ("p50=400,p99=300", "--lengths: needs 2 <= p50 <= p99 <= max <= 1048576; got p50=400, p99=300, max=300"),
        ("absent.jsonl", "--lengths: must be a file of rows"),
        ("{tmp}/empty.jsonl", "--lengths: {tmp}/empty.jsonl has no rows; name another file"),
        ("{tmp}/mixed.txt", "{tmp}/mixed.txt:2: must be a number of tokens from 2 to 1048576"),
        ("{tmp}/one.txt", "{tmp}/one.txt:1: must be a number of tokens from 2 to 1048576"),
        ("{tmp}/bad.jsonl", "{tmp}/bad.jsonl:2: "),
        ("{tmp}/page.pdf", "--lengths: a file must be .jsonl"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, params: Params, value: str, expected: str):
    """A traceback, or an answer for rows that are not there."""
    files = {"empty.jsonl": "", "mixed.txt": "5\nfive\n", "one.txt": "1\n", "page.pdf": "text"}
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    files["bad.jsonl"] = json.dumps(good) + '\n{"messages": 3}\n'
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        row_index(value.replace("{tmp}", str(tmp_path)), params, truncates=True)
    assert str(caught.value).startswith(expected.replace("{tmp}", str(tmp_path))) and "\n" not in str(caught.value)


def test_a_model_without_its_tokenizer_is_named(tmp_path: Path, params: Params):
    """Tokens of another tokenizer."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--lengths: .* has no tokenizer\.json here, which counts the tokens of"):
        row_index(str(SAMPLE), with_flags(params, [f"model.name={tmp_path}"]), truncates=True)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_length_of_a_pair_is_that_of_both_answers(tmp_path: Path, params: Params, objective: str):
    """An odd number of lengths ended in a traceback, and the longest pair did not fit into its micro-batch."""
    file = tmp_path / "lengths.txt"
    file.write_text("30\n60\n50\n")
    p = with_flags(params, [f"train.objective={objective}"])
    assert row_index(str(file), p, truncates=False).lengths.tolist() == [30, 30, 60, 60, 50, 50]
    quantiles = row_index("p50=100,p99=400", p, truncates=False).lengths
    assert quantiles[::2].tolist() == quantiles[1::2].tolist() == of_quantiles("p50=100,p99=400").tolist()
    room = {"dpo": 128, "kto": 64}[objective]
    assert _length_flags(p, 60, usual=True) == ["data.max_length=60", f"bucket.max_tokens={room}"]
