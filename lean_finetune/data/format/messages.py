"""One message, tool call or list of tools, as chat templates expect it."""

import json
from collections.abc import Mapping
from typing import Any

from lean_finetune.data.format.example import ROLES, Message, RowFault
from lean_finetune.data.format.row_values import json_of, show, without_nulls
from lean_finetune.data.format.unread_columns import is_given, refuse_media

# OpenAI's old name of tool results, and Gemma's of the assistant.
OTHER_ROLES = {"function": "tool", "model": "assistant"}
KNOWN_ROLES = ", ".join(("system", "developer", "user", "assistant", "tool", *OTHER_ROLES))
# Whether a turn is trained, as 0 or 1 (OpenAI, ms-swift) and as true or false (axolotl, ms-swift).
WEIGHT_KEYS = ("weight", "loss_weight", "loss_scale")
SWITCH_KEYS = ("train", "training", "loss")
# Which characters of a turn are trained (axolotl).
DETAIL_KEYS = ("train_detail", "training_detail")
TEXT_PARTS, TEXT_KEYS = ("text", "input_text", "output_text"), ("text", "value", "content")
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
        parsed, is_context = parse_message(message, f"{where} {number + 1}")
        messages.append(parsed)
        if is_context:
            context.append(number)
    return messages, frozenset(context)


def parse_message(message: Any, where: str) -> tuple[Message, bool]:
    """A message with other keys, typed content or tool calls; and whether it is an assistant turn that is not trained.

    Raises:
        RowFault: it is no message, or holds what cannot be trained.
    """
    if not isinstance(message, dict):
        raise RowFault(f"{where} must be an object with 'role' and 'content', got {show(message)}; change it")
    role = message.get("role")
    role = OTHER_ROLES.get(role, role) if isinstance(role, str) else None
    if role not in ROLES:
        raise RowFault(f"{where} has role={show(message.get('role'))}; known: {KNOWN_ROLES}; change it")
    refuse_media(message, where)
    parsed = {key: without_nulls(value) for key, value in message.items() if value is not None}
    parsed["role"] = role
    is_context = _take_untrained(parsed, role, where)
    calls = parsed.pop("tool_calls", None)
    if legacy := parsed.pop("function_call", None):
        if calls:
            raise RowFault(f"{where} has both tool_calls and function_call; keep one of them")
        calls = [legacy]
    if calls is not None and (not isinstance(calls, list) or (calls and role != "assistant")):
        raise RowFault(f"{where}: tool_calls must be a list in an assistant message, got {show(calls)}; change it")
    if calls:
        parsed["tool_calls"] = [tool_call(call, where) for call in calls]
    parsed["content"] = "" if calls and "content" not in parsed else content_text(parsed.get("content"), where)
    return parsed, is_context


def _take_untrained(message: Message, role: str, where: str) -> bool:
    """Take out of a message what says whether it is trained; whether it makes an assistant turn one that is not.

    Raises:
        RowFault: it is a fraction, or trains a part of the turn or another role: none of them could be followed.
    """
    for key in DETAIL_KEYS:
        if is_given(message.pop(key, None)):
            raise RowFault(f"{where}: {key} trains parts of a turn, and turns are trained as a whole; remove the row")
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
        # The text is in 'text', in some data sets in 'value' or 'content'; column formats fill the others with null.
        found = [part[key] for key in TEXT_KEYS if part.get(key) is not None] if isinstance(part, dict) else []
        if len(found) != 1 or not isinstance(found[0], str) or part.get("type") not in TEXT_PARTS:
            raise RowFault(f"{where} has a content part that is not text: {show(part)}; only text can be trained")
        texts += found
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

    `functions` is OpenAI's old name of them.

    Raises:
        RowFault: they are something else.
    """
    tools = row.get("tools")
    if is_given(row.get("functions")):
        if is_given(tools):
            raise RowFault("'tools' and 'functions'; keep one of them")
        tools = row["functions"]
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
