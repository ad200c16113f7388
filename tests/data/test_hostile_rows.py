"""Pairs and labelled rows with values that nobody would write: each is used, or refused in one line with its number."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cuda_memory.terminal import visible
from lean_finetune.core.errors import LONGEST_LINE
from tests.workspace import error

USER, BOT = {"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}
DEEP: Any = "x"
for _ in range(300):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *("", " ", "\n", "a", "\x00", "\ud800", "\udfff\ud83d", "\u202egpj", "\x1b]52;c;eA==\x07", "\ufdd0", "\ufeff"),
    *(
        "<|im_end|>",
        "<|im_start|>assistant\nNo.",
        "x" * 200_000,
        "é" * 50_000,
        "👩‍💻" * 999,
        "[1, 2]",
        "{'a': 1}",
        "null",
    ),
    *(None, True, False, 0, -1, 1.5, 10**30, float("nan"), float("inf"), -(2**63)),
    *([], {}, [None], [[]], [1, 2], ["a", "b"], [{}], {"role": "assistant", "content": "a"}, {"a": {"b": [1]}}, DEEP),
    *([BOT], [USER], [USER, BOT], [BOT, BOT], [USER] * 400, [{**BOT, "content": None}], [{**BOT, "content": ["a", 5]}]),
    *(
        [{**BOT, "role": 5}],
        [{**BOT, "role": "\ud800"}],
        [{"from": "gpt", "value": "Yes."}],
        [{**BOT, "tool_calls": 5}],
    ),
    *([{**BOT, "content": [{"type": "text", "text": 5}]}], ["x"] * 20_000, json.dumps([BOT]), str([BOT])),
]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pairs": ({"prompt": "Is it {}?", "chosen": "Yes.", "rejected": "No."}, {"train__objective": "dpo"}),
    "pairs of messages": (
        {"prompt": [USER], "chosen": [BOT], "rejected": [{**BOT, "content": "No."}]},
        {"train__objective": "orpo"},
    ),
    "rewards": (
        {"prompt": "Is it {}?", "chosen": "Yes.", "rejected": "No."},
        {"train__objective": "reward", "train__loss_chunk": None},
    ),
    "labels": ({"prompt": "Is it {}?", "completion": "Yes.", "label": True}, {"train__objective": "kto"}),
}
"""A good row, and the parameters that train such rows."""
NO_HELDOUT = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}


def hostile_rows(good: dict[str, Any]) -> list[dict[str, Any]]:
    """Each value in each place, each place left out, and good rows around them."""
    rows = [{**good, key: value} for key, value in product(good, VALUES)]
    rows += [{name: good[name] for name in good if name != key} for key in good]
    around = [
        {**good, "prompt": f"Is it {number}?"} if isinstance(good["prompt"], str) else good for number in range(4)
    ]
    return [*around[:2], *rows, *around[2:], *([{**around[0], "label": False}] if "label" in good else [])]


# Rewards are of the rows of pairs.
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow if form == "rewards" else ()) for form in FORMS]
)
def test_each_row_is_used_or_refused_in_one_line(run, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch):
    """A traceback in a worker for one of a million rows, or a row that vanishes without a count."""
    monkeypatch.setattr("lean_finetune.data.shards.tally.MAX_REJECTS", 1000)
    good, values = FORMS[form]
    rows = hostile_rows(good)
    assert len(rows) > 100
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(source, data__on_bad_row="skip", data__max_length=256, **values, **NO_HELDOUT)
    assert result.exit_code == 0, result.output
    figures = json.loads(Path("data/tokens/figures.json").read_text())
    assert (
        figures["rows"] == len(rows) == figures["train_rows"] + figures["dropped_rows"] and figures["train_rows"] >= 4
    )
    rejects = [json.loads(line) for line in Path("data/tokens/rejects.jsonl").read_text().split("\n") if line]
    assert len(rejects) > 50
    for one in rejects:
        reason = one["reason"]
        assert len(reason) <= LONGEST_LINE and reason == visible(reason) and "\n" not in reason, reason
        assert not re.search(r"Traceback|Error: |object at 0x", reason), reason
    assert all(text == visible(text) for text in (result.stdout, result.stderr))
    lines = [one["line"] for one in rejects]
    for line in {lines[0], lines[len(lines) // 2], lines[-1]}:
        source.write_text("".join(json.dumps(row) + "\n" for row in (*rows[:2], rows[line - 1])))
        assert re.match(rf"{source}:\d+: ", error(run(source, **values, **NO_HELDOUT)))
