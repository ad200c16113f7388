"""One message, tool call or list of tools, as chat templates expect it."""

from collections.abc import Mapping
from typing import Any

from stages.tokenize.example import ROLES, Message, RowFault
from stages.tokenize.faults import json_of, show, without_nulls

KNOWN_ROLES = ", ".join(("system", "developer", "user", "assistant", "tool"))
WEIGHT_KEYS = ("weight", "loss_weight")
_USUAL_KEYS = {"role", "content"}


def parse_turns(given: list[Any], where: str) -> tuple[list[Message], frozenset[int]]:
    """Messages, and the places of assistant turns that are not trained.

    Raises:
        RowFault: one of them is no message.
    """
    messages: list[Message] = []
    context: list[int] = []
    for number, message in enumerate(given):
        # Most messages are just this; they are taken as they are.
        if (
            type(message) is dict
            and message.keys() == _USUAL_KEYS
            and type(message["content"]) is str
            and type(message["role"]) is str
            and message["role"] in ROLES
        ):
            messages.append(message)
            continue
        parsed, is_context = _unusual_message(message, f"{where} {number + 1}")
        messages.append(parsed)
        if is_context:
            context.append(number)
    return messages, frozenset(context)


def _unusual_message(message: Any, where: str) -> tuple[Message, bool]:
    """A message with other keys, typed content or tool calls; and whether it is an assistant turn of weight 0."""
    if not isinstance(message, dict):
        raise RowFault(f"{where} must be an object with 'role' and 'content', got {show(message)}; change it")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowFault(f"{where} has role={show(role)}; known: {KNOWN_ROLES}; change it")
    parsed = {key: without_nulls(value) for key, value in message.items() if value is not None}
    is_context = take_weight_0(parsed, role, where)
    calls = parsed.pop("tool_calls", None)
    if calls is not None and (not isinstance(calls, list) or (calls and role != "assistant")):
        raise RowFault(f"{where}: tool_calls must be a list in an assistant message, got {show(calls)}; change it")
    if calls:
        parsed["tool_calls"] = [tool_call(call, where) for call in calls]
    parsed["content"] = "" if calls and "content" not in parsed else content_text(parsed.get("content"), where)
    return parsed, is_context


def take_weight_0(message: Message, role: str, where: str) -> bool:
    """Take an optional weight from a message; whether it makes an assistant turn one that is not trained.

    Raises:
        RowFault: it is neither 0 nor 1: a token is either trained or not, so a fraction could not be followed.
    """
    weights = {key: message.pop(key) for key in WEIGHT_KEYS if key in message}
    if not weights:
        return False
    known = (0, 1) if role == "assistant" else (0,)
    for key, weight in weights.items():
        if weight is not None and (type(weight) not in (int, float) or weight not in known):
            raise RowFault(
                f"{where}: {key} must be {' or '.join(map(str, known))} in a message of role {role}, got "
                f"{show(weight)}; change or remove it"
            )
    if len(values := {weight for weight in weights.values() if weight is not None}) > 1:
        raise RowFault(f"{where}: weight and loss_weight differ; keep one of them")
    return role == "assistant" and values == {0}


def content_text(content: Any, where: str) -> str:
    """A message's text; typed parts are joined when all are text.

    Raises:
        RowFault: it is neither text nor such parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowFault(f"{where} needs text in 'content', got {show(content)}; change it")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowFault(f"{where} has a content part that is not text: {show(part)}; only text can be trained")
        texts.append(part["text"])
    return "".join(texts)


def tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as {type, function: {name, arguments: object}}, from that or from the bare {name, arguments}.

    Raises:
        RowFault: it has no name, or arguments that are no object.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault(f"{where} has a tool call without a name: {show(call)}; add it")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_of(arguments, f"{where} (arguments of {function['name']})") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RowFault(f"{where}: arguments of {function['name']} must be an object, got {show(arguments)}; change it")
    kept = {key: value for key, value in call.items() if key not in ("name", "arguments", "function")}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The row's tools as {type, function: {...}}, from a list or a JSON string of one; None when there are none.

    Raises:
        RowFault: they are something else.
    """
    tools = row.get("tools")
    if tools is None:
        return None
    if isinstance(tools, str):
        tools = json_of(tools, "'tools'") if tools.strip() else None
    else:
        tools = without_nulls(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowFault(f"'tools' must be a list of objects, got {show(tools)}; change it")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
