"""The form in which a template takes messages: tool calls' arguments as objects or text, contents as text or parts."""

import json
from dataclasses import dataclass, replace

from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.format.example import Conversation, Message

_ASK, _ANSWER = {"role": "user", "content": "zqask"}, {"role": "assistant", "content": "zqanswer"}
_CALL = {"type": "function", "id": "a1B2c3D4e", "function": {"name": "zqcall", "arguments": {"zqkey": "zqvalue"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOLS = [{"type": "function", "function": {"name": "zqcall", "description": "Adds.", "parameters": {}}}]
_CHAT = Conversation(messages=[_ASK, _ANSWER], tools=None)
_CALLS = Conversation(messages=[_ASK, _CALLING], tools=_TOOLS)
_PYTHON = "'zqkey': 'zqvalue'"
"""What a template writes that joins an object to text."""


@dataclass(frozen=True)
class MessageForm:
    """Changes messages before a template renders them."""

    arguments_are_text: bool = False
    """DeepSeek-V3 and functionary join the arguments of calls to other text."""
    contents_are_parts: bool = False
    """Idefics 3 and LLaVA take contents as lists of parts only."""

    def __call__(self, messages: list[Message]) -> list[Message]:
        """The messages in this form."""
        return [self._changed(message) for message in messages]

    def _changed(self, message: Message) -> Message:
        changed = dict(message)
        if self.contents_are_parts:
            changed["content"] = [{"type": "text", "text": message["content"]}]
        if self.arguments_are_text and "tool_calls" in message:
            changed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return changed


def in_its_form(template: CompiledTemplate) -> CompiledTemplate:
    """The template with messages in the form that it renders, tried on two conversations; itself where that is ours."""
    parts, form = MessageForm(contents_are_parts=True), MessageForm()
    if not _shows(template, form, _CHAT, "zqask", "zqanswer") and _shows(template, parts, _CHAT, "zqask", "zqanswer"):
        form = parts
    text = replace(form, arguments_are_text=True)
    if not _shows(template, form, _CALLS) and _shows(template, text, _CALLS, "zqvalue"):
        form = text
    return template if form == MessageForm() else template.with_form(form)


def _shows(template: CompiledTemplate, form: MessageForm, conversation: Conversation, *texts: str) -> bool:
    """Whether the template renders a conversation in this form with these texts, and no object as Python does."""
    shown = rendering(template.with_form(form), conversation)
    return shown is not None and _PYTHON not in shown and all(text in shown.casefold() for text in texts)


def _with_text(call: dict[str, dict[str, object]]) -> dict[str, object]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
