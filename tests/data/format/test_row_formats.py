"""Row formats: each row becomes its conversation or text, and a row that cannot be used is refused."""

import json
import re
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest

from lean_finetune.config.field_types import Format
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.format_base import (
    FORMATS,
    Conversation,
    PlainText,
    RowFormat,
    check_columns,
    complete_columns,
    detect_format,
    is_heldout,
)
from lean_finetune.data.format.row_formats import parse_row, row_family
from lean_finetune.islands.objectives.registry import KINDS
from tests.data.common import (
    ANSWER,
    CALL,
    MESSAGES,
    USER,
    call,
    conversation,
    decoder,
    messages,
    read_tokens,
    shape_of,
    spans_of,
    turns,
)
from tests.data.read.common import arrow, parquet, values_of
from tests.workspace import error, write_rows

TOOL = {"name": "add", "description": "Adds.", "parameters": {}}
WRAPPED = [{"type": "function", "function": TOOL}]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def key_of(*given) -> bytes:
    """The key by which a conversation is held out."""
    return parse_row(messages(*given), shape_of("messages")).prompt_key()


def test_a_sharegpt_row_with_tools_means_the_same_as_its_messages_row():
    sharegpt = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": MESSAGES[1]["content"]},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": MESSAGES[4]["content"]},
        ],
        "tools": json.dumps([TOOL]),
    }
    openai: dict[str, Any] = {"messages": json.loads(json.dumps(MESSAGES)), "tools": WRAPPED}
    openai["messages"][2]["content"] = None
    openai["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["arguments"])
    expected = Conversation(messages=MESSAGES, tools=WRAPPED)
    assert parse_row(sharegpt, shape_of("sharegpt")) == expected
    assert parse_row(sharegpt | {"tools": [TOOL]}, shape_of("sharegpt")) == expected
    assert parse_row(openai, shape_of("messages")) == expected


def test_several_calls_in_one_sharegpt_turn_are_one_message():
    example = conversation(turns(("human", "Q"), ("function_call", json.dumps([CALL, CALL]))), "sharegpt")
    assert len(example.messages) == 2 and len(example.messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize("tools", [None, [], "", "[]", " "])
def test_empty_tools_are_none(tools):
    """An empty list would make a template announce tools."""
    assert conversation(messages(USER, ANSWER, tools=tools), "messages").tools is None


@pytest.mark.parametrize(
    "given, prompt",
    [
        ({}, "Q"),
        ({"input": ""}, "Q"),
        ({"input": None}, "Q"),
        ({"input": "I"}, "Q\nI"),
        ({"instruction": "", "input": "I"}, "I"),
    ],
)
def test_alpaca_joins_instruction_and_input(given, prompt):
    example = conversation({"instruction": "Q", "output": "A", **given}, "alpaca")
    assert example.messages == [{"role": "user", "content": prompt}, ANSWER]


def test_typed_text_parts_are_joined_and_other_keys_reach_the_template():
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": "b"}]
    row = messages({"role": "user", "content": parts, "name": "Ann"}, ANSWER)
    assert conversation(row, "messages").messages[0] == {"role": "user", "content": "ab", "name": "Ann"}


@pytest.mark.parametrize(
    "row, columns, shape, reason",
    [
        ({"messages": [], "text": ""}, {}, "messages", "messages"),
        ({"conversations": []}, {}, "sharegpt", "conversations"),
        ({"instruction": "", "output": "", "text": ""}, {}, "alpaca", "instruction and output"),
        ({"prompt": "", "completion": ""}, {}, "prompt_completion", "prompt and completion"),
        # Rows of Parquet files have all columns, most of them null where sources were joined.
        ({"messages": None, "text": "T"}, {}, "text", "text"),
        ({"text": None}, {}, "text", "text"),
        ({"q": "", "a": "", "id": 1}, {"prompt": "q", "completion": "a"}, "prompt_completion", "q and a"),
    ],
)
def test_auto_detects_the_format_by_keys_with_a_reason(row, columns, shape, reason):
    assert detect_format(row, columns) == (shape, f"the first row has {reason}")


def test_auto_refuses_unknown_keys_and_lists_the_formats():
    with pytest.raises(RowFault, match=r'the keys \["title", "body"\].*alpaca: instruction, output'):
        detect_format({"title": "", "body": ""}, {})


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("question", "answer"),
        ("question", "response"),
        ("query", "answer"),
        ("input", "output"),
        ("instruction", "response"),
        ("prompt", "answer"),
    ],
)
def test_a_question_and_an_answer_are_found_under_usual_names(question: str, answer: str):
    row = {question: "Q", answer: "A", "id": 3, "source": {"url": None}, "messages": None}
    columns = complete_columns(row, {"family": "id"})
    name, reason = detect_format(row, columns)
    example = parse_row(row, shape_of(name, **columns))
    assert example == conversation({"instruction": "Q", "output": "A"}, "alpaca")
    assert reason == f"the first row has {question} and {answer}" and columns["family"] == "id"


@pytest.mark.parametrize("row", [{"query": "Q", "response": "A"}, {"text": "T", "answer": "A"}, {"messages": []}])
def test_the_names_of_a_format_come_before_usual_ones(row: dict[str, Any]):
    assert complete_columns(row, {}) == {}


def test_alpacas_input_belongs_to_the_question_under_any_name_of_the_answer():
    """Dolly's rows: without its context, the model would learn to guess."""
    row = {"instruction": "Q", "input": "I", "response": "A"}
    example = parse_row(row, shape_of("alpaca", **complete_columns(row, {})))
    assert example == conversation({"instruction": "Q", "input": "I", "output": "A"}, "alpaca")
    row = {"question": "Q", "context": "I", "answer": "A"}
    columns = complete_columns(row, {"input": "context"})
    assert parse_row(row, shape_of(detect_format(row, columns)[0], **columns)) == example


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"question": "Q", "answer": "A", "response": "B"}, "{instruction: question, output: answer}"),
        ({"prompt": "P", "question": "Q", "answer": "A"}, "{instruction: prompt, output: answer}"),
        ({"title": "Q", "body": "A"}, "{instruction: title, output: body}"),
        ({"id": 1, "problem": "Q", "answer": "A"}, "{instruction: problem, output: answer}"),
        ({"question": "Q", "answer": 42}, "{instruction: question, output: ANSWER}"),
        ({"n": 1}, "{instruction: QUESTION, output: ANSWER}"),
    ],
)
def test_where_the_answer_is_open_the_refusal_prints_the_mapping_to_write(row: dict[str, Any], mapping: str):
    assert complete_columns(row, {}) == {}
    with pytest.raises(RowFault, match=re.escape(f"name them, as in data.columns={mapping}, or rename them")):
        detect_format(row, {})


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        (
            {"source": "x", "instruction": "Q", "chosen_response": "A", "rejected_response": "B"},
            "instruction, chosen: chosen_response, rejected: rejected_response",
        ),
        ({"id": "a", "response_0": "A", "response_1": "B"}, "QUESTION, chosen: CHOSEN, rejected: REJECTED"),
    ],
)
def test_a_pair_of_unknown_names_is_refused_with_keys_of_pairs(row: dict[str, Any], mapping: str):
    with pytest.raises(RowFault, match=re.escape(f"name them, as in data.columns={{instruction: {mapping}}}")):
        detect_format(row, {}, KINDS["pair"])


def test_the_worse_answer_of_a_pair_is_not_dropped_for_a_usual_name():
    row = {"question": "Q", "answer": "A", "rejected": "B"}
    assert complete_columns(row, {}) == complete_columns(row, {}, KINDS["pair"]) == {}


def test_a_family_is_text_or_absent_and_may_be_in_another_column():
    shape = shape_of("text")
    assert row_family({}, shape) is row_family({"family": None}, shape) is None
    assert row_family({"family": "dates"}, shape) == "dates"
    assert row_family({"family": "dates", "task": "sums"}, shape_of("text", family="task")) == "sums"
    with pytest.raises(RowFault, match="'family' must be text, got 3"):
        row_family({"family": 3}, shape)


def test_rows_with_one_prompt_share_a_key_in_every_format():
    """Otherwise a prompt could be both trained and held out."""
    alpaca = parse_row({"instruction": "Q", "output": "A"}, shape_of("alpaca")).prompt_key()
    assert alpaca == key_of(USER, {**ANSWER, "content": "B"}) != key_of({**USER, "content": "P"}, ANSWER)
    # Rows without a question: one key for all would put a complete data set on one side.
    assert key_of(ANSWER) != key_of({**ANSWER, "content": "B"})
    # orjson refuses a lone surrogate.
    keys = {PlainText(prompt="", completion=text).prompt_key() for text in ("a", "b", "a\ud83d", "a\ud83e")}
    assert len(keys) == 4


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "S"}], [{**ANSWER, "content": "Welcome!"}]])
@pytest.mark.parametrize("weight", [{}, {"weight": 0}])
def test_conversations_that_begin_alike_share_a_key(before, weight):
    """Otherwise the beginning could be held out while its continuation trains the same answers."""
    start = [*before, USER, {**ANSWER, **weight}]
    assert key_of(*start, USER, ANSWER) == key_of(*before, USER, ANSWER)
    assert key_of(*start, USER, ANSWER) == key_of(*start, {**USER, "content": "More"}, ANSWER)


def test_untrained_turns_are_found_behind_the_rows_system_text():
    example = conversation(messages(USER, {**ANSWER, "weight": 0}, USER, ANSWER, system="S"), "messages")
    assert example.messages == [{"role": "system", "content": "S"}, USER, ANSWER, USER, ANSWER]
    assert (example.context, example.trained_turns()) == ({2}, [4])
    row = turns(("human", "Q"), ("gpt", "A"), ("human", "Q"), ("gpt", "A"))
    row["conversations"][1]["loss_weight"] = 0
    assert conversation({"system": "S", **row}, "sharegpt") == example


@pytest.mark.parametrize("weight", [1, None])
def test_a_weight_of_one_or_none_is_trained_and_never_reaches_the_template(weight):
    example = conversation(messages({**USER, "weight": 0}, {**ANSWER, "weight": weight}), "messages")
    assert (example.messages, example.trained_turns()) == ([USER, ANSWER], [1])


@pytest.mark.parametrize(
    "row, shape, is_empty",
    [
        ({"instruction": "Q", "output": " \n"}, "alpaca", True),
        ({"prompt": "Q", "completion": ""}, "prompt_completion", True),
        ({"text": "T"}, "text", False),
        (messages(USER, {**ANSWER, "content": ""}, USER, ANSWER), "messages", True),
        (messages(USER, {**ANSWER, "content": "", "weight": 0}, USER, ANSWER), "messages", False),
        (messages(*MESSAGES), "messages", False),
        (messages(USER, {**ANSWER, "content": "", "reasoning_content": "R"}), "messages", False),
    ],
)
def test_an_empty_answer_is_found(row, shape, is_empty):
    assert parse_row(row, shape_of(shape)).has_empty_answer() is is_empty


def test_columns_give_the_keys_of_a_format_other_names():
    qa = shape_of("prompt_completion", prompt="question", completion="answer")
    assert parse_row({"question": "Q", "answer": "A", "prompt": "other"}, qa) == PlainText(prompt="Q", completion="A")
    dialog = shape_of("messages", messages="dialog", tools="functions")
    row = {"dialog": [USER, ANSWER], "functions": [TOOL]}
    assert parse_row(row, dialog) == Conversation(messages=[USER, ANSWER], tools=WRAPPED)
    with pytest.raises(RowFault, match="no column \"answer\", which data.columns names for 'completion'"):
        parse_row({"question": "Q"}, qa)


@pytest.mark.parametrize("columns, known", [({"promt": "question"}, "completion"), ({"messages": "text"}, "prompt")])
def test_a_column_for_a_key_that_the_format_lacks_is_refused(columns, known):
    """It could take no effect."""
    with pytest.raises(UserError, match=f"^data.columns: rows of data.format prompt_completion have no key .*{known}"):
        check_columns(columns, "prompt_completion")
    with pytest.raises(UserError, match="^data.columns: "):
        detect_format({"prompt": "", "completion": ""}, columns | {"family": "prompt", "text": "none", "x": "y"})


def test_null_means_absent_so_that_parquet_rows_mean_the_same(tmp_path):
    """Arrow gives every row all fields of the structure, null where the row has none."""
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    row = {
        "messages": [
            {"role": "user", "content": "Q", "tool_calls": None, "name": None, "weight": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "name": None, "weight": 1.0},
            {"role": "tool", "content": "3", "tool_calls": None},
            {"role": "assistant", "content": "A", "tool_calls": [], "name": None, "weight": None},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int", "enum": None}}}}],
        "system": None,
    }
    plain = {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "3"},
            ANSWER,
        ],
        "tools": [{"function": {"name": "f", "parameters": {"x": {"type": "int"}}}, "type": "function"}],
    }
    [read] = values_of(written(tmp_path / "rows.parquet", parquet([row])))
    assert conversation(read, "messages") == conversation(plain, "messages")
    texts = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"b": null}'}]}
    parsed = conversation(messages(USER, texts), "messages").messages[1]["tool_calls"][0]["function"]["arguments"]
    assert parsed == {"b": None}, "a null in JSON text was written by its author"


def test_a_null_that_its_author_wrote_is_kept_and_padding_of_arrow_is_not(tmp_path):
    """In JSON a null argument is part of the call. Arrow gives each object all fields, null where it had none."""
    calls = [{"name": "f", "arguments": {"a": 1, "unit": None}}, {"name": "g", "arguments": {"x": [None, {"b": None}]}}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"u": {"type": "string", "default": None}}}}
    row = messages(USER, {**ANSWER, "tool_calls": calls, "refusal": None}, tools=[tool])
    example = conversation(row, "messages")
    assert [call["function"] for call in example.messages[1]["tool_calls"]] == calls
    assert example.tools == [tool] and "refusal" not in example.messages[1]
    for name, content in (("a.parquet", parquet([row])), ("a.arrow", arrow(pa.Table.from_pylist([row]), True))):
        [read] = values_of(written(tmp_path / name, content))
        arguments = [call["arguments"] for call in read["messages"][1]["tool_calls"]]
        assert arguments == [{"a": 1}, {"x": [None, {}]}] and "default" not in str(read["tools"])


def test_integers_of_any_size_in_json_text_are_exact():
    """The parser orjson reads an integer past 64 bits as the nearest float, without a word."""
    number = 12345678901234567890123
    example = conversation(messages(USER, call(name="f", arguments=f'{{"id": {number}}}')), "messages")
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"id": number}


def test_reasoning_parts_are_the_reasoning_of_the_turn():
    parts = [{"type": "reasoning", "value": "Hm."}, {"type": "text", "value": "A"}]
    row = messages(USER, {**ANSWER, "content": parts})
    assert conversation(row, "messages").messages[1] == {**ANSWER, "reasoning_content": "Hm."}


@pytest.mark.parametrize("mark", [{"train": False}, {"loss": False}, {"weight": 0}, {"masked": 1}])
def test_one_answer_is_trained_completely_or_not_at_all(mark: dict[str, Any]):
    """Calls in turns of their own are one answer. Of two turns, the second began where no generation begins."""
    question = {"from": "human", "value": "Q"}
    text, turn = {"from": "gpt", "value": "Wait."}, {"from": "function_call", "value": json.dumps(CALL)}
    for turns_given in (
        [{**turn, **mark}, turn],
        [turn, {**turn, **mark}],
        [{**text, **mark}, turn],
        [text, turn | mark],
    ):
        with pytest.raises(
            RowFault, match="turns 2 and 3 are one answer with its tool calls, and only one of them is tra"
        ):
            conversation({"conversations": [question, *turns_given]}, "sharegpt")
    both = {"conversations": [question, {**turn, **mark}, {**turn, **mark}, question, text, turn]}
    example = conversation(both, "sharegpt")
    assert (len(example.messages), example.context, example.trained_turns()) == (4, {1}, [3])
    assert [len(message.get("tool_calls", ())) for message in example.messages] == [0, 2, 0, 1]


def test_lists_may_be_json_text_as_in_a_csv_file():
    row = {"messages": json.dumps([USER, ANSWER]), "tools": json.dumps([TOOL])}
    assert conversation(row, "messages") == Conversation(messages=[USER, ANSWER], tools=WRAPPED)


def test_either_name_of_the_list_may_have_either_kind_of_turn():
    """Published data sets have both; auto decides by the name of the list."""
    assert conversation({"conversations": [USER, ANSWER]}, "sharegpt").messages == [USER, ANSWER]
    other = turns(("human", "Q"), ("gpt", "A"))["conversations"]
    assert conversation({"messages": other}, "messages").messages == [USER, ANSWER]


def test_of_a_prompt_and_a_completion_in_messages_only_the_completion_is_trained():
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER, USER, {**ANSWER, "weight": 0}], "tools": [TOOL]}
    example = conversation(row, "prompt_completion")
    assert (len(example.messages), example.tools, example.trained_turns()) == (6, WRAPPED, [3])


def test_the_seed_chooses_other_rows_and_a_larger_fraction_moves_no_row_to_training():
    rows = [PlainText(prompt=f"{n}", completion="A") for n in range(400)]
    first, again, other = ([is_heldout(row, 0.25, seed) for row in rows] for seed in (0, 0, 1))
    assert first == again != other
    assert 60 < sum(first) < 140 and 60 < sum(other) < 140
    more = [is_heldout(row, 0.5, 0) for row in rows]
    assert all(large or not small for small, large in zip(first, more, strict=True))


@pytest.mark.parametrize(
    "value, other", [(b"\xff", b"\x00"), (Decimal("1.50"), Decimal(3)), (timedelta(3), timedelta(6))]
)
def test_a_value_of_a_type_that_json_lacks_has_a_key(value, other):
    """Column formats can have such values in a message."""
    keys = [key_of({**USER, "extra": one}, ANSWER) for one in (value, value, other)]
    assert keys[0] == keys[1] != keys[2]


class QuestionAnswer(RowFormat):
    """A format that only this test knows."""

    name = "question_answer"
    required = ("question", "answers")
    optional = ("hint",)
    context_key = "hint"

    def parse(self, row):
        """See the base class."""
        if not row["answers"]:
            raise RowFault("'answers' is empty; add one")
        question = f"{row['question']} ({row['hint']})" if row.get("hint") else row["question"]
        return Conversation(
            messages=[{"role": "user", "content": question}, {"role": "assistant", "content": row["answers"][0]}],
            tools=None,
        )


def test_a_row_format_is_one_class(run, monkeypatch, tiny_dir):
    """The registered class alone is enough for detection, data.columns, refusals and tokens."""
    monkeypatch.setitem(FORMATS, "question_answer", QuestionAnswer())
    rows = [{"q": f"What is {n}?", "answers": [f"{n}."], "hint": "a number"} for n in range(20)]
    path = write_rows(Path("rows.jsonl"), [*rows, {"q": "Why?", "answers": []}])
    columns = {"question": "q"}
    assert error(run(path, data__columns=columns)).startswith("rows.jsonl:21: 'answers' is empty")
    result = run(path, data__columns=columns, data__on_bad_row="skip")
    assert result.exit_code == 0 and "data.format is question_answer: the first row has q and answers" in result.stderr
    decode, tokens = decoder(tiny_dir), read_tokens(Path("data/tokens/train"))
    for row in tokens:
        [(start, end)] = spans_of(row)
        assert decode(row["input_ids"][start:end]) == f"{row['source_row']}.<|im_end|>"
        assert f"What is {row['source_row']}? (a number)" in decode(row["input_ids"])
    refusal = error(run(path, data__columns={"prompt": "q", "completion": "answers", "text": "q", "hint": "hint"}))
    assert refusal.startswith("data.columns: rows of data.format prompt_completion have no key")
    context = write_rows(Path("context.jsonl"), [{"question": "Q", "answers": ["A"], "context": "Facts."}])
    assert error(run(context)).startswith("context.jsonl:1: 'context' is part of the question")


def test_every_format_is_a_value_of_data_format():
    assert {"auto", *FORMATS} == set(get_args(Format))
