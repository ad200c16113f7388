"""Where each turn stands in a rendered conversation, and which of it is trained."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from lean_finetune.core.errors import RowFault
from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.chat.control_tokens import any_of
from lean_finetune.data.format.format_base import Conversation, Message
from lean_finetune.data.format.given_images import content_parts

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
            changed["content"] = content_parts(message["content"])
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


# Where a message's own text is in a rendering: the part that changes when other text takes its place.

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
        # Some templates write a call's name in the message of its result too, so that it is the last to be changed.
        for calls in ("arguments", "more arguments", "names"):
            changed = changed_message(message, placeholder, calls)
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


def changed_message(message: Message, text: str, calls: str) -> Message:
    """The message with `text` as each of its own texts; those that are empty stay so, since templates ask for that.

    `calls` is what changes in its calls: arguments, more arguments (one is added), or names (also the calls' names).
    """
    changed = {**message, "content": text if message["content"] or "tool_calls" not in message else ""}
    for field in REASONING_FIELDS:
        if isinstance(value := message.get(field), str) and value.strip():
            changed[field] = text
    if "tool_calls" in message:
        changed["tool_calls"] = [_changed_call(call, text, calls) for call in message["tool_calls"]]
    return changed


def _changed_call(call: dict[str, Any], text: str, calls: str) -> dict[str, Any]:
    function = call["function"]
    names = [*function["arguments"], *([text] if calls == "more arguments" else [])]
    changed = {**function, "arguments": dict.fromkeys(names, text)}
    if calls == "names":
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


# Location of assistant turns in a rendered conversation, for chat templates without generation marks.
#
# For each turn, P is the rendering of all messages before it with the generation prompt, which the model gets at
# inference, and Q is the rendering up to the end of the turn. Where the full rendering starts with both, the turn is
# the text of Q behind P.
#
# Some templates render messages differently when others follow: Qwen3 removes earlier thinking. The full rendering is
# what the model sees, so the turn is then found in it by what stands around the messages' own texts (see
# `MessageRegions`). The turn starts behind as much of the generation prompt as the full rendering has there, and ends
# behind the token that ends Q, or the first control token where there is another one. No boundary lies inside a token
# that was added to the vocabulary. A turn is refused if another message stands between its parts.

TAIL_CHARACTERS = 256


class TurnFinder:
    """Finds the assistant turns in renderings of one template."""

    def __init__(
        self,
        template: CompiledTemplate,
        control_tokens: Collection[str],
        added_tokens: Collection[str],
        eos: str | None,
    ):
        """Find turns of `template`; `control_tokens` may end one, as `eos` does, and `added_tokens` are never cut."""
        self._template, self._eos = template, eos
        self._control = re.compile(any_of(control_tokens) or r"(?!)")
        self._added = re.compile(any_of(added_tokens) or r"(?!)")
        self._longest = max(map(len, added_tokens), default=0)
        self._header = generation_prompt(template).lstrip()
        lead = self._control.match(self._header)
        self._leads = lead is not None
        """Whether the generation prompt begins with a control token, so that no other text can be taken for it."""
        self._anchor = lead[0] if lead else self._header.rstrip()
        """The part of the generation prompt by which it is searched: the rest may differ from turn to turn."""

    def spans(self, conversation: Conversation, full: str, turns: list[int]) -> list[tuple[int, int]]:
        """The spans of assistant turns in the full rendering, as ranges of characters, each with its end-of-turn token.

        Raises RowFault if a turn cannot be located, or other messages stand between its parts.
        """
        regions = MessageRegions(self._template, conversation, conversation.messages, full)
        spans: list[tuple[int, int]] = []
        done = 0
        for turn in turns:
            start = self._start(conversation, regions, turn, done)
            start = None if start is None else self._outside_token(full, self._behind_header(full, start))
            end = None if start is None else self._end(conversation, regions, turn, start)
            end = None if start is None or end is None else self._first_eos(regions, turn, start, end)
            if start is None or end is None or not done <= start < end:
                raise _not_located(conversation.messages[turn], regions, turn)
            spans.append((start, end))
            done = end
        return spans

    def _start(self, conversation: Conversation, regions: MessageRegions, turn: int, done: int) -> int | None:
        """Index behind the generation prompt of the turn."""
        full, before = regions.text, conversation.messages[:turn]
        prompt = rendering(self._template, conversation, before, add_generation_prompt=True)
        if prompt is not None and full.startswith(prompt) and prompt.endswith(self._header):
            return len(prompt)
        own = regions[turn]
        if prompt is not None and full.startswith(prompt):  # Some templates add no header behind another answer.
            return self._behind_anchor(full, len(prompt), own[0] if own else 0) or len(prompt)
        if own is None:
            return None
        previous, shown = _last_shown(regions, turn)
        if (found := self._behind_anchor(full, max(done, shown[1]), own[0])) is not None:
            return found
        if prompt is None or previous is None:
            return None
        # The prompt may differ from the full rendering anywhere; only what follows the last message is compared.
        there = MessageRegions(self._template, conversation, before, prompt, add_generation_prompt=True)[previous]
        if there is None or not (ahead := self._shared(prompt[there[1] :], full[shown[1] : own[0]])):
            return None
        return shown[1] + ahead

    def _behind_anchor(self, text: str, first: int, last: int) -> int | None:
        """The place behind the last header in a part of the text, or behind as much of it as stands there."""
        if not self._anchor or (found := text.rfind(self._anchor, first, last)) < 0:
            return None
        return found + max(len(self._anchor), self._shared(self._header, text[found:last]))

    def _shared(self, prompt: str, text: str) -> int:
        """How much of a prompt a text begins with; a part of it ends behind a blank, or where an added token does.

        Or before one: Apertus continues an answer behind tool results without the header that the prompt has.
        """
        same = common_prefix(prompt, text)
        if same == len(prompt):
            return same
        ends = [place for match in self._added.finditer(prompt) for place in match.span() if place <= same]
        blank = len(prompt[:same]) - len(re.split(r"\s", prompt[:same])[-1])
        return max([blank, *ends])

    def _end(self, conversation: Conversation, regions: MessageRegions, turn: int, start: int) -> int | None:
        """Index behind the end-of-turn token."""
        full = regions.text
        is_last = turn + 1 == len(conversation.messages)
        messages = conversation.messages[: turn + 1]
        upto = full if is_last else rendering(self._template, conversation, messages)
        there = None
        if upto is not None and not upto.startswith(full[:start]):  # Then the turn has another place in it.
            there = MessageRegions(self._template, conversation, messages, upto)[turn]
        stop = None if upto is None else self._last_control_token(upto, there[1] if there else start)
        if upto is not None and full.startswith(upto[: stop[1] if stop else len(upto)]):
            return stop[1] if stop else len(upto)
        own = regions[turn]
        if own is None:
            return None
        limit = _next_shown(regions, turn, own)
        if limit < own[1]:
            return None
        if upto is not None and stop is not None:
            there = there or MessageRegions(self._template, conversation, messages, upto)[turn]
            tail = upto[there[1] : stop[1]] if there is not None else ""
            if tail and full.startswith(tail, own[1]):
                return own[1] + len(tail)
            if (found := full.find(upto[stop[0] : stop[1]], own[1], limit)) >= 0:
                return found + stop[1] - stop[0]
            same = own[1] + common_prefix(tail, full[own[1] : limit])
            if shared := list(self._control.finditer(full, own[1], same)):
                return shared[-1].end()
        match = self._control.search(full, own[1], limit)
        return match.end() if match else None

    def _first_eos(self, regions: MessageRegions, turn: int, start: int, end: int) -> int:
        """Index behind the first end-of-sequence token behind the turn's texts, where generation stops; else `end`.

        Command R7B writes the start of another answer behind calls, though no generation prompt is asked for.
        """
        eos, text = self._eos, regions.text
        if not eos or text.find(eos, start, end - len(eos)) < 0 or (own := regions[turn]) is None:
            return end
        found = text.find(eos, own[1], end)
        return end if found < 0 else found + len(eos)

    def _behind_header(self, text: str, place: int) -> int:
        """The place behind a generation prompt that begins here: some templates write it there and not in prompts."""
        return place + len(self._header) if self._leads and text.startswith(self._header, place) else place

    def _outside_token(self, text: str, place: int) -> int:
        """The place, or the start of the added token that it lies inside."""
        for match in self._added.finditer(text, max(0, place - self._longest), place + self._longest):
            if match.start() >= place:
                break
            if match.end() > place:
                return match.start()
        return place

    def _last_control_token(self, text: str, start: int) -> Region | None:
        """The span of the control token that ends the text, from `start` on; None if more than blanks follow it."""
        for begin in (max(start, len(text) - TAIL_CHARACTERS), start):
            if found := list(self._control.finditer(text, begin)):
                end = found[-1].end()
                return None if text[end:].strip() else found[-1].span()
        return None


def generation_prompt(template: CompiledTemplate) -> str:
    """The text before an answer; empty where there is none or the template refuses a lone question."""
    question = Conversation(messages=[{"role": "user", "content": "Q"}], tools=None)
    prompt = rendering(template, question, add_generation_prompt=True)
    text = rendering(template, question)
    return prompt[len(text) :] if prompt and text and prompt.startswith(text) else ""


def _last_shown(regions: MessageRegions, turn: int) -> tuple[int | None, Region]:
    """The last message before a turn of which the rendering shows something, and its region."""
    for number in reversed(range(turn)):
        if (region := regions[number]) is not None:
            return number, region
    return None, (0, 0)


def _next_shown(regions: MessageRegions, turn: int, own: Region) -> int:
    """Where the region of the next message after a turn begins, of those shown behind the start of the turn's `own`.

    The text's end without one.
    """
    later = (regions[number] for number in range(turn + 1, regions.count))
    return next((region[0] for region in later if region is not None and region[0] >= own[0]), len(regions.text))


def _not_located(message: Message, regions: MessageRegions, turn: int) -> RowFault:
    """The fault of a turn, which is `message`, without a span."""
    remedy = "put generation marks into a copy of the template and name it in data.chat_template"
    own = regions[turn] or (0, 0)
    for number in range(turn + 1, regions.count):
        other = regions[number]
        if other is not None and own[0] <= other[0] < own[1]:
            parts = "remove the text beside its calls, " if message["content"] and "tool_calls" in message else ""
            return RowFault(
                f"the chat template writes turn {number + 1} between parts of turn {turn + 1}, so that these are not "
                f"one piece of text; {parts}set its weight to 0, or {remedy}"
            )
    return RowFault(f"the chat template renders turn {turn + 1} in a way that its tokens cannot be located; {remedy}")
