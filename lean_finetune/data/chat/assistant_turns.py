"""Location of assistant turns in a rendered conversation, for chat templates without generation marks.

For each turn, P is the rendering of all messages before it with the generation prompt, which the model gets at
inference, and Q is the rendering up to the end of the turn. Where the full rendering starts with both, the turn is the
text of Q behind P. Some templates render a turn differently when others follow: Qwen3 removes earlier thinking. Then
the conversation is rendered again with a placeholder for the turn's content. The two renderings differ at the content;
the generation prompt ends before it, and the token that ends a turn follows it.
"""

import re
from collections.abc import Iterable

from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.chat.control_tokens import any_of
from lean_finetune.data.format.example import Conversation, RowFault

# Noncharacters, which templates do not treat specially and rows rarely have.
PLACEHOLDER, OTHER_PLACEHOLDER = "\ufdd4", "\ufdd5"
TAIL_CHARACTERS = 256


class TurnFinder:
    """Finds the assistant turns in renderings of one template."""

    def __init__(self, template: CompiledTemplate, control_tokens: Iterable[str]):
        self._template = template
        self._control = re.compile(any_of(control_tokens) or r"(?!)")
        self._generation_prompt = self._find_generation_prompt()

    def spans(self, conversation: Conversation, full: str, turns: list[int]) -> list[tuple[int, int]]:
        """The spans of assistant turns in the full rendering, as ranges of characters, each with its end-of-turn token.

        Raises RowFault if a turn cannot be located.
        """
        spans: list[tuple[int, int]] = []
        done = 0
        for turn in turns:
            start = self._start(conversation, full, turn, done)
            end = None if start is None else self._end(conversation, full, turn, start)
            if start is None or end is None or not done <= start < end:
                raise RowFault(
                    f"the chat template renders turn {turn + 1} in a way that its tokens cannot be located; put "
                    "generation marks into a copy of the template and name it in data.chat_template"
                )
            spans.append((start, end))
            done = end
        return spans

    def _start(self, conversation: Conversation, full: str, turn: int, done: int) -> int | None:
        """Index behind the generation prompt of the turn."""
        messages = conversation.messages
        prompt = rendering(self._template, conversation, messages[:turn], add_generation_prompt=True)
        if prompt is not None and full.startswith(prompt):
            return len(prompt)
        content = self._content(conversation, full, turn)
        if content is None:
            return None
        if self._generation_prompt and (found := full.rfind(self._generation_prompt, done, content[0])) >= 0:
            return found + len(self._generation_prompt)
        before = rendering(self._template, conversation, messages[:turn])
        if prompt is not None and before is not None and full.startswith(before):
            return min(content[0], _common_prefix(prompt, full))
        return None

    def _end(self, conversation: Conversation, full: str, turn: int, start: int) -> int | None:
        """Index behind the end-of-turn token."""
        is_last = turn + 1 == len(conversation.messages)
        messages = conversation.messages[: turn + 1]
        upto = full if is_last else rendering(self._template, conversation, messages)
        stop = None if upto is None else self._last_control_token(upto, start)
        if upto is not None and full.startswith(upto[: stop[1] if stop else len(upto)]):
            return stop[1] if stop else len(upto)
        content = self._content(conversation, full, turn)
        if content is None:
            return None
        following = self._content(conversation, full, turn + 1)
        limit = len(full) if following is None else following[0]
        if upto is not None and stop is not None:
            token = upto[stop[0] : stop[1]]
            if (found := full.find(token, content[1], limit)) >= 0:
                return found + len(token)
        match = self._control.search(full, content[1], limit)
        return match.end() if match else None

    def _content(self, conversation: Conversation, full: str, turn: int) -> tuple[int, int] | None:
        """The span of `full` that changes with the message's content; None if nothing changes."""
        if turn == len(conversation.messages):
            return None
        messages = list(conversation.messages)
        placeholder = OTHER_PLACEHOLDER if PLACEHOLDER in messages[turn]["content"] else PLACEHOLDER
        messages[turn] = {**messages[turn], "content": placeholder}
        other = rendering(self._template, conversation, messages)
        if other is None or other == full:
            return None
        before = _common_prefix(other, full)
        behind = min(_common_prefix(other[::-1], full[::-1]), len(full) - before)
        return before, len(full) - behind

    def _last_control_token(self, text: str, start: int) -> tuple[int, int] | None:
        """The span of the control token that ends the text, from `start` on; None if more than blanks follow it."""
        for begin in (max(start, len(text) - TAIL_CHARACTERS), start):
            if found := list(self._control.finditer(text, begin)):
                end = found[-1].end()
                return None if text[end:].strip() else found[-1].span()
        return None

    def _find_generation_prompt(self) -> str:
        """The text before an answer; empty where there is none or the template refuses a lone question."""
        question = Conversation(messages=[{"role": "user", "content": "Q"}], tools=None)
        prompt = rendering(self._template, question, add_generation_prompt=True)
        text = rendering(self._template, question)
        return prompt[len(text) :] if prompt and text and prompt.startswith(text) else ""


def _common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
