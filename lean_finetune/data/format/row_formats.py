"""A row of a known shape, read into what it means."""

from collections.abc import Callable, Mapping
from typing import Any

from lean_finetune.data.format.example import ASKING_ROLES, Conversation, Message, Plain, RowFault, is_heldout
from lean_finetune.data.format.format_detection import check_columns, detect_format, named_keys
from lean_finetune.data.format.messages import parse_message, parse_turns, tool_call, tools_of
from lean_finetune.data.format.row_values import json_of, list_of, show, text_of, text_or_nothing
from lean_finetune.data.format.token_settings import SourceShape
from lean_finetune.data.format.unread_columns import is_given

__all__ = [
    "ASKING_ROLES",
    "Conversation",
    "Plain",
    "RowFault",
    "check_columns",
    "detect_format",
    "is_heldout",
    "parse_row",
    "row_family",
]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
_USUAL_SHAREGPT_KEYS = {"from", "value"}
# What {prompt, completion} as plain text cannot show, as no chat template renders it.
_OF_CONVERSATIONS = ("system", "tools", "functions")


def parse_row(row: Mapping[str, Any], shape: SourceShape) -> Conversation | Plain:
    """Read a row of the given shape; `unread_columns` judges the columns that it does not have.

    Raises:
        RowFault: a key is missing, has the wrong type, or there is nothing to train on.
    """
    example = _PARSERS[shape.format](named_keys(row, shape))
    if isinstance(example, Conversation) and not example.trained_turns():
        found = "every assistant turn is marked as not trained" if example.context else "no assistant turn"
        raise RowFault(f"{found}, so nothing to train on; remove the row or add one")
    return example


def row_family(row: Mapping[str, Any], shape: SourceShape) -> str | None:
    """The row's task family, if it names one; `shape` says in which column.

    Raises:
        RowFault: `family` is neither text nor null.
    """
    family = row.get(shape.columns.get("family", "family"))
    if family is not None and not isinstance(family, str):
        raise RowFault(f"'family' must be text, got {show(family)}; change it")
    return family


def _parse_messages(row: Mapping[str, Any]) -> Conversation:
    """System, tools, messages of {role, content, tool_calls, weight}; other keys reach the template as they are."""
    return _conversation(row, *_turns(list_of(row, "messages"), "messages", default="role"), "messages")


def _parse_sharegpt(row: Mapping[str, Any]) -> Conversation:
    """System, tools, conversations of {from, value, weight, …}, with function_call and observation turns."""
    return _conversation(row, *_turns(list_of(row, "conversations"), "conversations", default="from"), "conversations")


def _turns(given: list[Any], key: str, *, default: str) -> tuple[list[Message], frozenset[int]]:
    """Messages and the places of untrained ones; the first turn tells whether they are {role, …} or {from, …}."""
    first = given[0] if given and isinstance(given[0], dict) else {}
    known = [style for style in ("role", "from") if first.get(style) is not None]
    if (known[0] if len(known) == 1 else default) == "role":
        return parse_turns(given, key)
    turns = [_sharegpt_turn(turn, f"{key} {n}") for n, turn in enumerate(given, start=1)]
    return [message for message, _ in turns], frozenset(n for n, (_, is_context) in enumerate(turns) if is_context)


def _sharegpt_turn(turn: Any, where: str) -> tuple[Message, bool]:
    """The message of a {from, value} turn, and whether it is an assistant turn that is not trained.

    Other keys reach the template as they are, as those of messages do.
    """
    if not isinstance(turn, dict):
        raise RowFault(f"{where} must be an object with 'from' and 'value', got {show(turn)}; change it")
    sender = turn.get("from")
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise RowFault(f"{where} has from={show(sender)}; known: {', '.join(SHAREGPT_ROLES)}; change it")
    value = turn.get("value")
    if not isinstance(value, str):
        raise RowFault(f"{where} needs text in 'value', got {show(value)}; change it")
    message: Message = {"role": role, "content": value}
    if role == "call":
        calls = json_of(value, f"{where} ({sender})")
        calls = [tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    if turn.keys() == _USUAL_SHAREGPT_KEYS:
        return message, False
    others = {key: item for key, item in turn.items() if key not in _USUAL_SHAREGPT_KEYS}
    return parse_message({**others, **message}, where)


def _conversation(row: Mapping[str, Any], messages: list[Message], context: frozenset[int], key: str) -> Conversation:
    """Messages with the row's system text in front, and its tools.

    Raises:
        RowFault: there is no message, or a second system text.
    """
    if not messages:
        raise RowFault(f"{key!r} is empty, so nothing to train on; remove the row or add turns")
    system = text_or_nothing(row, "system")
    if system:
        if any(message["role"] in ("system", "developer") for message in messages):
            raise RowFault(f"'system' and a system message in {key!r}; keep one of them")
        messages = [{"role": "system", "content": system}, *messages]
        context = frozenset(place + 1 for place in context)
    return Conversation(messages=messages, tools=tools_of(row), context=context)


def _parse_alpaca(row: Mapping[str, Any]) -> Conversation:
    """instruction, input, output, and where present system, tools and history (pairs of earlier turns)."""
    messages: list[Message] = []
    for number, pair in enumerate(list_of(row, "history"), start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowFault(f"history {number} must be a pair of texts, got {show(pair)}; change it")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = (text_of(row, "instruction"), text_or_nothing(row, "input"))
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": text_of(row, "output")})
    return _conversation(row, messages, frozenset(), "history")


def _parse_prompt_completion(row: Mapping[str, Any]) -> Conversation | Plain:
    """Two texts, or two lists of messages, of which only the completion's assistant turns are trained."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        for key in _OF_CONVERSATIONS:
            if is_given(row.get(key)):
                raise RowFault(
                    f"{key!r} has no place beside a prompt and a completion of plain text; read the row as a "
                    "conversation (data.format=alpaca with data.columns={instruction: prompt, output: completion}), or "
                    "name it in data.ignore_columns"
                )
        return Plain(prompt=prompt, completion=completion)
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        for key in ("prompt", "completion"):
            if not isinstance(row[key], list):
                text_of(row, key)
        raise RowFault("'prompt' and 'completion' must both be text or both be lists of messages; change one of them")
    asked, _ = parse_turns(prompt, "prompt")
    answered, untrained = parse_turns(completion, "completion")
    shown = {n for n, message in enumerate(asked) if message["role"] == "assistant"}
    context = frozenset(shown | {len(asked) + n for n in untrained})
    if not any(message["role"] == "assistant" for message in answered):
        raise RowFault("'completion' has no assistant turn, so nothing to train on; remove the row or add one")
    return _conversation(row, asked + answered, context, "prompt")


def _parse_text(row: Mapping[str, Any]) -> Plain:
    return Plain(prompt="", completion=text_of(row, "text"))


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Conversation | Plain]] = {
    "messages": _parse_messages,
    "sharegpt": _parse_sharegpt,
    "alpaca": _parse_alpaca,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_text,
}
