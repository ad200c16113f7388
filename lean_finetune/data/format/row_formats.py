"""The row formats: messages, sharegpt, alpaca, prompt_completion and text, one class each."""

from collections.abc import Mapping
from typing import Any

from lean_finetune.data.format.example import Conversation, Message, PlainText, RowFault
from lean_finetune.data.format.format_base import RowFormat, SourceFormat, register
from lean_finetune.data.format.messages import parse_message, parse_messages, parse_tool_call, parse_tools
from lean_finetune.data.format.row_values import is_given, list_of, parse_json, show, text_of, text_or_nothing

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
_SHAREGPT_KEYS = {"from", "value"}
_CONVERSATION_KEYS = ("system", "tools", "functions", "family")


def parse_row(row: Mapping[str, Any], source: SourceFormat) -> Conversation | PlainText:
    """The example of a row. `unread_columns` judges the columns that its format does not read.

    Raises RowFault if a key is missing, has the wrong type, or there is nothing to train on.
    """
    row_format = source.row_format
    example = row_format.parse(row_format.rename_columns(row, source.columns))
    if isinstance(example, Conversation) and not example.trained_turns():
        found = "every assistant turn is marked as not trained" if example.context else "no assistant turn"
        raise RowFault(f"{found}, so nothing to train on; remove the row or add one")
    return example


def row_family(row: Mapping[str, Any], source: SourceFormat) -> str | None:
    """The task family that a row names, None where it names none.

    Raises RowFault if `family` is neither text nor null.
    """
    family = row.get(source.column("family"))
    if family is not None and not isinstance(family, str):
        raise RowFault(f"'family' must be text, got {show(family)}; change it")
    return family


@register
class Messages(RowFormat):
    """`messages`: a list of {role, content, tool_calls, weight}. Other keys of a message reach the template."""

    name = "messages"
    required = ("messages",)
    optional = _CONVERSATION_KEYS

    def parse(self, row: Mapping[str, Any]) -> Conversation:
        """See the base class."""
        turns = list_of(row, "messages")
        is_sharegpt = _turn_keys(turns) == {"from"}
        parsed = _parse_sharegpt_turns(turns, "messages") if is_sharegpt else parse_messages(turns, "messages")
        return _conversation(row, *parsed, "messages")


@register
class ShareGpt(RowFormat):
    """`conversations`: a list of {from, value, weight}, with function_call and observation turns."""

    name = "sharegpt"
    required = ("conversations",)
    optional = _CONVERSATION_KEYS

    def parse(self, row: Mapping[str, Any]) -> Conversation:
        """See the base class."""
        turns, key = list_of(row, "conversations"), "conversations"
        has_roles = _turn_keys(turns) == {"role"}
        parsed = parse_messages(turns, key) if has_roles else _parse_sharegpt_turns(turns, key)
        return _conversation(row, *parsed, key)


@register
class Alpaca(RowFormat):
    """`instruction`, `input`, `output`, and `history`: pairs of earlier questions and answers."""

    name = "alpaca"
    required = ("instruction", "output")
    optional = ("input", "history", *_CONVERSATION_KEYS)
    context_key = "input"

    def parse(self, row: Mapping[str, Any]) -> Conversation:
        """See the base class."""
        messages: list[Message] = []
        for number, pair in enumerate(list_of(row, "history"), start=1):
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise RowFault(f"history {number} must be a pair of texts, got {show(pair)}; change it")
            messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        question = (text_of(row, "instruction"), text_or_nothing(row, "input"))
        messages.append({"role": "user", "content": "\n".join(filter(None, question))})
        messages.append({"role": "assistant", "content": text_of(row, "output")})
        return _conversation(row, messages, frozenset(), "history")


@register
class PromptCompletion(RowFormat):
    """`prompt` and `completion`: two texts, or two lists of messages. Only the completion is trained."""

    name = "prompt_completion"
    required = ("prompt", "completion")
    optional = _CONVERSATION_KEYS

    def parse(self, row: Mapping[str, Any]) -> Conversation | PlainText:
        """See the base class."""
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            for key in ("system", "tools", "functions"):  # No chat template renders plain text.
                if is_given(row.get(key)):
                    raise RowFault(
                        f"{key!r} cannot be used with a prompt and a completion of plain text; read the row as a "
                        "conversation (data.format=alpaca with data.columns={instruction: prompt, output: "
                        "completion}), or name it in data.ignore_columns"
                    )
            return PlainText(prompt=prompt, completion=completion)
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            for key in self.required:
                if not isinstance(row[key], list):
                    text_of(row, key)
            raise RowFault(
                "'prompt' and 'completion' must both be text or both be lists of messages; change one of them"
            )
        before, _ = parse_messages(prompt, "prompt")
        trained, untrained = parse_messages(completion, "completion")
        context = {n for n, message in enumerate(before) if message["role"] == "assistant"}
        if not any(message["role"] == "assistant" for message in trained):
            raise RowFault("'completion' has no assistant turn, so nothing to train on; remove the row or add one")
        context |= {len(before) + n for n in untrained}
        return _conversation(row, before + trained, frozenset(context), "prompt")


@register
class Text(RowFormat):
    """`text`: plain text, all of it trained."""

    name = "text"
    required = ("text",)
    optional = ("family",)
    has_answer = False

    def parse(self, row: Mapping[str, Any]) -> PlainText:
        """See the base class."""
        return PlainText(prompt="", completion=text_of(row, "text"))


def _conversation(row: Mapping[str, Any], messages: list[Message], context: frozenset[int], key: str) -> Conversation:
    """The messages with the row's system text in front, and its tools; `key` names the messages in faults."""
    if not messages:
        raise RowFault(f"{key!r} is empty, so nothing to train on; remove the row or add turns")
    system = text_or_nothing(row, "system")
    if system:
        if any(message["role"] in ("system", "developer") for message in messages):
            raise RowFault(f"'system' and a system message in {key!r}; keep one of them")
        messages = [{"role": "system", "content": system}, *messages]
        context = frozenset(place + 1 for place in context)
    return Conversation(messages=messages, tools=parse_tools(row), context=context)


def _turn_keys(turns: list[Any]) -> set[str]:
    """Which of `role` and `from` the first turn has: data sets use either under either name of the list."""
    first = turns[0] if turns and isinstance(turns[0], dict) else {}
    return {key for key in ("role", "from") if first.get(key) is not None}


def _parse_sharegpt_turns(turns: list[Any], key: str) -> tuple[list[Message], frozenset[int]]:
    """The messages of {from, value} turns, and the indices of assistant turns that are not trained."""
    parsed = [_parse_sharegpt_turn(turn, f"{key} {n}") for n, turn in enumerate(turns, start=1)]
    return [message for message, _ in parsed], frozenset(n for n, (_, is_context) in enumerate(parsed) if is_context)


def _parse_sharegpt_turn(turn: Any, where: str) -> tuple[Message, bool]:
    """The message of a turn, and whether it is an assistant turn that is not trained."""
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
        calls = parse_json(value, f"{where} ({sender})")
        calls = [parse_tool_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    if turn.keys() == _SHAREGPT_KEYS:
        return message, False
    others = {key: item for key, item in turn.items() if key not in _SHAREGPT_KEYS}
    return parse_message({**others, **message}, where)
