"""Rows with tools, reasoning and several turns, in which each text is found again by a word of its own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, SourceFormat, detect_format
from lean_finetune.data.format.row_formats import parse_row

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zqtool",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "A number."}, "b": {"type": "string"}},
                "required": ["a"],
            },
        },
    }
]


def synthetic_rows() -> Iterator[tuple[str, Conversation]]:
    """Conversations by name. `zqa`, `zqc` and `zqr` begin a word of an answer, call and reasoning, `zqp` of a prompt.

    The number behind it is that of the message.
    """
    system, ask, tool = _prompt("system"), _prompt("user"), _prompt("tool")
    say, call, calls = _answer(), _answer(text="", calls=1), _answer(text="First, zqa{n}.", calls=2)
    think, think_call = _answer(reasoning=True), _answer(text="", calls=1, reasoning=True)
    tagged = _answer(text="<think>\nSo zqr{n}.\n</think>\n\nIt is zqa{n}.")
    developer, bare_call = _prompt("developer"), _answer(text="", calls=1, arguments=False)
    bare_think_call = _answer(text="", calls=1, arguments=False, reasoning=True)
    bare_result = {"role": "tool", "content": "{p} zqp{n}?"}
    say_call, think_say_call = (_answer(text="First, zqa{n}.", calls=1, reasoning=thinks) for thinks in (False, True))
    kinds: dict[str, tuple[Sequence[dict[str, Any]], bool]] = {
        "one turn": ((ask, say), False),
        "two turns": ((ask, say, ask, say), False),
        "a system prompt, three turns": ((system, ask, say, ask, say, ask, say), False),
        "blanks around text": ((ask, _answer(text=" zqa{n} \n"), ask, _answer(text="\nzqa{n}  ")), False),
        "equal answers": ((ask, _answer(text="Yes"), ask, _answer(text="Yes")), False),
        "control tokens as text": ((ask, _answer(text="Use <|im_end|> and </s>, zqa{n}"), ask, say), False),
        "a first turn that is not trained": ((ask, say, ask, say), False),
        "tools not called": ((ask, say, ask, say), True),
        "a call": ((ask, call), True),
        "a call and its result": ((ask, call, tool, say), True),
        "a call behind an answer": ((system, ask, say, ask, call, tool, say), True),
        "two calls with text, and another question": ((ask, calls, tool, tool, say, ask, say), True),
        "calls one after the other": ((ask, call, tool, call, tool, say), True),
        "reasoning": ((ask, think), False),
        "reasoning in two turns": ((ask, think, ask, think), False),
        "reasoning and calls": ((ask, think_call, tool, think, ask, think), True),
        "reasoning in tags": ((ask, tagged), False),
        "reasoning in tags in two turns": ((ask, tagged, ask, tagged), False),
        "text beside a call": ((ask, say_call, tool, say), True),
        "text beside a call without a result": ((ask, say_call), True),
        "reasoning and text beside a call": ((ask, think_say_call, tool, think), True),
        "two answers in a row": ((ask, say, say), False),
        "two answers in a row, and another question": ((ask, say, say, ask, say), False),
        "three answers in a row": ((ask, say, say, say), False),
        "two answers in a row, the first not trained": ((ask, say, say), False),
        "two answers in a row, the second not trained": ((ask, say, say, ask, say), False),
        "an answer and a call in a row": ((ask, say, call, tool, say), True),
        "a call and an answer in a row": ((ask, call, say), True),
        "two calls in a row": ((ask, call, call, tool, tool, say), True),
        "two answers with reasoning in a row": ((ask, think, think), False),
        "two answers behind a result": ((ask, call, tool, say, say), True),
        "two questions in a row": ((ask, ask, say), False),
        "a greeting": ((say, ask, say), False),
        "a system prompt between turns": ((ask, say, system, ask, say), False),
        "a developer's message": ((developer, ask, say), False),
        "a call without arguments": ((ask, bare_call, tool, say), True),
        "results without names": ((ask, think_call, bare_result, say, ask, bare_think_call, bare_result, think), True),
    }
    for name, (turns, has_tools) in kinds.items():
        messages = [_numbered(turn, number) for number, turn in enumerate(turns)]
        for number, message in enumerate(messages):
            if message["role"] == "tool":
                calls_made = [made for one in messages[:number] for made in one.get("tool_calls", ())]
                answered = sum(one["role"] == "tool" for one in messages[:number])
                message["tool_call_id"] = calls_made[answered]["id"]
        untrained = [2] if "the second not trained" in name else [1] if "not trained" in name else []
        context = frozenset(untrained)
        yield name, Conversation(messages=messages, tools=TOOLS if has_tools else None, context=context)


def public_rows(path: Path, count: int) -> Iterator[tuple[str, Conversation]]:
    """The first conversations of a JSON file, in whatever format its rows have, without rows that are refused."""
    for number, row in enumerate(orjson.loads(path.read_bytes())[:count]):
        try:
            example = parse_row(row, SourceFormat(format=detect_format(row, {})[0], columns={}))
        except RowFault:
            continue
        if isinstance(example, Conversation):
            yield f"{path.stem} {number + 1}", example


def _prompt(role: str) -> dict[str, Any]:
    others = {"name": "zqtool"} if role == "tool" else {}
    return {"role": role, "content": "{p} zqp{n}?", **others}


def _answer(
    *, text: str = "It is zqa{n}.", calls: int = 0, reasoning: bool = False, arguments: bool = True
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = "So zqr{n}."
    if calls:
        message["tool_calls"] = [
            {
                "id": f"c1B2c3D{{n}}{number}",
                "type": "function",
                "function": {
                    "name": "zqtool",
                    "arguments": {"a": number, "b": f"zqc{{n}}x{number}"} if arguments else {},
                },
            }
            for number in range(calls)
        ]
    return message


def _numbered(value: Any, number: int) -> Any:
    """A copy whose texts have the message's number."""
    if isinstance(value, str):
        return value.replace("{n}", str(number)).replace("{p}", "What")
    if isinstance(value, dict):
        return {key: _numbered(item, number) for key, item in value.items()}
    return [_numbered(item, number) for item in value] if isinstance(value, list) else value
