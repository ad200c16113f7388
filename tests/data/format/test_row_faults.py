"""A row that cannot be used is refused with the rule that it breaks."""

import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.row_formats import parse_row
from tests.data.common import ANSWER, USER, call, messages, shape_of, turns

FAULTS = {
    "missing key": ({"instruction": "Q"}, "alpaca", "a row of data.format alpaca needs 'output'"),
    "no assistant": (messages(USER), "messages", "no assistant turn, so nothing to train on"),
    "no messages": (messages(), "messages", "'messages' is empty, so nothing to train on"),
    "null messages": ({"messages": None}, "messages", "'messages' is empty"),
    "null message": (messages(None, ANSWER), "messages", "messages 1 must be an object with 'role' and 'content'"),
    "null role": (messages({"role": None, "content": "Q"}), "messages", "messages 1 has role=null"),
    "unknown role": (messages({"role": "asistant", "content": ""}), "messages", 'messages 1 has role="asistant";'),
    "role as list": (messages({"role": ["user"], "content": ""}), "messages", "messages 1 has role="),
    "mixed turns": (messages(USER, {"from": "gpt", "value": "A"}), "messages", "messages 2 has role=null"),
    "JSON of an object": ({"messages": '{"role": "user"}'}, "messages", "'messages' must be a list"),
    "broken JSON": ({"messages": "[{"}, "messages", "'messages' must be a list, or JSON text of one, got \"[{\""),
    "null part": (messages({**USER, "content": [None]}), "messages", "a content part that is not text: null"),
    "image": (messages({**USER, "content": [{"type": "image"}]}), "messages", "a content part that is not text"),
    "no content": (messages({"role": "user"}), "messages", "messages 1 needs text in 'content', got null"),
    "two weights": (messages(USER, {**ANSWER, "weight": 0, "loss_weight": 1}), "messages", "messages 2: weight an"),
    "weight as text": (messages(USER, {**ANSWER, "loss_weight": "1"}), "messages", "loss_weight must be 0, 1, f"),
    "weight": (messages(USER, {**ANSWER, "weight": 0.5}), "messages", "messages 2: weight must be 0, 1, false or tru"),
    "weight of a question": (messages({**USER, "weight": 1}, ANSWER), "messages", "messages 1: weight must be 0 or f"),
    "mask": (messages(USER, {**ANSWER, "mask": 0}), "messages", "messages 2: mask=0 may mean that the turn is trained"),
    "lossMask": (messages(USER, {**ANSWER, "lossMask": 1}), "messages", "messages 2: lossMask=1 may mean"),
    "train_turn": (messages({**USER, "train_turn": False}, ANSWER), "messages", "messages 1: train_turn=false may"),
    "masked question": (messages({**USER, "masked": False}, ANSWER), "messages", "masked must be 1 or true in a"),
    "weight and masked": (messages(USER, {**ANSWER, "weight": 1, "masked": True}), "messages", "weight and masked di"),
    "part with a weight": (
        messages(USER, {**ANSWER, "content": [{"type": "text", "text": "A", "weight": 0}]}),
        "messages",
        "messages 2: weight of a content part selects parts",
    ),
    "short loss_mask": (messages(USER, ANSWER, loss_mask=[1]), "messages", "'loss_mask' has 1 number for 2 turns"),
    "loss_mask of a question": (messages(USER, ANSWER, loss_mask=[1, 1]), "messages", "number 1 must be 0 for a mess"),
    "loss_mask of floats": (messages(USER, ANSWER, loss_mask=[0, 0.5]), "messages", "number 2 must be 0 or 1, got 0.5"),
    "loss_mask as a number": (messages(USER, ANSWER, loss_mask=1), "messages", "'loss_mask' must be a list, got 1"),
    "loss_mask against a turn": (
        messages(USER, {**ANSWER, "train": False}, loss_mask=[0, 1]),
        "messages",
        "'loss_mask' trains turn 2, which is marked as not trained",
    ),
    "empty loss_mask": (messages(USER, ANSWER, loss_mask=[0, 0]), "messages", "every assistant turn is marked as not"),
    "two reasonings": (
        messages(USER, {**ANSWER, "content": [{"type": "reasoning", "value": "R"}], "reasoning_content": "R"}),
        "messages",
        "reasoning in 'content' and in 'reasoning_content'",
    ),
    "reasoning of a user": (
        messages({**USER, "content": [{"type": "reasoning", "value": "R"}]}, ANSWER),
        "messages",
        "a content part that is not text",
    ),
    "deep arguments": (
        messages(call(name="f", arguments='{"a":' * 300 + "1" + "}" * 300)),
        "messages",
        "messages 1 (arguments of f) is nested too deep; make it flatter than 200 levels",
    ),
    "half a pair": (
        {"conversation": [{"human": "Q", "assistant": "A"}, {"human": "Q"}]},
        "conversation",
        "conversation 2 must be an object with 'human' and 'assistant'",
    ),
    "null query": ({"query": None, "response": "A"}, "query_response", "'query' must be text, got null"),
    "no weight": (messages(USER, {**ANSWER, "weight": 0}), "messages", "every assistant turn is marked as not"),
    "call by user": (messages({**call(name="f"), "role": "user"}), "messages", "messages 1: tool_calls must be a"),
    "call as object": (messages({"role": "assistant", "tool_calls": {}}), "messages", "messages 1: tool_calls must be"),
    "call without name": (messages(call(arguments={})), "messages", "messages 1 has a tool call without a name"),
    "call is text": (messages({"role": "assistant", "tool_calls": ["f"]}), "messages", "messages 1 has a tool cal"),
    "arguments list": (messages(call(name="f", arguments=[1])), "messages", "arguments of f must be an object, go"),
    "arguments not JSON": (messages(call(name="f", arguments="{")), "messages", "messages 1 (arguments of f) must"),
    "long number": (messages(call(name="f", arguments="9" * 5000)), "messages", "messages 1 (arguments of f) must be"),
    "tools not JSON": (messages(USER, ANSWER, tools="{"), "messages", "'tools' must be JSON"),
    "tools object": (messages(USER, ANSWER, tools={"a": 1}), "messages", "'tools' must be a list of objects"),
    "two systems": (
        messages({"role": "system", "content": "T"}, USER, ANSWER, system="S"),
        "messages",
        "'system' and a system message in 'messages'; keep one",
    ),
    "system number": (messages(USER, ANSWER, system=7), "messages", "'system' must be text, got 7"),
    "no turns": (turns(), "sharegpt", "'conversations' is empty"),
    "unknown from": (turns(("bing", "Q")), "sharegpt", 'conversations 1 has from="bing"; known: system, dev'),
    "from as list": (turns((["gpt"], "Q")), "sharegpt", "conversations 1 has from="),
    "null value": (turns(("human", "Q"), ("gpt", None)), "sharegpt", "conversations 2 needs text in 'value', got null"),
    "turn as text": ({"conversations": ["Q"]}, "sharegpt", "conversations 1 must be an object with 'from' and 'value'"),
    "call not JSON": (turns(("function_call", "f(1)")), "sharegpt", "conversations 1 (function_call) must be JSON"),
    "call a number": (turns(("function_call", "7")), "sharegpt", "conversations 1 has a tool call without a name: 7"),
    "null output": ({"instruction": "Q", "output": None}, "alpaca", "'output' must be text, got null"),
    "number input": ({"instruction": "Q", "output": "A", "input": 7}, "alpaca", "'input' must be text, got 7"),
    "history": ({"instruction": "Q", "output": "A", "history": [["q"]]}, "alpaca", "history 1 must be a pair of texts"),
    "text and list": ({"prompt": "Q", "completion": [ANSWER]}, "prompt_completion", "must both be text or both be"),
    "completion without answer": (
        {"prompt": [USER], "completion": [USER]},
        "prompt_completion",
        "has no assistant turn",
    ),
    "null prompt": ({"prompt": None, "completion": "A"}, "prompt_completion", "'prompt' must be text, got null"),
    "null text": ({"text": None}, "text", "'text' must be text, got null"),
}


@pytest.mark.parametrize("row, shape, rule", FAULTS.values(), ids=FAULTS)
def test_an_unusable_row_is_refused_with_its_rule(row, shape, rule):
    with pytest.raises(RowFault) as fault:
        parse_row(row, shape_of(shape))
    assert rule in str(fault.value)
