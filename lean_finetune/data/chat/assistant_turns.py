"""The assistant's turns inside a rendered conversation, for templates that do not mark them.

For turn i, P is the rendering of all before it followed by the header of the answer, which is what the model is given
at inference, and Q the rendering up to and with the turn. Where the whole rendering starts with both, the turn is
Q without P. Some templates show a turn otherwise once others follow (Qwen3 leaves out earlier thinking). Then the turn
is found by rendering the whole once more with another text in its place: where the two differ stands its text, in front
of it the answer's header, behind it the token that ends a turn.
"""

import re
from collections.abc import Iterable

from lean_finetune.data.chat.compiled_template import CompiledTemplate
from lean_finetune.data.chat.control_tokens import any_of
from lean_finetune.data.format.example import Conversation, RowFault

# Noncharacters, which no template treats in a special way and hardly any row holds.
STAND_IN, OTHER_STAND_IN = "\ufdd4", "\ufdd5"
TAIL_CHARACTERS = 256


class TurnFinder:
    """Finds turns in what one template renders."""

    def __init__(self, template: CompiledTemplate, control_tokens: Iterable[str]):
        self._template = template
        self._control = re.compile(any_of(control_tokens) or r"(?!)")
        self._header = self._answer_header()

    def spans(self, conversation: Conversation, whole: str, places: list[int]) -> list[tuple[int, int]]:
        """Half-open character spans in `whole` of the assistant turns at `places`, each with its end-of-turn token.

        Raises:
            RowFault: a turn cannot be told from the rest.
        """
        spans: list[tuple[int, int]] = []
        done = 0
        for place in places:
            start = self._start(conversation, whole, place, done)
            end = None if start is None else self._end(conversation, whole, place, start)
            if start is None or end is None or not done <= start < end:
                raise RowFault(
                    f"the chat template shows turn {place + 1} in a way that its tokens cannot be told from the rest; "
                    "put generation marks into a template of your own and name it in data.chat_template"
                )
            spans.append((start, end))
            done = end
        return spans

    def _start(self, conversation: Conversation, whole: str, place: int, done: int) -> int | None:
        """Where the model's own text begins."""
        messages = conversation.messages
        asked = self._text(conversation, messages[:place], ask=True)
        if asked is not None and whole.startswith(asked):
            return len(asked)
        differing = self._differing(conversation, whole, place)
        if differing is None:
            return None
        if self._header and (found := whole.rfind(self._header, done, differing[0])) >= 0:
            return found + len(self._header)
        before = self._text(conversation, messages[:place], ask=False)
        if asked is not None and before is not None and whole.startswith(before):
            return min(differing[0], _common_prefix(asked, whole))
        return None

    def _end(self, conversation: Conversation, whole: str, place: int, start: int) -> int | None:
        """Behind the token that ends the turn."""
        last = place + 1 == len(conversation.messages)
        upto = whole if last else self._text(conversation, conversation.messages[: place + 1], ask=False)
        stop = None if upto is None else self._closing(upto, start)
        if upto is not None and whole.startswith(upto[: stop[1] if stop else len(upto)]):
            return stop[1] if stop else len(upto)
        differing = self._differing(conversation, whole, place)
        if differing is None:
            return None
        following = self._differing(conversation, whole, place + 1)
        limit = len(whole) if following is None else following[0]
        if upto is not None and stop is not None:
            token = upto[stop[0] : stop[1]]
            if (found := whole.find(token, differing[1], limit)) >= 0:
                return found + len(token)
        match = self._control.search(whole, differing[1], limit)
        return match.end() if match else None

    def _differing(self, conversation: Conversation, whole: str, place: int) -> tuple[int, int] | None:
        """The characters of `whole` that change with the text of the message at `place`; None when none does."""
        if place == len(conversation.messages):
            return None
        messages = list(conversation.messages)
        stand_in = OTHER_STAND_IN if STAND_IN in messages[place]["content"] else STAND_IN
        messages[place] = {**messages[place], "content": stand_in}
        other = self._text(conversation, messages, ask=False)
        if other is None or other == whole:
            return None
        before = _common_prefix(other, whole)
        behind = min(_common_prefix(other[::-1], whole[::-1]), len(whole) - before)
        return before, len(whole) - behind

    def _closing(self, text: str, start: int) -> tuple[int, int] | None:
        """The control token at or behind `start` that closes the text; None when more than blanks follow the last."""
        for begin in (max(start, len(text) - TAIL_CHARACTERS), start):
            if found := list(self._control.finditer(text, begin)):
                end = found[-1].end()
                return None if text[end:].strip() else found[-1].span()
        return None

    def _text(self, conversation: Conversation, messages: list, *, ask: bool) -> str | None:
        """A rendering; None where the template refuses it."""
        try:
            return self._template.text(messages, conversation.tools, ask=ask)
        except RowFault:
            return None

    def _answer_header(self) -> str:
        """What the template puts in front of an answer; empty where it has no such header, or refuses a question."""
        question = Conversation(messages=[{"role": "user", "content": "Q"}], tools=None)
        asked, told = (self._text(question, question.messages, ask=ask) for ask in (True, False))
        return asked[len(told) :] if asked and told and asked.startswith(told) else ""


def _common_prefix(a: str, b: str) -> int:
    """Characters with which both texts begin alike, found by halving: comparing slices is quick."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
