"""Rows as published data sets write them, through the stage: the trained text is the answers.

The expectations are written by hand from each tool's documentation of its format.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.tokens.common import ANSWER, USER, chat_row, decoder, meta, read_tokens, spans_of
from tests.workspace import error, write_rows

OUT = Path("data/tokens")
HUMAN, GPT = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
BAD = {**ANSWER, "content": "bad"}
PLAIN = [chat_row(f"What is {n}?", f"{n}.") for n in range(40)]
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = '{"name": "add", "arguments": {"a": 1}}'


@pytest.fixture
def run_sources(run):
    """A function that tokenizes sources: by name its rows, or its rows and the other keys of its entry."""

    def write_and_run(sources: dict[str, Any], **values):
        entries = []
        for name, given in ({"plain": PLAIN} | sources).items():
            rows, keys = given if isinstance(given, tuple) else (given, {})
            file = write_rows(Path(f"{name}.jsonl"), rows if isinstance(rows, list) else [rows])
            entries.append({"source": str(file), **keys})
        return run(entries, **values)

    return write_and_run


def tokenized(decode) -> dict[str, tuple[str, list[str]]]:
    """By source, of its only row: the text, and each trained part of it without its end-of-turn token."""
    files = meta(OUT)["files"]
    rows = [row for side in ("train", "heldout") for row in read_tokens(OUT / side)]
    return {
        files[row["source_file"]].removesuffix(".jsonl"): (
            decode(row["input_ids"]),
            [decode(row["input_ids"][a:b]).removesuffix("<|im_end|>") for a, b in spans_of(row)],
        )
        for row in rows
    }


def chat(*turns: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(turns), **columns}


# By dialect: its row, its answers, and other texts that must be shown.
HONOURED: dict[str, tuple[Any, list[str], list[str]]] = {
    "axolotl-train": (
        chat({**USER, "train": False}, {**BAD, "train": False}, USER, {**ANSWER, "train": True}),
        ["A"],
        ["bad"],
    ),
    "axolotl-no-detail": (chat(USER, {**ANSWER, "train": True, "train_detail": None}), ["A"], []),
    "swift-loss": (chat(USER, {**BAD, "loss": False}, USER, ANSWER), ["A"], ["bad"]),
    "mistral-weight": (chat(USER, {**BAD, "weight": 0}, USER, ANSWER), ["A"], ["bad"]),
    "gemma-model": (chat(USER, {"role": "model", "content": "A"}), ["A"], []),
    "sharegpt-model": ({"conversations": [HUMAN, {"from": "model", "value": "A"}]}, ["A"], []),
    "parts-value": (chat({**USER, "content": [{"type": "text", "value": "Part"}]}, ANSWER), ["A"], ["Part"]),
    "openai-responses": (
        chat(
            {**USER, "content": [{"type": "input_text", "text": "Part"}]},
            {**ANSWER, "content": [{"type": "output_text", "text": "A"}]},
        ),
        ["A"],
        ["Part"],
    ),
    "openai-functions": (
        chat(
            USER,
            {**ANSWER, "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "add", "content": "three"},
            ANSWER,
            functions=[TOOL],
            parallel_tool_calls=False,
        ),
        [f"<tool_call>{CALL}</tool_call>", "A"],
        ["Adds.", "three"],
    ),
    "alpaca-all": (
        {"instruction": "Q", "output": "A", "tools": json.dumps([TOOL]), "system": "Sys.", "history": [["q", "a"]]},
        ["a", "A"],
        ["Adds.", "Sys."],
    ),
    "kto-good": ({"prompt": [USER], "completion": [ANSWER], "label": True}, ["A"], []),
    "no-media": (chat(USER, {**ANSWER, "images": []}, images=[], videos=None, audio=""), ["A"], []),
    "row-weight": (chat(USER, ANSWER, weight=1.0), ["A"], []),
    "system-of-lists": ({"prompt": [USER], "completion": [ANSWER], "system": "Sys."}, ["A"], ["Sys."]),
    "class-label": (chat(USER, ANSWER, label=0), ["A"], []),
    "chosen-lists": (
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]}, {"columns": {"completion": "chosen"}}),
        ["A"],
        [],
    ),
    "chosen-conversation": (
        ({"chosen": [USER, ANSWER], "rejected": [USER, BAD]}, {"columns": {"messages": "chosen"}}),
        ["A"],
        [],
    ),
    "dolly": (
        (
            {"instruction": "Q", "context": "Facts.", "response": "A", "category": "open"},
            {"columns": {"input": "context", "output": "response"}},
        ),
        ["A"],
        ["Facts."],
    ),
}


def test_each_dialect_is_trained_as_it_means(run_sources, tiny_dir):
    result = run_sources({name: row for name, (row, _, _) in HONOURED.items()})
    assert result.exit_code == 0, result.stderr
    found = tokenized(decoder(tiny_dir))
    assert {name: found[name][1] for name in HONOURED} == {name: answers for name, (_, answers, _) in HONOURED.items()}
    assert [
        (name, part) for name, (_, _, shown) in HONOURED.items() for part in shown if part not in found[name][0]
    ] == []


REFUSED: dict[str, tuple[Any, str]] = {
    "llava": ({"image": "1.jpg", "conversations": [{**HUMAN, "value": "<image>\nQ"}, GPT]}, "'image' holds"),
    "ollama-images": (chat({**USER, "images": ["aGk="]}, ANSWER), "messages 1: 'images' holds"),
    "turn-images": ({"conversations": [{**HUMAN, "images": ["1.jpg"]}, GPT]}, "conversations 1: 'images' holds"),
    "kto-bad": ({"prompt": "Q", "completion": "A", "label": False}, "'label' is false"),
    "kto-tag-number": ({"instruction": "Q", "output": "A", "kto_tag": 0}, "'kto_tag' is false"),
    "kto-tag": ({"instruction": "Q", "output": "A", "kto_tag": False}, "'kto_tag' is false"),
    "ultrafeedback": (
        chat(USER, ANSWER, prompt="Q", chosen=[USER, ANSWER], rejected=[USER, BAD]),
        "data.columns={messages: chosen}",
    ),
    "swift-rejected": (chat(USER, ANSWER, rejected_response="bad"), "'rejected_response' makes the row a preference"),
    "row-weight": (chat(USER, ANSWER, weight=0.5), "'weight' is 0.5"),
    "orca": (chat(USER, ANSWER, system_prompt="S"), "data.columns={system: system_prompt}"),
    "chatglm": ({"prompt": "Q", "completion": "A", "history": [["q", "a"]]}, "'history' is part of the question"),
    "kwargs": (chat(USER, ANSWER, chat_template_kwargs={"enable_thinking": True}), "'chat_template_kwargs'"),
    "system-of-text": ({"prompt": "Q", "completion": "A", "system": "S"}, "'system' cannot be used with"),
    "two-lists-of-tools": (chat(USER, ANSWER, tools=[TOOL], functions=[TOOL]), "'tools' and 'functions'; keep one"),
    "train-user": (chat({**USER, "train": True}, ANSWER), "messages 1: train must be false in a message of role user"),
    "detail": (
        chat(USER, {**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}),
        "messages 2: train_detail selects parts of a turn",
    ),
    "two-calls": (
        chat(USER, {**ANSWER, "tool_calls": [{"name": "f"}], "function_call": {"name": "f"}}),
        "both tool_calls and function_call",
    ),
    "part-with-two-texts": (
        chat({**USER, "content": [{"type": "text", "text": "a", "value": "b"}]}, ANSWER),
        "not text",
    ),
}


def test_a_row_that_means_more_than_its_text_is_refused_at_its_line(run_sources):
    """Trained all the same, each teaches something its owner did not mean."""
    sources = {name: row for name, (row, _) in REFUSED.items()}
    assert run_sources(sources, data__on_bad_row="skip").exit_code == 0
    listed = [json.loads(line) for line in (OUT / "rejects.jsonl").read_text().splitlines()]
    reasons = {one["file"].removesuffix(".jsonl"): (one["line"], one["reason"]) for one in listed}
    assert reasons.keys() == REFUSED.keys()
    assert [(name, reasons[name]) for name, (_, rule) in REFUSED.items() if rule not in reasons[name][1]] == []
    assert {line for line, _ in reasons.values()} == {1}


def test_the_refusal_is_one_line_and_a_named_column_lifts_it(run_sources):
    rows = [chat(USER, ANSWER), chat(USER, ANSWER, images=["1.jpg"], id=7)]
    refusal = error(run_sources({"rows": rows}))
    assert refusal.startswith("rows.jsonl:2: 'images' holds ") and "data.ignore_columns" in refusal
    result = run_sources({"rows": rows}, data__ignore_columns=["images"])
    assert result.exit_code == 0 and "note: columns of rows.jsonl that are not read: id\n" in result.stderr


def test_a_preference_pair_is_refused_with_a_remedy(run_sources):
    pair = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    assert "data.columns={completion: chosen}" in error(run_sources({"pairs": pair}))
    transcript = {"chosen": "Human: Q\nAssistant: A", "rejected": "Human: Q\nAssistant: B"}
    assert "data.columns={text: chosen}" in error(run_sources({"pairs": transcript}))


def test_a_column_that_no_row_has_cannot_be_left_out(run_sources):
    refusal = error(run_sources({}, data__ignore_columns=["imgaes"]))
    assert refusal.startswith("data.ignore_columns: the rows have no column 'imgaes'")
