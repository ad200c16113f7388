"""Reasoning in <think> tags inside `content`, for templates that write a think block of their own."""

import re
from collections.abc import Set

from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.chat.control_tokens import THINK_TAGS
from lean_finetune.data.chat.message_regions import REASONING_FIELDS
from lean_finetune.data.format.example import Conversation, Message, RowFault

OPEN, CLOSE = THINK_TAGS
# Some models' generation prompt has the tag that opens the block.
_BLOCK = re.compile(rf"(?:{OPEN}|\A)((?:(?!{OPEN}).)*?){CLOSE}", re.DOTALL)
_ASK, _ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
_UNCLOSED = {"role": "assistant", "content": f"{OPEN}\nHm."}
_TAGGED = {"role": "assistant", "content": f"{OPEN}\nHm.\n{CLOSE}\n\nA"}


class ThinkTags:
    """Moves reasoning from tags to the key that the template reads, where both would be rendered."""

    def __init__(self, template: CompiledTemplate, omitted: Set[str]):
        """Try the template on answers with tags; `omitted` has the keys of messages that it does not show."""
        self._field = next((field for field in REASONING_FIELDS if field not in omitted), None)
        none, last, earlier = (_blocks(template, [_ANSWER] * count) for count in range(3))
        self._is_added = last > none and _blocks(template, [_UNCLOSED]) > none
        self._wraps = [field for field in REASONING_FIELDS if _blocks(template, [{**_ANSWER, field: "Hm."}]) > none]
        self._doubled = (last > none and _blocks(template, [_TAGGED]) > last) or (
            earlier > last and _blocks(template, [_TAGGED, _ANSWER]) > earlier
        )

    def moved(self, conversation: Conversation) -> list[Message]:
        """The messages, each with at most one think block. Raises RowFault if one has two, or there is no such key."""
        return [
            self._one_block(message, number + 1) if message["role"] == "assistant" and has_tags(message) else message
            for number, message in enumerate(conversation.messages)
        ]

    def _one_block(self, message: Message, number: int) -> Message:
        for field in self._wraps:
            if isinstance(text := message.get(field), str) and (OPEN in text or CLOSE in text):
                raise RowFault(
                    f"turn {number} has <think> tags in {field!r}, and the chat template writes them around it; remove "
                    "them"
                )
        before, closing, answer = message["content"].partition(CLOSE)
        if not closing:
            if self._is_added and before.lstrip().startswith(OPEN):
                raise RowFault(
                    f"turn {number} begins with <think>, which nothing ends, and the chat template writes a think "
                    "block before it; write </think> behind the reasoning, or remove the row"
                )
            return message
        lead, _, thought = before.rpartition(OPEN)
        given = [field for field in REASONING_FIELDS if isinstance(message.get(field), str) and message[field].strip()]
        if given and not lead.strip() and before.lstrip().startswith(OPEN):
            raise RowFault(
                f"turn {number} has reasoning in {given[0]!r} and in <think> tags of 'content'; remove one of them"
            )
        if not self._doubled or given:
            return message
        if self._field is None:
            raise RowFault(
                f"turn {number} has a <think> block in 'content', and the chat template writes another one; remove it "
                "from the row, or set data.chat_template to a template that does not"
            )
        if lead.strip() or CLOSE in answer:
            raise RowFault(
                f"turn {number} has text before its <think> block or several blocks, and the chat template writes one "
                f"block; put the reasoning into {self._field!r}"
            )
        return {**message, "content": answer.lstrip("\n"), self._field: thought.strip("\n")}


def has_tags(message: Message) -> bool:
    """Whether a message has think tags in its content or its reasoning."""
    if OPEN in message["content"] or CLOSE in message["content"]:
        return True
    texts = [message.get(field) for field in REASONING_FIELDS] if len(message) > 2 else []
    return any(isinstance(text, str) and (OPEN in text or CLOSE in text) for text in texts)


def answer_texts(content: str) -> list[str]:
    """The texts before, between and behind the think blocks of an answer, without white space around them."""
    return [text.strip() for text in _BLOCK.split(content)[::2] if text.strip()]


def thoughts(content: str) -> list[str]:
    """The texts of the think blocks of an answer, without white space around them."""
    return [text.strip() for text in _BLOCK.findall(content) if text.strip()]


def _blocks(template: CompiledTemplate, answers: list[Message]) -> int:
    """Ends of think blocks in the rendering of answers to questions; 0 where the template refuses it.

    Without an answer, those in a system prompt of the template.
    """
    messages = [message for answer in answers for message in (_ASK, answer)] or [_ASK]
    text = rendering(template, Conversation(messages=messages, tools=None))
    return 0 if text is None else text.count(CLOSE)
