"""What a chat template does, found by rendering short conversations."""

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from typing import Any

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.assistant_turns import REASONING_FIELDS
from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.chat.control_tokens import THINK_TAGS, TextSegment, split_segments
from lean_finetune.data.format.format_base import Conversation, Message

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
        if given:
            raise RowFault(
                f"turn {number} has reasoning in {given[0]!r} and in <think> tags of 'content'; remove one of them"
            )
        if not self._doubled:
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


# Test conversations that check a chat template before any row is rendered.

_CALL = {"type": "function", "id": "a1B2c3D4e", "function": {"name": "zqcall", "arguments": {"x": 1, "y": ["é", "2"]}}}
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
_TOOLS = [{"type": "function", "function": {"name": "zqtools", "description": "Adds.", "parameters": _PARAMETERS}}]


def _turn(role: str, content: str, **others: Any) -> Message:
    return {"role": role, "content": content, **others}


ASK = _turn("user", "Q")
CALLING = _turn("assistant", "", tool_calls=[_CALL])
RESULT = _turn("tool", "zqresult", tool_call_id="a1B2c3D4e", name="zqcall")
_BASIC = Conversation(messages=[ASK, _ANSWER], tools=None)
_CHAT = [_turn("user", "zqfirst"), _turn("assistant", "zqone"), _turn("user", "zqnext"), _turn("assistant", "zqtwo")]

MESSAGE_FIELDS = (*REASONING_FIELDS, "channel", "refusal")
"""Keys that change the meaning of a message."""

# By part of a row, as refusals name it: a conversation with that part, and a text that its rendering must contain.
_PARTS = {
    "tools": (Conversation(messages=[ASK, _ANSWER], tools=_TOOLS), "zqtools"),
    "tool_calls": (Conversation(messages=[ASK, CALLING], tools=_TOOLS), "zqcall"),
    "tool": (Conversation(messages=[ASK, CALLING, RESULT, _ANSWER], tools=_TOOLS), "zqresult"),
    "system": (Conversation(messages=[_turn("system", "zqsystem"), ASK, _ANSWER], tools=None), "zqsystem"),
    "developer": (Conversation(messages=[_turn("developer", "zqdeveloper"), ASK, _ANSWER], tools=None), "zqdeveloper"),
}

# Parts of messages with calls, which templates that show calls may omit.
SECOND_CALL, TEXT_OF_CALLS = "a second call in one message", "text in a message with calls"
_SECOND = {"type": "function", "id": "a1B2c3D4f", "function": {"name": "zqcall", "arguments": {"x": "zqsecond"}}}
_PARTS_OF_CALLS = {
    SECOND_CALL: (
        Conversation(messages=[ASK, _turn("assistant", "", tool_calls=[_CALL, _SECOND])], tools=_TOOLS),
        "zqsecond",
    ),
    TEXT_OF_CALLS: (
        Conversation(messages=[ASK, _turn("assistant", "zqtext", tool_calls=[_CALL])], tools=_TOOLS),
        "zqtext",
    ),
}

_THOUGHT = "<think>\nHm.\n</think>\n\nA"
PROBES = (
    _BASIC,
    Conversation(messages=[ASK, _ANSWER, _turn("user", " Q2\n"), _turn("assistant", "\n A2 ")], tools=None),
    Conversation(messages=[_turn("system", " S "), ASK, _ANSWER, ASK, _ANSWER], tools=None),
    Conversation(messages=[ASK, _turn("assistant", _THOUGHT), ASK, _turn("assistant", _THOUGHT)], tools=None),
    Conversation(messages=[ASK, _turn("assistant", "A", reasoning_content="Hm.")], tools=None),
    *(conversation for conversation, _ in _PARTS.values()),
    Conversation(messages=[_turn("system", "S"), ASK, CALLING, RESULT, RESULT, _ANSWER, ASK, _ANSWER], tools=_TOOLS),
    Conversation(messages=[ASK, _turn("assistant", "B", tool_calls=[_CALL]), RESULT, _ANSWER], tools=None),
)


def omitted_parts(template: CompiledTemplate) -> frozenset[str]:
    """The parts of a row that the template silently omits: tools, tool_calls, rare roles, keys of messages."""
    omitted = {part for part, (conversation, text) in _PARTS.items() if _omits(template, conversation, text)}
    if "tool_calls" not in omitted:
        omitted |= {
            part for part, (conversation, text) in _PARTS_OF_CALLS.items() if _omits(template, conversation, text)
        }
    return frozenset(omitted | {field for field in MESSAGE_FIELDS if not _shows_field(template, field)})


def _omits(template: CompiledTemplate, conversation: Conversation, text: str) -> bool:
    """Whether the template renders the conversation without the text."""
    shown = rendering(template, conversation)
    return shown is not None and text not in shown


def _shows_field(template: CompiledTemplate, field: str) -> bool:
    """Whether a message key changes the rendering of an answer or a call; True where both are refused."""
    shown = []
    for message in (_ANSWER, CALLING):
        texts = [
            rendering(template, Conversation(messages=[ASK, turn], tools=_TOOLS if "tool_calls" in turn else None))
            for turn in (message, {**message, field: "zqfield"})
        ]
        shown += [texts[0] != texts[1]] if None not in texts else []
    return any(shown) or not shown


def parts_of(conversation: Conversation) -> set[str]:
    """The roles of a conversation's messages, and its other parts that a template may omit."""
    parts = {message["role"] for message in conversation.messages}
    if conversation.tools:
        parts.add("tools")
    for message in conversation.messages:
        if len(message) > 2:  # more than role and content
            given = {field: message.get(field) for field in MESSAGE_FIELDS}
            parts |= {field for field, value in given.items() if (value.strip() if isinstance(value, str) else value)}
            if "tool_calls" in message:
                parts.add("tool_calls")
                parts |= {SECOND_CALL} if len(message["tool_calls"]) > 1 else set()
                parts |= {TEXT_OF_CALLS} if message["content"].strip() else set()
    return parts


def reasoning_of(message: Message) -> str:
    """A message's reasoning, from a separate key or from <think> tags in its content; empty where it has none."""
    for field in REASONING_FIELDS:
        if isinstance(value := message.get(field), str) and value.strip():
            return value.strip()
    before, closing, _ = message["content"].partition("</think>")
    return before.rpartition("<think>")[2].strip() if closing else ""


def check_roles(template: CompiledTemplate, omitted: Set[str], name: str, train_on: str) -> None:
    """Refuse a template that omits the text of messages, or whose generation marks are not around the assistant's.

    Raises UserError, naming the role.
    """
    for probe in PROBES:
        distinct = [
            {**message, "content": message["content"] and f"zqtext{number}"}
            for number, message in enumerate(probe.messages)
        ]
        conversation = replace(probe, messages=distinct)
        if parts_of(conversation) & omitted or (text := rendering(template, conversation)) is None:
            continue
        # Templates may omit the text of a message with tool calls.
        messages = [message for message in distinct if message["content"] and "tool_calls" not in message]
        for message in messages:
            if message["content"] not in text.casefold():
                raise UserError(
                    f"{name} does not show the text of {message['role']} messages, so it would be lost; let it show "
                    "each message, or name another in data.chat_template"
                )
        if template.has_marks and train_on != "all":
            try:
                segments = split_segments(template.parts(distinct, probe.tools))
            except RowFault as fault:
                raise UserError(f"{name} cannot be used: {fault}") from None
            _check_marks(segments, messages, name, train_on)


def _check_marks(segments: list[TextSegment], messages: list[Message], name: str, train_on: str) -> None:
    """Check that generation marks contain the assistant's texts and no others."""
    marked = " ".join(segment.text for segment in segments if segment.trained).casefold()
    last = messages[-1]
    for message in messages:
        is_marked, is_answer = message["content"] in marked, message["role"] == "assistant"
        if is_marked and not is_answer:
            raise UserError(
                f"{name} has generation marks around the text of {message['role']} messages, which would be trained; "
                "put them around the assistant's text only"
            )
        if is_answer and not is_marked and (message is last or train_on == "assistant"):
            raise UserError(
                f"{name} has generation marks, but not around the text of "
                f"{'the last' if message is last else 'each'} assistant message; correct them"
                f"{'' if message is last else ', or set data.train_on to last_assistant'}"
            )


def ends_turn(segments: list[TextSegment], control: Iterable[str]) -> bool:
    """Whether the last trained text ends with a control token."""
    last = next((segment.text for segment in reversed(segments) if segment.trained), "")
    return last.rstrip().endswith(tuple(control))


def check_last_end(template: CompiledTemplate, name: str, control: Iterable[str], eos: str | None) -> None:
    """Refuse a template that writes the start of another answer behind the last one, which would be trained.

    Behind `eos` it is not. A template that refuses the conversations passes. Raises UserError, naming the token.
    """
    ask, answered, again = (
        rendering(template, Conversation(messages=_CHAT[:count], tools=None)) for count in (1, 2, 4)
    )
    if ask is None or answered is None or again is None:
        return
    question, answer, following = (message["content"] for message in _CHAT[:3])
    start = answered.rpartition(answer)[0].rpartition(question)[2]
    between = again.rpartition(following)[0].rpartition(answer)[2]
    for token in control:
        is_last = ask.rstrip().endswith(token) and answered.rstrip().endswith(token)
        is_ended = eos is not None and eos in answered.rpartition(answer)[2].rpartition(token)[0]
        if is_last and token in start and token not in between and not is_ended:
            raise UserError(
                f"{name} writes {token}, with which an answer begins, behind the last answer too; write it only with "
                "add_generation_prompt"
            )


def basic_segments(render: Callable[[Conversation], list[TextSegment]]) -> list[TextSegment] | None:
    """The segments of a question and its answer; None if the template needs other rows than this one."""
    try:
        return render(_BASIC)
    except RowFault:  # Each row that it refuses is reported.
        return None


def check_ends(segments: list[TextSegment], name: str, bos: str | None, control: Iterable[str] | None) -> None:
    """Refuse a template that doubles the BOS token, or trains no end of a turn, one of `control` (None: not checked).

    Raises UserError, naming the fault.
    """
    text = "".join(segment.text for segment in segments)
    if bos and text.startswith(bos + bos):
        raise UserError(f"{name} writes the BOS token {bos} twice; remove one of them")
    if control is not None and not ends_turn(segments, control):
        raise UserError(
            f"{name} trains no end-of-turn token after the answer, so the model would not learn to stop; add "
            "one, inside its generation marks where it has them, or set data.end_of_turn to eos"
        )
