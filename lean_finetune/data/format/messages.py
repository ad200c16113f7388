"""Messages, tool calls and tools in the form that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from lean_finetune.data.format.example import ROLES, Message, RowFault
from lean_finetune.data.format.row_values import is_given, parse_json, show, without_nulls
from lean_finetune.data.format.unread_columns import refuse_media

# OpenAI's former name of the role tool, and Gemma's of the role assistant.
OTHER_ROLES = {"function": "tool", "model": "assistant"}
# Whether a turn is trained, as 0 or 1 (OpenAI, ms-swift) and as true or false (axolotl, ms-swift).
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
SWITCH_KEYS = ("train", "training", "loss")
# Which characters of a turn are trained (axolotl).
DETAIL_KEYS = ("train_detail", "training_detail")
TEXT_PARTS, TEXT_KEYS = ("text", "input_text", "output_text"), ("text", "value", "content")
_USUAL_KEYS = {"role", "content"}


def parse_messages(given: list[Any], where: str) -> tuple[list[Message], frozenset[int]]:
    """The parsed messages, and the indices of assistant turns that are not trained.

    Raises RowFault if one of them is not a message.
    """
    messages: list[Message] = []
    context: list[int] = []
    for number, message in enumerate(given):
        is_context = False
        if not _is_plain(message):
            message, is_context = parse_message(message, f"{where} {number + 1}")
        messages.append(message)
        if is_context:
            context.append(number)
    return messages, frozenset(context)


def _is_plain(message: Any) -> bool:
    """Whether a message needs no parsing, as most."""
    if type(message) is not dict or message.keys() != _USUAL_KEYS:
        return False
    return type(message["content"]) is str and type(message["role"]) is str and message["role"] in ROLES


def parse_message(message: Any, where: str) -> tuple[Message, bool]:
    """The parsed message, and whether it is an assistant turn that is not trained.

    Raises RowFault if it is not a message, or holds what cannot be trained.
    """
    if not isinstance(message, dict):
        raise RowFault(f"{where} must be an object with 'role' and 'content', got {show(message)}; change it")
    role = message.get("role")
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        raise RowFault(
            f"{where} has role={show(message.get('role'))}; known: {', '.join((*ROLES, *OTHER_ROLES))}; change it"
        )
    refuse_media(message, where)
    parsed = {key: without_nulls(value) for key, value in message.items() if value is not None}
    parsed["role"] = role
    is_context = _pop_weights(parsed, role, where)
    calls = parsed.pop("tool_calls", None)
    if legacy := parsed.pop("function_call", None):
        if calls:
            raise RowFault(f"{where} has both tool_calls and function_call; keep one of them")
        calls = [legacy]
    if calls is not None and (not isinstance(calls, list) or (calls and role != "assistant")):
        raise RowFault(f"{where}: tool_calls must be a list in an assistant message, got {show(calls)}; change it")
    if calls:
        parsed["tool_calls"] = [parse_tool_call(call, where) for call in calls]
    parsed["content"] = "" if calls and "content" not in parsed else content_text(parsed.get("content"), where)
    return parsed, is_context


def _pop_weights(message: Message, role: str, where: str) -> bool:
    """Remove the keys that say whether a message is trained; return whether it is an untrained assistant turn."""
    for key in DETAIL_KEYS:
        if is_given(message.pop(key, None)):
            raise RowFault(
                f"{where}: {key} selects parts of a turn, but only complete turns can be trained; remove the row"
            )
    given = {key: message.pop(key) for key in (*WEIGHT_KEYS, *SWITCH_KEYS) if key in message}
    known: tuple[float, ...] = (0, 1) if role == "assistant" else (0,)
    for key, value in given.items():
        kinds = (bool,) if key in SWITCH_KEYS else (int, float)
        if type(value) not in kinds or value not in known:
            rule = " or ".join(json.dumps(kinds[0](number)) for number in known)
            raise RowFault(
                f"{where}: {key} must be {rule} in a message of role {role}, got {show(value)}; change or remove it"
            )
    if len(set(given.values())) > 1:
        raise RowFault(f"{where}: {' and '.join(given)} differ; keep one of them")
    return role == "assistant" and 0 in given.values()


def content_text(content: Any, where: str) -> str:
    """A message's text; a list of typed parts is joined when all parts are text. Raises RowFault if it is neither."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowFault(f"{where} needs text in 'content', got {show(content)}; change it")
    texts = []
    for part in content:
        # The text is in 'text', in some data sets in 'value' or 'content'; column formats fill the others with null.
        found = [part[key] for key in TEXT_KEYS if part.get(key) is not None] if isinstance(part, dict) else []
        if len(found) != 1 or not isinstance(found[0], str) or part.get("type") not in TEXT_PARTS:
            raise RowFault(f"{where} has a content part that is not text: {show(part)}; only text can be trained")
        texts += found
    return "".join(texts)


def parse_tool_call(call: Any, where: str) -> dict[str, Any]:
    """A tool call as {type, function: {name, arguments}}, given so or as the bare {name, arguments}.

    Raises RowFault if it has no name, or its arguments are not an object.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault(f"{where} has a tool call without a name: {show(call)}; add it")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where} (arguments of {function['name']})") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RowFault(f"{where}: arguments of {function['name']} must be an object, got {show(arguments)}; change it")
    others = {key: value for key, value in call.items() if key not in ("name", "arguments", "function")}
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
        tools = parse_json(tools, "'tools'") if tools.strip() else None
    else:
        tools = without_nulls(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowFault(f"'tools' must be a list of objects, got {show(tools)}; change it")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
