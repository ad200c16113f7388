"""Test conversations that show what a chat template does before any row is rendered."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stages.errors import UserError
from stages.tokenize.example import Conversation, Message, RowFault
from stages.tokenize.segments import Segment
from stages.tokenize.template import CompiledTemplate

_CALL = {"type": "function", "id": "a1B2c3D4e", "function": {"name": "zqcall", "arguments": {"x": 1, "y": ["é", "2"]}}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zqtools",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]


def _turn(role: str, content: str, **others: Any) -> Message:
    return {"role": role, "content": content, **others}


_ASK, _ANSWER = _turn("user", "Q"), _turn("assistant", "A")
_CALLING = _turn("assistant", "", tool_calls=[_CALL])
_RESULT = _turn("tool", "zqresult", tool_call_id="a1B2c3D4e", name="zqcall")
_BASIC = Conversation(messages=[_ASK, _ANSWER], tools=None)

# Conversation and the text that must be seen, by the part of a row that it shows.
_PARTS = {
    "tools": (Conversation(messages=[_ASK, _ANSWER], tools=_TOOLS), "zqtools"),
    "tool_calls": (Conversation(messages=[_ASK, _CALLING], tools=_TOOLS), "zqcall"),
    "tool": (Conversation(messages=[_ASK, _CALLING, _RESULT, _ANSWER], tools=_TOOLS), "zqresult"),
    "system": (Conversation(messages=[_turn("system", "zqsystem"), _ASK, _ANSWER], tools=None), "zqsystem"),
    "developer": (Conversation(messages=[_turn("developer", "zqdeveloper"), _ASK, _ANSWER], tools=None), "zqdeveloper"),
}

_THOUGHT = "<think>\nHm.\n</think>\n\nA"
PROBES = (
    _BASIC,
    Conversation(messages=[_ASK, _ANSWER, _turn("user", " Q2\n"), _turn("assistant", "\n A2 ")], tools=None),
    Conversation(messages=[_turn("system", " S "), _ASK, _ANSWER, _ASK, _ANSWER], tools=None),
    Conversation(messages=[_ASK, _turn("assistant", _THOUGHT), _ASK, _turn("assistant", _THOUGHT)], tools=None),
    Conversation(messages=[_ASK, _turn("assistant", "A", reasoning_content="Hm.")], tools=None),
    *(conversation for conversation, _ in _PARTS.values()),
    Conversation(
        messages=[_turn("system", "S"), _ASK, _CALLING, _RESULT, _RESULT, _ANSWER, _ASK, _ANSWER], tools=_TOOLS
    ),
    Conversation(messages=[_ASK, _turn("assistant", "B", tool_calls=[_CALL]), _RESULT, _ANSWER], tools=None),
)


def rendering(template: CompiledTemplate, conversation: Conversation) -> str | None:
    """The rendering; None where the template refuses the conversation, which is no silent loss."""
    try:
        return template.text(conversation.messages, conversation.tools)
    except RowFault:
        return None


def hidden_parts(template: CompiledTemplate) -> frozenset[str]:
    """Which of tools, tool_calls and messages of the rarer roles the template leaves out without a word."""
    texts = {part: rendering(template, conversation) for part, (conversation, _) in _PARTS.items()}
    return frozenset(part for part, text in texts.items() if text is not None and _PARTS[part][1] not in text)


def parts_of(conversation: Conversation) -> set[str]:
    """The roles of a conversation's messages, and whether it has tools and tool_calls."""
    parts = {message["role"] for message in conversation.messages}
    if conversation.tools:
        parts.add("tools")
    if any("tool_calls" in message for message in conversation.messages):
        parts.add("tool_calls")
    return parts


def check_probe(
    render: Callable[[Conversation], list[Segment]],
    name: str,
    special_tokens: Mapping[str, str],
    control: Iterable[str],
) -> None:
    """Refuse a template that trains no end of turn, or that doubles the BOS token; a refused question is let pass.

    Raises:
        UserError: naming the fault.
    """
    try:
        segments = render(_BASIC)
    except RowFault:
        return  # a template that needs other rows than this one: they are told row by row
    text = "".join(segment.text for segment in segments)
    bos = special_tokens.get("bos_token")
    if bos and text.startswith(bos + bos):
        raise UserError(f"{name} writes the BOS token {bos} twice; remove one of them")
    last = next(segment.text for segment in reversed(segments) if segment.trained)
    if not last.rstrip().endswith(tuple(control)):
        raise UserError(
            f"{name} trains no end-of-turn token after the answer, so the model would not learn to stop; let it write "
            "one, inside its generation marks where it has them"
        )
