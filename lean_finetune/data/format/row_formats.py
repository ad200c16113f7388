"""The row formats, one class each."""

from collections.abc import Mapping
from typing import Any

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import (
    PROMPT_ROLES,
    RATINGS,
    Compared,
    Conversation,
    Example,
    Message,
    PlainText,
    RowFormat,
    SourceFormat,
    parts_of,
    register,
)
from lean_finetune.data.format.messages import ROLE_NAMES, Turns, parse_tools, parse_turns, with_roles
from lean_finetune.data.format.row_images import with_images
from lean_finetune.data.format.row_values import (
    is_given,
    is_turns,
    list_of,
    refuse_unread_turns,
    show,
    text_of,
    text_or_nothing,
    with_turns,
)
from lean_finetune.data.format.unread_columns import IGNORE, LOSS_MASK, untrained_by_mask
from lean_finetune.data.format.usual_columns import QUESTIONS

CONVERSATION_KEYS = ("system", "tools", "functions", "family")


def parse_row(row: Mapping[str, Any], source: SourceFormat) -> Example:
    """The example of a row. `unread_columns` judges the columns that its format does not read.

    Raises RowFault if a key is missing, has the wrong type, or there is nothing to train on.
    """
    row_format = source.row_format
    row = with_turns(row_format.rename_columns(row, source.columns))
    refuse_unread_turns(row, row_format.keys)
    example = with_images(row_format.parse(with_roles(row, source.roles) if source.roles else row), row, source)
    _refuse_unread_question(example, row, source)
    if source.kind.labels:
        assert not isinstance(example, Compared)
        example = RATINGS[source.kind.name](row, example, row_format)
    for one in parts_of(example):
        _refuse_untrained(one)
    return example


def _refuse_unread_question(example: Example, row: Mapping[str, Any], source: SourceFormat) -> None:
    """Raise RowFault for an answer without a question, if a column that is not read may be the question."""
    if not isinstance(example, Conversation) or any(message["role"] in PROMPT_ROLES for message in example.messages):
        return
    for key, value in row.items():
        asks = is_turns(value) or (key in QUESTIONS and isinstance(value, str) and is_given(value))
        if asks and key not in source.row_format.keys:
            raise RowFault(
                f"the row has no user's turn, and {key!r} is not read; put the question into the turns, or name it in "
                "data.ignore_columns"
            )


def _refuse_untrained(example: Conversation | PlainText) -> None:
    """Raise RowFault for a conversation without a trained turn."""
    if isinstance(example, Conversation) and not example.trained_turns():
        found = "every assistant turn is marked as not trained" if example.context else "no assistant turn"
        raise RowFault(f"{found}, so nothing to train on; remove the row or add one")


def row_family(row: Mapping[str, Any], source: SourceFormat) -> str | None:
    """The task family that a row names, None where it names none.

    Raises RowFault if `family` is neither text nor null.
    """
    family = row.get(source.column("family"))
    if family is not None and not isinstance(family, str):
        raise RowFault(f"'family' must be text, got {show(family)}; change it")
    return family


class _OneList(RowFormat):
    """A format whose turns are one list."""

    optional = (*CONVERSATION_KEYS, LOSS_MASK)

    def parse(self, row: Mapping[str, Any]) -> Conversation:
        """See the base class."""
        [key] = self.required
        return conversation(row, parse_turns(list_of(row, key), key), key)


@register
class Messages(_OneList):
    """`messages`: a list of {role, content, tool_calls, weight}. Other keys of a message reach the template."""

    name, required = "messages", ("messages",)


@register
class ShareGpt(_OneList):
    """`conversations`: a list of {from, value, weight}, with function_call and observation turns."""

    name, required = "sharegpt", ("conversations",)


@register
class Pairs(_OneList):
    """`conversation`: a list of {human, assistant}, or of turns as in the other formats."""

    name, required = "conversation", ("conversation",)


@register
class Alpaca(RowFormat):
    """`instruction`, `input`, `output`, and `history`: pairs of earlier questions and answers."""

    name = "alpaca"
    required = ("instruction", "output")
    optional = ("input", "history", *CONVERSATION_KEYS)
    context_key = "input"

    def parse(self, row: Mapping[str, Any]) -> Conversation:
        """See the base class."""
        messages = history(row)
        question = (text_of(row, "instruction"), text_or_nothing(row, "input"))
        messages.append({"role": "user", "content": "\n".join(filter(None, question))})
        messages.append({"role": "assistant", "content": text_of(row, "output")})
        return conversation(row, Turns(messages=messages), "history")


@register
class QueryResponse(RowFormat):
    """`query`, `response`, and `history`: pairs of earlier questions and answers (ms-swift)."""

    name = "query_response"
    question_key = "query"
    required = ("query", "response")
    optional = ("history", *CONVERSATION_KEYS)

    def parse(self, row: Mapping[str, Any]) -> Conversation:
        """See the base class."""
        messages = history(row)
        messages.append({"role": "user", "content": text_of(row, "query")})
        messages.append({"role": "assistant", "content": text_of(row, "response")})
        return conversation(row, Turns(messages=messages), "history")


@register
class PromptCompletion(RowFormat):
    """`prompt` and `completion`: two texts, or two lists of messages. Only the completion is trained."""

    name = "prompt_completion"
    question_key = "prompt"
    divides_prompt = True
    required = ("prompt", "completion")
    optional = CONVERSATION_KEYS

    def parse(self, row: Mapping[str, Any]) -> Conversation | PlainText:
        """See the base class."""
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_unrendered(row, "data.format=alpaca with data.columns={instruction: prompt, output: completion}")
            return PlainText(prompt=prompt, completion=completion)
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            for key in self.required:
                if not isinstance(row[key], list):
                    text_of(row, key)
            raise RowFault(
                "'prompt' and 'completion' must both be text or both be lists of messages; change one of them"
            )
        before, answers = parse_turns(prompt, "prompt"), parse_turns(completion, "completion")
        if not any(message["role"] == "assistant" for message in answers.messages):
            raise RowFault("'completion' has no assistant turn, so nothing to train on; remove the row or add one")
        return conversation(row, answered(before, answers), "prompt")


@register
class Text(RowFormat):
    """`text`: plain text, all of it trained."""

    name = "text"
    required = ("text",)
    optional = ("family",)
    has_answer = False

    def parse(self, row: Mapping[str, Any]) -> PlainText:
        """See the base class."""
        role = row.get("role")
        if isinstance(role, str) and role.lower() in (*ROLE_NAMES, "prompter"):
            raise RowFault(
                f"the row is one turn of a conversation (role={show(role)}), and its text alone would be trained; join "
                "the turns of each conversation into a row of data.format=messages, or name 'role' in "
                "data.ignore_columns"
            )
        return PlainText(prompt="", completion=text_of(row, "text"))


def refuse_unrendered(row: Mapping[str, Any], remedy: str) -> None:
    """Refuse what only a chat template could show beside plain texts; `remedy` reads the row as a conversation."""
    for key in ("system", "tools", "functions"):
        if is_given(row.get(key)):
            raise RowFault(
                f"{key!r} cannot be used with plain texts, which no chat template renders; read the row as a "
                f"conversation ({remedy}), or {IGNORE}"
            )


def answered(before: Turns, answers: Turns) -> Turns:
    """The turns of a prompt, of which none is trained, and of an answer."""
    size = len(before.messages)
    context = {number for number, message in enumerate(before.messages) if message["role"] == "assistant"}
    return Turns(
        messages=before.messages + answers.messages,
        context=frozenset(context | {size + number for number in answers.context}),
        calls=before.calls | {size + number for number in answers.calls},
        others=before.others + answers.others,
    )


def history(row: Mapping[str, Any]) -> list[Message]:
    """The messages of `history`, a list of (question, answer)."""
    messages: list[Message] = []
    for number, pair in enumerate(list_of(row, "history"), start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowFault(f"history {number} must be a pair of texts, got {show(pair)}; change it")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def conversation(row: Mapping[str, Any], turns: Turns, key: str) -> Conversation:
    """The turns with the row's system text in front, and its tools; `key` names the turns in faults."""
    if not turns.messages:
        raise RowFault(f"{key!r} is empty, so nothing to train on; remove the row or add turns")
    if mask := list_of(row, LOSS_MASK):
        turns.context = untrained_by_mask(mask, turns.messages, turns.context)
    turns = turns.joined()
    messages, context = turns.messages, turns.context
    system = text_or_nothing(row, "system")
    if system:
        if any(message["role"] in ("system", "developer") for message in messages):
            raise RowFault(f"'system' and a system message in {key!r}; keep one of them")
        messages = [{"role": "system", "content": system}, *messages]
        context = frozenset(place + 1 for place in context)
    return Conversation(messages=messages, tools=parse_tools(row), context=context, other_parts=turns.others)
