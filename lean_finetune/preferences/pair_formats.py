"""The formats of preference pairs, one class each: a prompt, a chosen and a rejected answer."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import (
    Compared,
    Conversation,
    PlainText,
    RowFormat,
    register,
)
from lean_finetune.data.format.messages import Turns, parse_turns
from lean_finetune.data.format.row_formats import (
    CONVERSATION_KEYS,
    answered,
    conversation,
    history,
    refuse_unrendered,
)
from lean_finetune.data.format.row_values import list_of, show, text_of, text_or_nothing
from lean_finetune.preferences.implicit_prompts import (
    divided,
    refuse_second_prompt,
    refuse_unread_question,
    refuse_without_question,
)
from lean_finetune.preferences.objectives.pair_objectives import PAIR

CHOSEN, REJECTED = ANSWERS = ("chosen", "rejected")
PROMPT_ROLES = ("system", "developer", "user")
"""Roles of turns that no answer begins with."""


@dataclass(frozen=True, kw_only=True)
class Pair(Compared):
    """Two answers to one prompt, a better and a worse one."""

    chosen: Conversation | PlainText
    rejected: Conversation | PlainText

    @property
    def parts(self) -> tuple[Conversation | PlainText, ...]:
        """See the base class."""
        return self.chosen, self.rejected

    def check_last_turns(self) -> None:
        """See the base class: they have no common prompt."""
        before = [
            one.messages[: max(one.trained_turns(), default=0)] for one in self.parts if isinstance(one, Conversation)
        ]
        if before and before[0] != before[1]:
            raise RowFault(
                "data.train_on=last_assistant compares the last answers of 'chosen' and 'rejected', and the turns "
                "before them differ; use data.train_on=assistant, or remove the row"
            )


class _PairFormat(RowFormat):
    """A format whose prompt is a conversation, and whose answers are texts, messages or lists of messages."""

    kind = PAIR

    @abstractmethod
    def prompt(self, row: Mapping[str, Any]) -> tuple[Turns, str]:
        """The turns before the answers, and the key that faults name."""

    def suits(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
        """See the base class. Conversations with their prompts have format `preference` beside any other column."""
        return not all(_begins_with_prompt(row.get(columns.get(key, key))) for key in ANSWERS)

    def parse(self, row: Mapping[str, Any]) -> Pair:
        """See the base class."""
        before, key = self.prompt(row)
        return _pair_after(row, before, key)


@register
class AlpacaPreference(_PairFormat):
    """`instruction`, `input`, `history`, and two answers `chosen` and `rejected` (LLaMA-Factory)."""

    name = "alpaca_preference"
    required = ("instruction", *ANSWERS)
    optional = ("input", "history", *CONVERSATION_KEYS)
    context_key = "input"

    def prompt(self, row: Mapping[str, Any]) -> tuple[Turns, str]:
        """See the base class."""
        question = "\n".join(filter(None, (text_of(row, "instruction"), text_or_nothing(row, "input"))))
        return Turns(messages=[*history(row), {"role": "user", "content": question}]), "history"


@register
class ShareGptPreference(_PairFormat):
    """`conversations` that end with a question, and two answers, each a turn {from, value} (LLaMA-Factory)."""

    name, required, optional = "sharegpt_preference", ("conversations", *ANSWERS), CONVERSATION_KEYS

    def prompt(self, row: Mapping[str, Any]) -> tuple[Turns, str]:
        """See the base class."""
        return parse_turns(list_of(row, "conversations"), "conversations"), "conversations"


@register
class MessagesPreference(_PairFormat):
    """`messages` that end with a question, and two answers, each a message {role, content} (Axolotl)."""

    name, required, optional = "messages_preference", ("messages", *ANSWERS), CONVERSATION_KEYS

    def prompt(self, row: Mapping[str, Any]) -> tuple[Turns, str]:
        """See the base class."""
        return parse_turns(list_of(row, "messages"), "messages"), "messages"


@register
class RejectedResponse(RowFormat):
    """`messages` that end with the chosen answer, and `rejected_response`: a text, or a list of messages (ms-swift)."""

    name, required, optional = "rejected_response", ("messages", "rejected_response"), CONVERSATION_KEYS
    kind = PAIR

    def parse(self, row: Mapping[str, Any]) -> Pair:
        """See the base class. Both answers follow the last turn that is not the assistant's, as in ms-swift."""
        turns = parse_turns(list_of(row, "messages"), "messages")
        if not turns.messages or turns.messages[-1]["role"] != "assistant":
            raise RowFault("'messages' must end with the assistant's chosen answer; add it")
        size = 1 + max((n for n, message in enumerate(turns.messages) if message["role"] != "assistant"), default=-1)
        value = row["rejected_response"]
        if not isinstance(value, list | dict):
            text_of(row, "rejected_response")
        before, chosen, rejected = _first(turns, size), _after(turns, size), _answer(row, "rejected_response")
        refuse_without_question(before.messages)
        if (role := rejected.messages[0]["role"]) != "assistant":
            raise RowFault(f"'rejected_response' begins with a turn of {role}; leave the prompt to 'messages'")
        return _pair(*(conversation(row, answered(before, one), "messages") for one in (chosen, rejected)))


@register
class Preference(RowFormat):
    """`prompt`, `chosen` and `rejected`: texts, or lists of messages; without a prompt, what both begin with (TRL)."""

    name, required, optional = "preference", ANSWERS, ("prompt", *CONVERSATION_KEYS)
    question_key = "prompt"
    kind = PAIR

    def parse(self, row: Mapping[str, Any]) -> Pair:
        """See the base class."""
        prompt, kinds = row.get("prompt"), [type(row[key]) for key in ANSWERS]
        if kinds[0] is not kinds[1] or kinds[0] not in (str, list, dict):
            raise RowFault(
                f"'chosen' and 'rejected' must both be text, or both messages; got {show(row[CHOSEN])} and "
                f"{show(row[REJECTED])}; change one of them"
            )
        if kinds[0] is str and not isinstance(prompt, list):
            return self._plain_pair(row)
        if isinstance(prompt, list):
            return _pair_after(row, parse_turns(prompt, "prompt"), "prompt")
        chosen, rejected = (_answer(row, key) for key in ANSWERS)
        before, chosen, rejected = _common_start(chosen, rejected)
        _check_prompt(prompt, before)
        if not before.messages or before.messages[-1]["role"] in ("system", "developer"):
            refuse_unread_question(row, self.keys, as_turn=True)
        refuse_without_question(before.messages)
        return _pair(*(conversation(row, answered(before, turns), "prompt") for turns in (chosen, rejected)))

    def _plain_pair(self, row: Mapping[str, Any]) -> Pair:
        """A pair of plain texts; without a prompt, the texts begin with it."""
        prompt, chosen, rejected = text_or_nothing(row, "prompt"), row[CHOSEN], row[REJECTED]
        if prompt.strip():
            refuse_unrendered(row, "data.columns={instruction: prompt}")
            refuse_second_prompt(prompt, chosen, rejected)
        else:
            prompt, chosen, rejected = divided(row, self.keys)
            refuse_unrendered(row, "lists of messages")
        return _pair(PlainText(prompt=prompt, completion=chosen), PlainText(prompt=prompt, completion=rejected))


def _answer(row: Mapping[str, Any], key: str) -> Turns:
    """The turns of an answer: a text, a message, or a list of messages."""
    value = row[key]
    if isinstance(value, str):
        return Turns(messages=[{"role": "assistant", "content": value}])
    turns = parse_turns([value] if isinstance(value, dict) else list_of(row, key), key)
    if not any(message["role"] == "assistant" for message in turns.messages):
        raise RowFault(f"{key!r} has no assistant turn, so it is no answer; change it, or remove the row")
    return turns


def _pair_after(row: Mapping[str, Any], before: Turns, key: str) -> Pair:
    """The pair of a prompt and two answers, whose first turns must be the assistant's; `key` is that of the prompt."""
    examples = []
    refuse_without_question(before.messages)
    for answer in ANSWERS:
        turns = _answer(row, answer)
        first = turns.messages[0]["role"]
        if first in PROMPT_ROLES:
            raise RowFault(
                f"{answer!r} begins with a turn of {first}, and the row has its prompt in {key!r} too; remove one of "
                f"them, or name {key!r} in data.ignore_columns with data.format=preference"
            )
        if first == "assistant" and before.messages and before.messages[-1]["role"] == "assistant":
            raise RowFault(f"{key!r} ends with an assistant turn, which {answer!r} cannot follow; remove it")
        examples.append(conversation(row, answered(before, turns), key))
    return _pair(*examples)


def _begins_with_prompt(answer: Any) -> bool:
    """Whether an answer is a conversation from its first turn on."""
    first = answer[0] if isinstance(answer, list) and answer else None
    return isinstance(first, dict) and (first.get("role") or first.get("from")) in (*PROMPT_ROLES, "human")


def _common_start(chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """The turns that both conversations begin with, and the rest of each."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen.messages, rejected.messages, strict=False))
    size = min(len(list(same)), len(chosen.messages) - 1, len(rejected.messages) - 1)
    # Calls are one answer with the text or calls before them.
    while size and size in chosen.calls | rejected.calls and chosen.messages[size - 1]["role"] == "assistant":
        size -= 1
    for turns, key in ((chosen, CHOSEN), (rejected, REJECTED)):
        if (role := turns.messages[size]["role"]) != "assistant":
            raise RowFault(
                f"the prompts of 'chosen' and 'rejected' differ: turn {size + 1} of {key!r} is {role}'s; give both the "
                "same prompt, or put it into 'prompt'"
            )
    return _first(chosen, size), _after(chosen, size), _after(rejected, size)


def _check_prompt(prompt: Any, before: Turns) -> None:
    """Refuse a text of a prompt that is not in the turns before the answers: it would be left out."""
    if prompt is None or any(message["content"] == prompt for message in before.messages):
        return
    raise RowFault(
        f"'prompt' {show(prompt)} is no turn that 'chosen' and 'rejected' begin with; put it into both, make it a list "
        "of messages, or name it in data.ignore_columns"
    )


def _first(turns: Turns, size: int) -> Turns:
    """The first turns."""
    return Turns(
        messages=turns.messages[:size],
        context=frozenset(number for number in turns.context if number < size),
        calls=frozenset(number for number in turns.calls if number < size),
        others=turns.others,
    )


def _after(turns: Turns, size: int) -> Turns:
    """The turns after the first ones."""
    return Turns(
        messages=turns.messages[size:],
        context=frozenset(number - size for number in turns.context if number >= size),
        calls=frozenset(number - size for number in turns.calls if number >= size),
        others=turns.others,
    )


def _pair(chosen: Any, rejected: Any) -> Pair:
    """A pair whose answers differ."""
    if chosen == rejected:
        raise RowFault("'chosen' and 'rejected' are the same answer, so there is no preference; remove the row")
    return Pair(chosen=chosen, rejected=rejected)
