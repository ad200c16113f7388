"""Where a message's own text is in a rendering: the part that changes when other text takes its place."""

from typing import Any

from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.format.example import Conversation, Message

# Noncharacters, which templates do not treat specially and rows rarely have.
PLACEHOLDER, OTHER_PLACEHOLDER = "\ufdd4", "\ufdd5"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Keys of reasoning: of Qwen, DeepSeek and GLM; of OpenRouter and Gemma; of gpt-oss and LFM."""

Region = tuple[int, int]
"""Half-open range of characters."""


class MessageRegions:
    """The regions of the first messages of a conversation in their rendering. Each is found by rendering once more."""

    def __init__(
        self,
        template: CompiledTemplate,
        conversation: Conversation,
        messages: list[Message],
        text: str,
        *,
        add_generation_prompt: bool = False,
    ):
        """`text` is the rendering of `messages`, with or without the generation prompt."""
        self._template, self._conversation, self._messages, self.text = template, conversation, messages, text
        self._add_generation_prompt = add_generation_prompt
        self._found: dict[int, Region | None] = {}

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self._messages)

    def __getitem__(self, number: int) -> Region | None:
        """The range of a message's content, reasoning and calls; None where the rendering shows nothing of them."""
        if number not in self._found:
            self._found[number] = self._find(number)
        return self._found[number]

    def _find(self, number: int) -> Region | None:
        message = self._messages[number]
        placeholder = OTHER_PLACEHOLDER if PLACEHOLDER in message["content"] else PLACEHOLDER
        for change_names in (False, True):  # Some templates write a call's name in the message of its result too.
            changed = changed_message(message, placeholder, change_names=change_names)
            messages = [*self._messages[:number], changed, *self._messages[number + 1 :]]
            other = rendering(
                self._template, self._conversation, messages, add_generation_prompt=self._add_generation_prompt
            )
            if other is not None and other != self.text:
                before = common_prefix(other, self.text)
                behind = min(common_prefix(other[::-1], self.text[::-1]), len(self.text) - before)
                return before, len(self.text) - behind
            if "tool_calls" not in message:
                break
        return None


def changed_message(message: Message, text: str, *, change_names: bool) -> Message:
    """The message with `text` as each of its own texts; those that are empty stay so, since templates ask for that."""
    changed = {**message, "content": text if message["content"] or "tool_calls" not in message else ""}
    for field in REASONING_FIELDS:
        if isinstance(value := message.get(field), str) and value.strip():
            changed[field] = text
    if "tool_calls" in message:
        changed["tool_calls"] = [_changed_call(call, text, change_names) for call in message["tool_calls"]]
    return changed


def _changed_call(call: dict[str, Any], text: str, change_name: bool) -> dict[str, Any]:
    function = call["function"]
    changed = {**function, "arguments": dict.fromkeys(function["arguments"], text)}
    if change_name:
        changed["name"] = text
    return {**call, "function": changed}


def common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
