"""Shapes of a row, and what each becomes: a conversation for the chat template, or plain text."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.files import sha256_json

ROLES = ("system", "developer", "user", "assistant", "tool")
ASKING_ROLES = ("user", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
# The keys by which `auto` knows a shape, in the order in which it looks.
SHAPE_KEYS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}

Message = dict[str, Any]


class RowFault(Exception):
    """What is wrong with a row, without its place, which the caller knows."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row for the chat template; every assistant turn but those in `context` is trained."""

    messages: list[Message]
    tools: list[Any] | None
    context: frozenset[int] = frozenset()
    """Places in `messages` of assistant turns that are shown but not trained (weight 0)."""

    def trained_turns(self) -> list[int]:
        """Places in `messages` of the turns that are trained."""
        return [n for n in self.turns() if n not in self.context]

    def turns(self) -> list[int]:
        """Places in `messages` of the assistant's turns."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt_key(self) -> str:
        """Hex sha256 of all before the first answer, which a conversation shares with all it begins with or goes on to.

        A greeting that nobody asked for is part of that; a row where nobody asks is told by the whole of it.
        """
        asked = next((n for n, message in enumerate(self.messages) if message["role"] in ASKING_ROLES), math.inf)
        first = next((n for n in self.turns() if n > asked), None)
        return sha256_json({"messages": self.messages[:first], "tools": self.tools})

    def has_empty_answer(self) -> bool:
        """Whether a trained turn says and calls nothing, so that only its end would be learnt."""
        return any(_says_nothing(self.messages[n]) for n in self.trained_turns())


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A row without a chat template: `completion` and the end-of-sequence token are trained."""

    prompt: str
    completion: str

    def prompt_key(self) -> str:
        """Hex sha256 of the prompt, or of the text where there is none."""
        return sha256_json({"prompt": self.prompt} if self.prompt else {"text": self.completion})

    def has_empty_answer(self) -> bool:
        """Whether only the end of the text would be learnt."""
        return not self.completion.strip()


def _says_nothing(message: Message) -> bool:
    """Whether a message has neither text nor tool calls nor anything else (such as reasoning) for the template."""
    others = message.keys() - {"role", "name", "content"}
    return not message["content"].strip() and not any(message[key] for key in others)


def detect_format(row: Mapping[str, Any]) -> tuple[str, str]:
    """The first shape whose keys the row has, and the reason.

    Raises:
        RowFault: the row has no known shape.
    """
    for shape, keys in SHAPE_KEYS.items():
        if all(key in row for key in keys):
            return shape, f"the first row has {' and '.join(keys)}"
    known = "; ".join(f"{shape}: {', '.join(keys)}" for shape, keys in SHAPE_KEYS.items())
    raise RowFault(f"data.format auto knows no shape with the keys {_keys(row)}; rename them to one of ({known})")


def parse_row(row: Mapping[str, Any], shape: str) -> Conversation | Plain:
    """Read a row of the given shape.

    Raises:
        RowFault: a key is missing, has the wrong type, or there is nothing to train on.
    """
    parsers: dict[str, Callable[[Mapping[str, Any]], Conversation | Plain]] = {
        "messages": _parse_messages,
        "sharegpt": _parse_sharegpt,
        "alpaca": _parse_alpaca,
        "prompt_completion": lambda row: Plain(prompt=_text(row, "prompt"), completion=_text(row, "completion")),
        "text": lambda row: Plain(prompt="", completion=_text(row, "text")),
    }
    missing = [key for key in SHAPE_KEYS[shape] if key not in row]
    if missing:
        raise RowFault(f"a row of data.format {shape} needs {missing[0]!r}; this one has {_keys(row)}; add it")
    example = parsers[shape](row)
    if isinstance(example, Conversation) and not example.trained_turns():
        found = "every assistant turn has weight 0" if example.context else "no assistant turn"
        raise RowFault(f"{found}, so nothing to train on; remove the row or add one")
    return example


def row_family(row: Mapping[str, Any]) -> str | None:
    """The row's task family, if it names one.

    Raises:
        RowFault: `family` is neither text nor null.
    """
    family = row.get("family")
    if family is not None and not isinstance(family, str):
        raise RowFault(f"'family' must be text, got {_show(family)}")
    return family


def _parse_alpaca(row: Mapping[str, Any]) -> Conversation:
    """instruction, input, output, and where present system and history (pairs of earlier turns)."""
    messages = _system(row)
    for number, pair in enumerate(_list(row, "history"), start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowFault(f"history {number} must be a pair of texts, got {_show(pair)}")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    instruction = _text(row, "instruction")
    given = row.get("input")
    if given is not None and not isinstance(given, str):
        raise RowFault(f"'input' must be text, got {_show(given)}")
    messages.append({"role": "user", "content": "\n".join(part for part in (instruction, given) if part)})
    messages.append({"role": "assistant", "content": _text(row, "output")})
    return Conversation(messages=messages, tools=None)


def _parse_sharegpt(row: Mapping[str, Any]) -> Conversation:
    """Conversations of {from, value}, with function_call and observation turns, system and tools."""
    messages = _system(row)
    for number, turn in enumerate(_list(row, "conversations"), start=1):
        where = f"conversations {number}"
        if not isinstance(turn, dict):
            raise RowFault(f"{where} must be an object with 'from' and 'value', got {_show(turn)}")
        role = turn.get("from")
        if not isinstance(role, str) or role not in SHAREGPT_ROLES:
            raise RowFault(f"{where} has from={_show(role)}; known: {', '.join(SHAREGPT_ROLES)}")
        value = turn.get("value")
        if not isinstance(value, str):
            raise RowFault(f"{where} needs text in 'value', got {_show(value)}")
        if SHAREGPT_ROLES[role] == "call":
            calls = _parse_json(value, f"{where} ({role})")
            calls = [_tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            messages.append({"role": SHAREGPT_ROLES[role], "content": value})
    return Conversation(messages=messages, tools=_tools(row))


def _parse_messages(row: Mapping[str, Any]) -> Conversation:
    """System, tools, messages of {role, content, tool_calls, weight}; other keys reach the template as they are."""
    system = _system(row)
    given = [_message(message, f"messages {n}") for n, message in enumerate(_list(row, "messages"), start=1)]
    if system and any(message["role"] in ("system", "developer") for message in given):
        raise RowFault("'system' and a system message in 'messages'; keep one of them")
    untrained = [_takes_weight_0(message, f"messages {n}") for n, message in enumerate(given, start=1)]
    context = frozenset(len(system) + n for n, found in enumerate(untrained) if found)
    return Conversation(messages=system + given, tools=_tools(row), context=context)


def _takes_weight_0(message: Message, where: str) -> bool:
    """Take an optional weight from a message; whether it makes an assistant turn one that is not trained."""
    weight = message.pop("weight", None)
    known = (0, 1) if message["role"] == "assistant" else (0,)
    if weight is not None and (type(weight) is not int or weight not in known):
        raise RowFault(
            f"{where}: weight must be {' or '.join(map(str, known))} in a message of role {message['role']}, "
            f"got {_show(weight)}; change or remove it"
        )
    return message["role"] == "assistant" and weight == 0


def _message(message: Any, where: str) -> Message:
    """One message with text content, and arguments of tool calls as objects."""
    if not isinstance(message, dict):
        raise RowFault(f"{where} must be an object with 'role' and 'content', got {_show(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise RowFault(f"{where} has role={_show(role)}; known: {', '.join(ROLES)}")
    parsed = dict(message)
    calls = parsed.pop("tool_calls", None)
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise RowFault(f"{where}: tool_calls must be a list in an assistant message, got {_show(calls)}")
    if calls:
        parsed["tool_calls"] = [_tool_call(call, where) for call in calls]
    parsed["content"] = "" if calls and message.get("content") is None else _content(message.get("content"), where)
    return parsed


def _content(content: Any, where: str) -> str:
    """A message's text; typed parts are joined when all are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowFault(f"{where} needs text in 'content', got {_show(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowFault(f"{where} has a content part that is not text: {_show(part)}; only text can be trained")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as {type, function: {name, arguments: object}}, from that or from the bare {name, arguments}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault(f"{where} has a tool call without a name: {_show(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, f"{where} (arguments of {function['name']})")
    if not isinstance(arguments, dict):
        raise RowFault(f"{where}: arguments of {function['name']} must be an object, got {_show(arguments)}")
    kept = {key: value for key, value in call.items() if key not in ("name", "arguments", "function")}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's tools as {type, function: {...}}, from a list or a JSON string of one; None when there are none."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _parse_json(tools, "'tools'") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowFault(f"'tools' must be a list of objects, got {_show(tools)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _system(row: Mapping[str, Any]) -> list[Message]:
    """The system message of a row that has a `system` text, in a list."""
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise RowFault(f"'system' must be text, got {_show(system)}")
    return [{"role": "system", "content": system}] if system else []


def _text(row: Mapping[str, Any], key: str) -> str:
    """A text value."""
    value = row[key]
    if not isinstance(value, str):
        raise RowFault(f"{key!r} must be text, got {_show(value)}")
    return value


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    """A list value; an absent or null one is empty."""
    value = row.get(key)
    if value is not None and not isinstance(value, list):
        raise RowFault(f"{key!r} must be a list, got {_show(value)}")
    return value or []


def _parse_json(text: str, where: str) -> Any:
    """The value of a JSON string inside a row."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        raise RowFault(f"{where} must be JSON, got {_show(text)}") from None


def _keys(row: Mapping[str, Any]) -> str:
    """A row's keys for a message."""
    return _show(list(row))


def _show(value: Any) -> str:
    """A value for a message, cut to stay readable."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
