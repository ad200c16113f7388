"""An independent reading of a row's tokens: what is trained is found in the decoded text, not in the template.

The text itself is compared with what transformers renders.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import pairwise
from typing import Any
from unittest import mock

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

from lean_finetune.data.format.format_base import Conversation, Message

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What templates raise for rows that they do not support."""
DATE = date(2024, 7, 26)
"""Today, for templates that write it."""


class _Today(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_Today":
        return cls(DATE.year, DATE.month, DATE.day)


@dataclass(frozen=True, kw_only=True)
class ReadRow:
    """A row's tokens as text."""

    conversation: Conversation
    ids: Sequence[int]
    pieces: Sequence[tuple[str, bool]]
    """Each span between two boundaries, decoded, and whether it is trained."""

    @property
    def text(self) -> str:
        """The complete text, up to the last trained token."""
        return "".join(text for text, _ in self.pieces)

    @property
    def trained(self) -> list[str]:
        """The text of each trained span."""
        return [text for text, is_trained in self.pieces if is_trained]


def read_row(conversation: Conversation, ids: Sequence[int], spans: Sequence[int], tokenizer: Tokenizer) -> ReadRow:
    """Decode a row at the boundaries of its spans."""
    bounds = [0, *spans, len(ids)]
    texts = [tokenizer.decode(list(ids[a:b]), skip_special_tokens=False) for a, b in pairwise(bounds)]
    pieces = [(text, number % 2 == 1) for number, text in enumerate(texts) if text]
    return ReadRow(conversation=conversation, ids=ids, pieces=pieces)


def fault_of(row: ReadRow, renderings: Sequence[str], tokenizer: Tokenizer, header: str, has_marks: bool) -> str | None:
    """The first rule that the row breaks; None if it breaks none.

    Args:
        row: the tokens to read.
        renderings: the texts that may be the row's; if there are none, the text is not compared.
        tokenizer: the one that made the ids.
        header: control token that must not begin a span; empty for none.
        has_marks: whether the template's author marked what is trained; then only the last span must end a turn.
    """
    control = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    pattern = re.compile("|".join(re.escape(token) for token in sorted(control, key=len, reverse=True)))
    faults = (
        _tokens_fault(row, pattern, control, tokenizer),
        _span_fault(row, pattern, header, has_marks),
        _words_fault(row, "" if has_marks else header) if "zqp" in row.text else _texts_fault(row),
        _text_fault(row, renderings, pattern),
    )
    return next((fault for fault in faults if fault), None)


def _tokens_fault(row: ReadRow, pattern: re.Pattern[str], control: dict[str, int], tokenizer: Tokenizer) -> str | None:
    """Control tokens of the text against ids; boundaries inside control tokens."""
    found = list(pattern.finditer(row.text))
    given = json.dumps([row.conversation.messages, row.conversation.tools], ensure_ascii=False)
    if not pattern.search(given):  # Otherwise a message has one as text, which must not become one.
        numbers = set(control.values())
        if [control[match[0]] for match in found] != [number for number in row.ids if number in numbers]:
            return "the ids lack a control token of the text"
        place = 0
        for text, _ in row.pieces[:-1]:
            place += len(text)
            if any(match.start() < place < match.end() for match in found):
                return "a boundary lies inside a control token"
    return None


def _span_fault(row: ReadRow, pattern: re.Pattern[str], header: str, has_marks: bool) -> str | None:
    """The ends of spans."""
    heads = {_last(pattern, one) for (one, _), (_, is_trained) in pairwise(row.pieces) if is_trained} - {""}
    heads = set() if row.conversation.context else heads  # The end of an answer that is not trained may stand there.
    if any(is_trained and re.search(r"[<\[|]$", before) for (before, _), (_, is_trained) in pairwise(row.pieces)):
        return "a trained span starts inside a tag"
    following = [text for text, is_trained in row.pieces if not is_trained][-len(row.trained) + 1 :]
    for number, text in enumerate(row.trained):
        is_last = number + 1 == len(row.trained)
        # Some templates write no ends. GLM-4.5 and Apertus write none between two answers.
        after = "" if is_last else following[number].lstrip()
        answers = [row.conversation.messages[turn]["content"].strip() for turn in row.conversation.context]
        answers_again = after.startswith(tuple(filter(None, [header, *answers])))
        must_end = is_last or (not has_marks and not answers_again and pattern.search(after))
        if must_end and not _last(pattern, text):
            return f"a trained span ends without a control token: {text[-30:]!r}"
        if header and text.lstrip().startswith(header):
            return f"a trained span starts with the header of its turn: {text[:30]!r}"
        if not has_marks and (token := _last(pattern, text)) in heads:
            return f"a trained span ends with {token}, which begins answers"
        turns = len(row.conversation.trained_turns()) - len(row.trained) + 1  # Marks of two turns in a row may touch.
        if max(text.count("<think>"), text.count("</think>")) > (max(1, turns) if has_marks else 1):
            return f"a trained span has two think blocks: {text[:60]!r}"
    return None


def _last(pattern: re.Pattern[str], text: str) -> str:
    """The control token that ends a text; empty if none does."""
    found = pattern.findall(text)
    return found[-1] if found and text.rstrip().endswith(found[-1]) else ""


def _words_fault(row: ReadRow, header: str) -> str | None:
    """The words of synthetic rows: each answer once, in its span; no prompt in a span, and no header between turns."""
    conversation = row.conversation
    joined = "\0".join(row.trained)
    if "zqp" in joined or "Adds." in joined or "A number." in joined:
        return "text of a prompt or tool is trained"
    for text in row.trained if header else ():
        found = list(re.finditer(r"zq[acr](\d+)", text))
        if any(header in text[a.end() : b.start()] for a, b in pairwise(found) if a[1] != b[1]):
            return f"a trained span has the header between two turns: {text[:60]!r}"
    for turn, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        is_context = turn in conversation.context
        words = re.findall(r"zq[ac]\d+x?\d*", json.dumps([message["content"], message.get("tool_calls")]))
        for word in words:
            count = len(re.findall(rf"{word}\b", joined))
            if count != (0 if is_context else 1):
                return f"{word} is trained {count} times"
        word = f"zqr{turn}"
        if word in row.text and word not in joined and not is_context:
            return f"reasoning {word} is shown and not trained"
        if not words and message["content"] == "Yes" and joined.count("Yes") != len(conversation.trained_turns()):
            return "equal answers are not all trained"
    return _order_fault(row)


def _texts_fault(row: ReadRow) -> str | None:
    """The texts of public rows: each answer in a span; no long prompt in one."""
    joined = "\0".join(row.trained)
    messages = row.conversation.messages
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for message in messages:
        text = message["content"].strip()
        if message["role"] != "assistant" and len(text) > 25 and text in joined and not any(text in a for a in answers):
            return f"text of a prompt is trained: {text[:40]!r}"
    return _order_fault(row)


def _order_fault(row: ReadRow) -> str | None:
    """Every answer in a trained span, in order, no two turns with a prompt between them in one span."""
    joined, place = "\0".join(row.trained), 0
    for turn in row.conversation.trained_turns():
        text = row.conversation.messages[turn]["content"].rpartition("</think>")[2].strip()
        found = joined.find(text, place)
        if found < 0:
            return f"an answer is not trained: {text[:40]!r}"
        place = found + len(text)
    return None


def _text_fault(row: ReadRow, renderings: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    """The text against transformers' renderings."""
    # data.end_of_turn appends an end where the template writes none.
    shown = row.text.removesuffix(_last(pattern, row.text))
    if renderings and not any(text.startswith(shown.rstrip()) for text in renderings):
        return "the text is not transformers' rendering"
    return None


def renderings_of(conversation: Conversation, template: str, named: Mapping[str, Any]) -> list[str]:
    """What transformers renders of a conversation in each form that templates ask for; empty where all are refused."""
    variants = (replace(conversation, messages=messages) for messages in _variants(conversation.messages))
    made = (rendered(template, variant, named) for variant in variants)
    return [one[0] for one in made if one is not None]


def rendered(
    template: str, conversation: Conversation, named: Mapping[str, Any], **options: Any
) -> tuple[str, list[tuple[int, int]]] | None:
    """What transformers renders, and the ranges inside generation marks if `options` ask for them.

    None where the template refuses the conversation.

    Args:
        template: its source.
        conversation: its messages and tools.
        named: variables of the template, such as eos_token.
        options: of `render_jinja_template`.
    """
    with mock.patch.object(chat_template_utils, "datetime", _Today):
        try:
            made: Any = chat_template_utils.render_jinja_template(
                [conversation.messages], tools=conversation.tools, chat_template=template, **named, **options
            )
        except REFUSALS:
            return None
    [text], ranges = made
    return text, ranges[0] if ranges else []


def _variants(messages: list[Message]) -> list[list[Message]]:
    """The messages as given, with arguments as text, and with thoughts in each field of reasoning."""
    found = [messages, *([_with_thought(message, field) for message in messages] for field in REASONING_FIELDS)]
    found += [[_with_text_arguments(message) for message in one] for one in found]
    return found + [[_with_parts(message) for message in one] for one in found]


def _with_parts(message: Message) -> Message:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls} if calls else message


def _with_thought(message: Message, field: str) -> Message:
    before, closing, content = message["content"].partition("</think>")
    if message["role"] != "assistant" or not closing:
        return message
    return message | {"content": content.lstrip("\n"), field: before.replace("<think>", "").strip("\n")}


def first_control(text: str, tokenizer: Tokenizer) -> str:
    """The first control token of a text; empty if it has none."""
    control = sorted((token.content for token in tokenizer.get_added_tokens_decoder().values()), key=len, reverse=True)
    match = re.search("|".join(map(re.escape, control)), text)
    return match[0] if match else ""


def as_row(conversation: Conversation) -> dict[str, Any]:
    """The conversation as a row of data.format messages."""
    messages = [
        message | ({"weight": 0} if number in conversation.context else {})
        for number, message in enumerate(conversation.messages)
    ]
    return {"messages": messages} | ({"tools": conversation.tools} if conversation.tools else {})
