"""Conversations as turns: roles, contents and tool calls, whatever names a row gives them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import ROLES, Message
from lean_finetune.data.format.given_images import IMAGE, IMAGE_PARTS, OTHER_PARTS, ImageContent
from lean_finetune.data.format.row_values import is_given, list_or_nothing, parse_json, parse_text, show
from lean_finetune.data.format.unread_columns import TRAINED_KEYS, looks_like_mark, pop_marks, refuse_media

CALL = "tool_call"
"""Role of a turn whose text is the JSON of the assistant's tool calls."""
ROLE_NAMES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"},
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys((CALL, "function_call"), CALL),
}
"""Each known name and its role, CALL included. Case does not matter."""
ROLES_KEY = "roles"
"""Key of data.columns whose value maps other names of roles to known ones."""
ROLE_KEYS = ("role", "from")
_TURN_LISTS = (
    *("messages", "conversations", "conversation", "prompt", "completion", "chosen", "rejected"),
    "rejected_response",
)


def role_of(name: Any, key: str, where: str) -> str:
    """The role of a name, which the turn has under `key`. Raises RowFault if it is unknown."""
    role = ROLE_NAMES.get(name) or ROLE_NAMES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowFault(
            f"{where} has {key}={show(name)}; known: {', '.join(ROLE_NAMES)}; change it, or map it in data.columns, "
            "such as {roles: {name: assistant}}"
        )
    return role


def with_roles(row: Mapping[str, Any], roles: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with the names of roles that `roles` maps replaced in its lists of turns."""
    changed = {key: [_renamed(turn, roles) for turn in row[key]] for key in _TURN_LISTS if type(row.get(key)) is list}
    single = {key: _renamed(row[key], roles) for key in _TURN_LISTS if type(row.get(key)) is dict}
    return {**row, **changed, **single}


def _renamed(turn: Any, roles: Mapping[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    names = {key: turn[key] for key in ROLE_KEYS if isinstance(turn.get(key), str)}
    return {**turn, **{key: roles.get(name) or roles.get(name.strip().lower(), name) for key, name in names.items()}}


# The content of a turn: text, typed parts, and the results of tools.

TEXT_PARTS, TEXT_KEYS = ("text", "input_text", "output_text"), ("text", "value", "content")
# Parts of an answer, as LLaMA-Factory and gpt-oss write them.
REASONING_PARTS, REASONING_PART_KEYS = ("reasoning", "thinking"), ("value", "text", "thinking", "reasoning")
CALL_PARTS, CALL_PART_KEYS = ("tool_call",), ("value", "tool_call")
_PARTS = (*TEXT_PARTS, *OTHER_PARTS)
REASONING = "reasoning_content"
"""The message key that reasoning parts become."""


class _Parts(NamedTuple):
    """What the parts of a content have beside text."""

    calls: Sequence[Any] = ()
    others: Sequence[ImageContent] = ()


def read_content(message: Message, role: str, where: str, text_key: str) -> _Parts:
    """Replace a message's content by its text and its reasoning; return the tool calls and others of its parts.

    The text has an `IMAGE` for each of these. `text_key` is the row's name of the content. Raises RowFault if the
    content has something else than text and what models take beside it.
    """
    content = message.get("content")
    if isinstance(content, str):
        return _Parts()
    if role == "tool" and not _is_parts(content):
        message["content"] = "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
        return _Parts()
    if not isinstance(content, list):
        raise RowFault(f"{where} needs text in {text_key!r}, got {show(content)}; change it")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    others: list[ImageContent] = []
    for part in content:
        _refuse_marks(part, where)
        if (text := _value(part, TEXT_PARTS, TEXT_KEYS)) is not None:
            texts.append(text)
        elif role == "assistant" and (text := _value(part, REASONING_PARTS, REASONING_PART_KEYS)) is not None:
            reasoning.append(text)
        elif role == "assistant" and (text := _value(part, CALL_PARTS, CALL_PART_KEYS)) is not None:
            found = parse_json(text, f"{where} (tool_call)")
            calls += found if isinstance(found, list) else [found]
        elif isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            texts.append(IMAGE)
            others.append(ImageContent(where=where, part=part))
        else:
            raise RowFault(f"{where} {not_text(part)}; only text can be trained")
    if reasoning and message.get(REASONING):
        raise RowFault(f"{where} has reasoning in 'content' and in {REASONING!r}; keep one of them")
    if reasoning:
        message[REASONING] = "".join(reasoning)
    message["content"] = "".join(texts)
    return _Parts(calls, others)


def not_text(part: Any) -> str:
    """How faults call a content part that is not text."""
    return f"has a content part that is not text: {show(part)}"


def _value(part: Any, kinds: tuple[str, ...], keys: tuple[str, ...]) -> str | None:
    """The text of a part of one of these kinds; None for another part.

    It is in one of `keys`, by data set. Column formats fill the others with null.
    """
    if not isinstance(part, dict) or part.get("type") not in kinds:
        return None
    found = [part[key] for key in keys if part.get(key) is not None]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def _is_parts(content: Any) -> bool:
    """Whether content is a list of typed parts, or an empty one; another list is the result of a tool."""
    return isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in _PARTS for part in content)


def _refuse_marks(part: Any, where: str) -> None:
    """Refuse a part that is marked as trained or not (Axolotl), since its turn is trained completely or not at all."""
    if isinstance(part, dict) and len(part) > 2:
        for key, value in part.items():
            if looks_like_mark(key, value) and not (key in TRAINED_KEYS and value == 1):
                raise RowFault(
                    f"{where}: {key} of a content part selects parts of a turn, but only complete turns can be "
                    "trained; remove it, or the row"
                )


# Messages, tool calls and tools in the form that chat templates expect.

KNOWN_KEYS = {
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking", "channel", "refusal"),
}
"""Keys of a parsed message that we know. Others reach the template too, and are named once for each source."""
_USUAL_KEYS = {"role", "content"}
_SHAREGPT_KEYS = {"from", "value"}
_CALL_KEYS = {"role", "content", "tool_calls"}
_PAIR_KEYS = ("human", "assistant")
# Names that other formats give to the arguments of a call.
_ARGUMENT_KEYS = ("parameters", "args", "kwargs", "input", "params", "argument")
_FUNCTION_KEYS = ("name", "arguments", "function")


@dataclass(kw_only=True)
class Turns:
    """The parsed turns of a row."""

    messages: list[Message] = field(default_factory=list)
    context: frozenset[int] = frozenset()
    """Indices in `messages` of assistant turns that are not trained."""
    calls: frozenset[int] = frozenset()
    """Indices in `messages` of turns of which only tool calls were given, as with role tool_call."""
    others: tuple[ImageContent, ...] = ()
    """Of all content parts, in the order of the messages."""

    def joined(self) -> "Turns":
        """The turns with each turn of calls joined to the assistant's text or calls before it: one answer.

        Raises RowFault if only a part of an answer is trained.
        """
        if not self.calls:
            return self
        messages: list[Message] = []
        context: set[int] = set()
        before = None  # Number of the turn before, if it is the assistant's.
        for number, message in enumerate(self.messages):
            is_bare_call = number in self.calls and message.keys() == _CALL_KEYS
            if is_bare_call and before is not None and (before in self.context) != (number in self.context):
                raise RowFault(
                    f"turns {before + 1} and {number + 1} are one answer with its tool calls, and only one of them is "
                    "trained; mark both or none"
                )
            if is_bare_call and before is not None:
                calls = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
                messages[-1] = {**messages[-1], "tool_calls": calls}
            else:
                if number in self.context:
                    context.add(len(messages))
                messages.append(message)
            before = number if message["role"] == "assistant" else None
        return Turns(messages=messages, context=frozenset(context), others=self.others)


def parse_turns(given: list[Any], where: str) -> Turns:
    """The turns of a list of {role, content}, of {from, value}, or of {human, assistant}: the first one decides.

    Raises RowFault if one of them is not a turn.
    """
    first = given[0] if given and isinstance(given[0], dict) else {}
    if all(key in first for key in _PAIR_KEYS):
        first = {"role": "user"}
        given = [turn for number, pair in enumerate(given) for turn in _pair(pair, f"{where} {number + 1}", number)]
    is_sharegpt = first.get("role") is None and (first.get("from") is not None or where == "conversations")
    role_key, text_key = ("from", "value") if is_sharegpt else ("role", "content")
    messages: list[Message] = []
    context: list[int] = []
    calls: list[int] = []
    others: list[ImageContent] = []
    for number, message in enumerate(given):
        if is_sharegpt and (plain := _plain_sharegpt(message)) is not None:
            message = plain
        elif not _is_plain(message):
            parsed = parse_message(message, f"{where} {number + 1}", role_key, text_key)
            message = parsed.message
            others += parsed.others
            if parsed.is_context:
                context.append(number)
            if parsed.is_call:
                calls.append(number)
        _refuse_parts_as_text(message, f"{where} {number + 1}")
        messages.append(message)
    return Turns(messages=messages, context=frozenset(context), calls=frozenset(calls), others=tuple(others))


def _refuse_parts_as_text(message: Message, where: str) -> None:
    """Refuse a content that is text of typed parts, as in a table. The result of a tool may be such text."""
    content = message["content"]
    if content[:1] == "[" and message["role"] != "tool" and (parts := list_or_nothing(content)) and _is_parts(parts):
        raise RowFault(f"{where} has a list of content parts as text: {show(content)}; write it as a list")


def unknown_keys(messages: list[Message]) -> set[str]:
    """Keys of messages that we do not know."""
    return {key for message in messages if len(message) > len(_USUAL_KEYS) for key in message.keys() - KNOWN_KEYS}


def _is_plain(message: Any) -> bool:
    """Whether a message needs no parsing, as most."""
    if type(message) is not dict or message.keys() != _USUAL_KEYS:
        return False
    return type(message["content"]) is str and type(message["role"]) is str and message["role"] in ROLES


def _plain_sharegpt(turn: Any) -> Message | None:
    """The message of a turn of text without other keys, as most; None for another turn."""
    if type(turn) is not dict or turn.keys() != _SHAREGPT_KEYS:
        return None
    sender, value = turn["from"], turn["value"]
    role = ROLE_NAMES.get(sender) if type(sender) is str else None
    return {"role": role, "content": value} if type(value) is str and role in ROLES else None


def _pair(pair: Any, where: str, number: int) -> list[Any]:
    """The turns of a pair. Its other keys belong to the answer, but `system` of the first pair is a turn."""
    if not isinstance(pair, dict) or not all(key in pair for key in _PAIR_KEYS):
        raise RowFault(f"{where} must be an object with 'human' and 'assistant', got {show(pair)}; change it")
    others = {key: value for key, value in pair.items() if key not in _PAIR_KEYS}
    question, answer = ({"role": role, "content": pair[role]} for role in _PAIR_KEYS)
    system = others.pop("system", None)
    if number and is_given(system):
        raise RowFault(f"{where} has 'system'; only the first pair can have one, in front of the conversation")
    start = [{"role": "system", "content": system}] if is_given(system) else []
    return [*start, question, {**others, **answer}]


class _Parsed(NamedTuple):
    message: Message
    is_context: bool
    """Whether it is an assistant turn that is not trained."""
    is_call: bool
    """Whether its role says that its text is tool calls."""
    others: Sequence[ImageContent]


def parse_message(message: Any, where: str, role_key: str = "role", text_key: str = "content") -> _Parsed:
    """The message of a turn. Raises RowFault if it is not a turn, or holds what cannot be trained."""
    if not isinstance(message, dict):
        raise RowFault(f"{where} must be an object with {role_key!r} and {text_key!r}, got {show(message)}; change it")
    role = role_of(message.get(role_key), role_key, where)
    refuse_media(message, where)
    if role_key != "role" and message.get("content") is not None and message.get(text_key) is not None:
        raise RowFault(f"{where} has both {text_key!r} and 'content'; keep one of them")
    names = {role_key: "role", text_key: "content"}
    parsed: Message = {
        names[key] if key in names else key: value for key, value in message.items() if value is not None
    }
    is_call = role == CALL
    calls: Any = None
    if is_call:
        calls = parsed.pop("content", None)
        calls = parse_json(calls, f"{where} ({message[role_key]})") if isinstance(calls, str) else calls
        calls = calls if isinstance(calls, list) else [calls]
        role, parsed["content"] = "assistant", ""
    parsed["role"] = role
    is_context = pop_marks(parsed, role, where)
    given = parsed.pop("tool_calls", None)
    calls = calls if is_call else given
    if legacy := parsed.pop("function_call", None):
        if calls:
            raise RowFault(f"{where} has both tool_calls and function_call; keep one of them")
        calls = [legacy]
    if calls is not None and (not isinstance(calls, list) or (calls and role != "assistant")):
        raise RowFault(f"{where}: tool_calls must be a list in an assistant message, got {show(calls)}; change it")
    if calls and "content" not in parsed:
        parsed["content"] = ""
    parts = read_content(parsed, role, where, text_key)
    if calls and parts.calls:
        raise RowFault(f"{where} has tool calls in 'content' and in 'tool_calls'; keep one of them")
    if calls := calls or parts.calls:
        parsed["tool_calls"] = [parse_tool_call(call, where) for call in calls]
    return _Parsed(parsed, is_context, is_call, parts.others)


def parse_tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as {type, function: {name, arguments}}, given so or as the bare {name, arguments}.

    Raises RowFault if it has no name, or its arguments are not an object.
    """
    function = call if isinstance(call, dict) else None
    if function is not None and function.get("function") is not None:
        function = function["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault(f"{where} has a tool call without a name: {show(call)}; add it")
    arguments = function.get("arguments")
    if arguments is None and (found := [key for key in _ARGUMENT_KEYS if is_given(function.get(key) or call.get(key))]):
        raise RowFault(f"{where}: the call of {function['name']} has {found[0]!r}; rename it 'arguments'")
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where} (arguments of {function['name']})") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RowFault(f"{where}: arguments of {function['name']} must be an object, got {show(arguments)}; change it")
    others = {key: value for key, value in call.items() if key not in _FUNCTION_KEYS and value is not None}
    return {"type": "function", **others, "function": {"name": function["name"], "arguments": arguments}}


def parse_tools(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's tools as {type, function: {...}}, from a list or its JSON text; None when there are none.

    `functions` is OpenAI's former name of `tools`. Raises RowFault if they are something else.
    """
    tools = row.get("tools")
    if is_given(row.get("functions")):
        if is_given(tools):
            raise RowFault("'tools' and 'functions'; keep one of them")
        tools = row["functions"]
    if tools is None:
        return None
    if isinstance(tools, str):
        tools = parse_text(tools, "'tools'") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowFault(f"'tools' must be a list of objects, got {show(tools)}; change it")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
