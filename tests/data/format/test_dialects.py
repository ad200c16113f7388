"""Rows as published data sets write them, through the stage: the trained text is the answers.

The expectations are written by hand from each tool's documentation of its format.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.common import ANSWER, USER, chat_row, decoder, meta, read_tokens, spans_of
from tests.workspace import error, write_rows

OUT = Path("data/tokens")
HUMAN, GPT = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
BAD = {**ANSWER, "content": "bad"}
PLAIN = [chat_row(f"What is {n}?", f"{n}.") for n in range(40)]
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
ROLES = {"kunde": "user", "bot 7": "assistant"}
PAIR = {"human": "q", "assistant": "a"}
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
    "swift-loss-number": (chat({**USER, "loss": 0}, {**BAD, "loss": 0}, USER, {**ANSWER, "loss": 1}), ["A"], ["bad"]),
    "trainable": (chat(USER, {**BAD, "trainable": False}, USER, ANSWER), ["A"], ["bad"]),
    "turn-loss-mask": (chat(USER, {**BAD, "loss_mask": 0}, USER, {**ANSWER, "loss_mask": 1}), ["A"], ["bad"]),
    "torchtune-masked": (chat({**USER, "masked": True}, {**BAD, "masked": True}, USER, ANSWER), ["A"], ["bad"]),
    "row-loss-mask": (chat(USER, BAD, USER, ANSWER, loss_mask=[0, 0, 0, 1]), ["A"], ["bad"]),
    "row-loss-mask-sharegpt": (
        {"conversations": [HUMAN, {**GPT, "value": "bad"}, HUMAN, GPT], "loss_mask": [0, False, 0, True]},
        ["A"],
        ["bad"],
    ),
    "named-loss-mask": (
        (chat(USER, BAD, USER, ANSWER, mask=[0, 0, 0, 1]), {"columns": {"loss_mask": "mask"}}),
        ["A"],
        ["bad"],
    ),
    "trained-row": (chat(USER, ANSWER, trainable=True, loss=0.37, masked=False, train="yes"), ["A"], []),
    "capital-roles": (chat({**USER, "role": "User"}, {**ANSWER, "role": "Assistant "}), ["A"], []),
    "chatgpt": ({"conversations": [{**HUMAN, "from": "Human"}, {**GPT, "from": "chatgpt"}]}, ["A"], []),
    "mapped-roles": (
        (chat({**USER, "role": "Kunde"}, {**ANSWER, "role": "bot 7"}), {"columns": {"roles": ROLES}}),
        ["A"],
        [],
    ),
    "swift-tool-roles": (
        chat(
            USER,
            {"role": "assistant", "content": "Wait."},
            {"role": "tool_call", "content": CALL},
            {"role": "tool_call", "content": json.loads(CALL)},
            {"role": "tool_response", "content": "three"},
            ANSWER,
        ),
        [f"Wait.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "A"],
        ["three"],
    ),
    "pairs": (
        {"conversation": [{"human": "Q", "assistant": "a"}, {"human": "R", "assistant": "A"}], "category": "Brain"},
        ["a", "A"],
        ["R"],
    ),
    "pairs-system": (
        {"conversation": [{"system": "Sys.", "human": "Q", "assistant": "A"}, {"system": "", **PAIR}]},
        ["A", "a"],
        ["Sys."],
    ),
    "query-response": (
        {"query": "Q", "response": "A", "history": [["q", "a"]], "system": "Sys."},
        ["a", "A"],
        ["Sys."],
    ),
    "llama-factory-v1": (
        chat(
            {"role": "user", "content": [{"type": "text", "value": "Part"}], "loss_weight": 0.0},
            {
                "role": "assistant",
                "content": [{"type": "text", "value": "Wait."}, {"type": "tool_call", "value": CALL}],
                "loss_weight": 1.0,
            },
            {"role": "tool", "content": [{"type": "text", "value": "three"}], "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "text", "value": "A"}], "loss_weight": 1.0},
            tools=json.dumps([TOOL]),
        ),
        [f"Wait.<tool_call>{CALL}</tool_call>", "A"],
        ["Part", "Adds.", "three"],
    ),
    "tool-results": (
        chat(
            USER,
            {**ANSWER, "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
            {"role": "tool", "content": {"sum": 3, "unit": None}},
            {"role": "tool", "content": None},
            {"role": "tool", "content": [{"type": "diner", "n": 1}]},
            ANSWER,
        ),
        [f"<tool_call>{CALL}</tool_call>", "A"],
        ['{"sum": 3, "unit": null}', '[{"type": "diner", "n": 1}]'],
    ),
    "empty-image": (chat(USER, ANSWER, image={"bytes": None, "path": None}, images=[[], {"bytes": None}]), ["A"], []),
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
    "untrained-row": (chat(USER, ANSWER, train=False), "'train' is false: the row is marked as not trained"),
    "mask-of-turns": (chat(USER, ANSWER, mask=[0, 1]), "data.columns={loss_mask: mask} where 1 means trained"),
    "turn_weights": (chat(USER, ANSWER, turn_weights=[0, 1]), "data.columns={loss_mask: turn_weights}"),
    "untrained-row-as-text": (chat(USER, ANSWER, train="False"), "'train' is \"False\": the row is marked as not"),
    "mask-as-text": (chat(USER, ANSWER, mask="[0, 1]"), "data.columns={loss_mask: mask} where 1 means trained"),
    "mask-of-a-pair": ({"instruction": "Q", "output": "A", "mask": [0, 1]}, "write the row as data.format=messages"),
    "text-mask-of-a-turn": (chat(USER, {**ANSWER, "mask": "no"}), "rename the key 'train' where true means trained"),
    "system-of-a-later-pair": ({"conversation": [PAIR, {**PAIR, "system": "S"}]}, "conversation 2 has 'system'; only"),
    "two-texts": ({"conversations": [HUMAN, {**GPT, "content": "B"}]}, "has both 'value' and 'content'; keep one"),
    "parameters-of-a-call": (
        chat(USER, {**ANSWER, "tool_calls": [{"name": "f", "parameters": {"x": 1}}]}),
        "messages 2: the call of f has 'parameters'; rename it 'arguments'",
    ),
    "mask-of-a-turn": (chat(USER, {**ANSWER, "mask": False}), "rename the key 'train' where true means trained"),
    "v1-pair": (
        {"chosen_messages": [USER, ANSWER], "rejected_messages": [USER, BAD], "messages": [USER, ANSWER]},
        "data.columns={messages: chosen_messages}",
    ),
    "huge-weight": (chat(USER, ANSWER, weight=10**999), "'weight' is 1000"),
    "orca": (chat(USER, ANSWER, system_prompt="S"), "data.columns={system: system_prompt}"),
    "chatglm": ({"prompt": "Q", "completion": "A", "history": [["q", "a"]]}, "'history' is part of the question"),
    "kwargs": (chat(USER, ANSWER, chat_template_kwargs={"enable_thinking": True}), "'chat_template_kwargs'"),
    "system-of-text": ({"prompt": "Q", "completion": "A", "system": "S"}, "'system' cannot be used with"),
    "two-lists-of-tools": (chat(USER, ANSWER, tools=[TOOL], functions=[TOOL]), "'tools' and 'functions'; keep one"),
    "train-user": (
        chat({**USER, "train": True}, ANSWER),
        "messages 1: train must be 0 or false in a",
    ),
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


def test_keys_of_turns_that_we_do_not_know_are_named_once(run_sources):
    """They reach the template; one that means "do not train this" would otherwise be trained in silence."""
    rows = [chat(USER, {**ANSWER, "id": 7, "lang": "en", "name": "Ann"}), chat({**USER, "lan\ng": "de"}, ANSWER)]
    result = run_sources({"rows": rows})
    assert result.exit_code == 0
    assert "note: keys of turns of rows.jsonl that only the chat template may read: id, lan g, lang\n" in result.stderr
    assert meta(OUT)["sources"][1]["unknown_turn_keys"] == ["id", "lan g", "lang"]


def test_a_preference_pair_is_refused_with_a_remedy(run_sources):
    pair = {"prompt": "Q", "chosen": "A", "rejected": "B"}
    assert "data.columns={completion: chosen}" in error(run_sources({"pairs": pair}))
    transcript = {"chosen": "Human: Q\nAssistant: A", "rejected": "Human: Q\nAssistant: B"}
    assert "data.columns={text: chosen}" in error(run_sources({"pairs": transcript}))


def test_a_column_that_no_row_has_cannot_be_left_out(run_sources):
    refusal = error(run_sources({}, data__ignore_columns=["imgaes"]))
    assert refusal.startswith("data.ignore_columns: the rows have no column 'imgaes'")
