"""Malformed input through the commands a user runs: every row is used, counted and listed, or told in one line."""

import json
from pathlib import Path

import pytest

from lean_finetune.core.atomic_files import read_json
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.data.read.malformed import MALFORMED, Malformed
from tests.data.tokens.common import chat_row
from tests.workspace import invoke, lay_out, told, write_rows

TEXTS = [{"text": f"Row {n} of the good ones."} for n in range(40)]
CHATS = [chat_row(f"Say {n}", f"{n}") for n in range(40)]
USED = ("train_rows", "heldout_rows")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that pins and tokenizes a file behind good rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    for shape, rows in (("text", TEXTS), ("messages", CHATS)):
        write_rows(Path(f"good/{shape}.jsonl"), rows)
    lay_out(tmp_path)
    assert invoke(pin, "model").exit_code == 0

    def pin_and_tokenize(path: Path, shape: str, policy: str):
        lay_out(
            tmp_path,
            data__source=[{"source": f"good/{shape}.jsonl"}, {"source": str(path)}],
            data__format=shape,
            data__on_bad_row=policy,
            data__heldout_fraction=0.2,
            run__tokenizer_engine="tokenizers",
            run__data_workers=1,
            run__data_pool="threads",
        )
        pinned = invoke(pin, "data")
        return pinned if pinned.exit_code else invoke(tokenize)

    return pin_and_tokenize


def counted() -> dict[str, int]:
    return read_json(Path("data/tokens/figures.json"))


def rejects() -> list[dict]:
    return [json.loads(line) for line in Path("data/tokens/rejects.jsonl").read_text().splitlines()]


def lost(metrics: dict[str, int]) -> int:
    """Rows that were read and not used."""
    return sum(metrics[name] for name in ("bad_rows", "empty_answer_rows", "no_answer_rows", "dropped_long_rows"))


@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED)
def test_each_malformed_file_ends_in_counted_rows_or_in_one_line(run, tmp_path, case: Malformed):
    path = tmp_path / case.file
    path.write_bytes(case.bytes())
    result = run(path, "text", "skip")
    if case.error:
        assert told(result).startswith(f"{path}{case.error}")
        return
    if not case.good:
        place = f"{path}:{min(case.faults)}: " if case.faults else f"data.source: {path} "
        assert told(result).startswith(place)
        return
    assert result.exit_code == 0, result.output
    metrics = counted()
    assert sum(metrics[name] for name in USED) + lost(metrics) == len(TEXTS) + case.good + len(case.faults)
    listed = {one["line"]: one["reason"] for one in rejects() if one["file"] == str(path)}
    for line, fault in case.faults.items():
        assert listed[line].startswith(fault)
    ended = run(path, "text", "fail")
    if metrics["bad_rows"]:
        first = min(listed)
        assert told(ended).startswith(f"{path}:{first}: {listed[first]}")
    else:
        assert ended.exit_code == 0, ended.output


SHAPES = {
    "no messages": {},
    "messages are text": {"messages": "hello"},
    "messages are none": {"messages": []},
    "messages are null": {"messages": None},
    "a message is null": {"messages": [None]},
    "a message is text": {"messages": ["hello"]},
    "role is missing": {"messages": [{"content": "a"}]},
    "role is null": {"messages": [{"role": None, "content": "a"}]},
    "role is unknown": {"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "role is a number": {"messages": [{"role": 1, "content": "a"}]},
    "content is a number": {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]},
    "content is null": {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "b"}]},
    "content is a list of numbers": {"messages": [{"role": "user", "content": [1]}]},
    "answer is empty": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]},
    "answer is white space": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " \n"}]},
    "no answer": {"messages": [{"role": "user", "content": "a"}]},
    "tool calls are text": {"messages": [{"role": "assistant", "content": "a", "tool_calls": "b"}]},
    "another shape": {"prompt": "a", "completion": "b"},
}


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_a_row_of_a_wrong_shape_is_counted_and_listed_or_used(run, tmp_path, row):
    path = write_rows(tmp_path / "rows.jsonl", [chat_row("Say yes", "yes"), row, chat_row("Say no", "no")])
    assert run(path, "messages", "skip").exit_code == 0
    metrics = counted()
    assert sum(metrics[name] for name in USED) + lost(metrics) == len(CHATS) + 3
    assert lost(metrics) == len([one for one in rejects() if one["line"] == 2])
    result = run(path, "messages", "fail")
    if metrics["bad_rows"]:
        assert told(result).startswith(f"{path}:2: ")
    else:
        assert result.exit_code == 0
