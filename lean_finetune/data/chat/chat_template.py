"""The chat template of a run: which one, how its trained text is told, and a conversation's segments."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.assistant_turns import TurnFinder
from lean_finetune.data.chat.bundled_templates import find_twin, read_bundled
from lean_finetune.data.chat.compiled_template import CompiledTemplate
from lean_finetune.data.chat.template_probes import (
    MESSAGE_FIELDS,
    REASONING_FIELDS,
    check_probe,
    check_turns,
    hidden_parts,
    parts_of,
    reasoning_of,
)
from lean_finetune.data.chat.trained_segments import Segment, segments_of_spans, split_segments
from lean_finetune.data.format.example import Conversation, EmptyAnswer, RowFault
from lean_finetune.data.read.worker_memory import bounded_growth

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
PROBE_BYTES = 1 << 29
"""Most that a template can take for its test conversations."""


class Template:
    """A chat template, and the way in which the assistant's text is told from the rest.

    `method` is one of: marks (the template's own generation marks), bundled (those of a template of ours that renders
    the same text, compared row by row), segments (each turn's rendering without what precedes it: see `turns`), all
    (nothing to tell: every token is trained). `reason` says why.
    """

    def __init__(
        self,
        *,
        own: CompiledTemplate,
        twin: CompiledTemplate | None,
        control: Iterable[str],
        hidden: Set[str],
        train_on: str,
        method: str,
        reason: str,
    ):
        self.source, self.method, self.reason = own.source, method, reason
        self._own, self._twin, self._train_on = own, twin, train_on
        self._turns = TurnFinder(own, control)
        self._hidden = hidden
        self.reasoning_left_out = 0
        """Rows so far with a trained turn whose reasoning the template does not show, as another one follows."""

    def render(self, conversation: Conversation) -> list[Segment]:
        """The conversation as text segments in order; joined they are the template's own rendering of it.

        Its strings must already be guarded: control tokens in them would be taken for the template's.

        Raises:
            RowFault: the template refuses the conversation, leaves out a part of it, or its trained text cannot be
                told from the rest.
            EmptyAnswer: of a trained turn the template shows no more than its end.
        """
        if self._hidden:
            self._check_shown(conversation)
        segments = self._segments(conversation)
        if any(len(message) > 2 or "</think>" in message["content"] for message in conversation.messages):
            self._check_said(conversation, segments)
        return segments

    def _segments(self, conversation: Conversation) -> list[Segment]:
        messages, tools = conversation.messages, conversation.tools
        if self.method == "marks":
            return self._by_marks(conversation, split_segments(self._own.pieces(messages, tools)))
        whole = self._own.text(messages, tools)
        if self.method == "all":
            return [Segment(whole, True)]
        if self._twin is not None:
            segments = self._twin_segments(conversation)
            if "".join(segment.text for segment in segments) == whole:
                return self._by_marks(conversation, segments)
        return self._by_turns(conversation, whole)

    def _by_marks(self, conversation: Conversation, segments: list[Segment]) -> list[Segment]:
        marks = sum(segment.trained for segment in segments)
        if not marks:
            raise RowFault("the chat template marks nothing of the row as the assistant's; mend its generation marks")
        turns = conversation.turns()
        if self._train_on == "assistant" and not conversation.context:
            # Marks of turns that follow each other may touch, and are one then.
            if marks < sum(place - 1 not in turns for place in turns):
                raise RowFault(
                    f"the chat template marks {marks} of the row's {len(turns)} assistant turns; mend its marks"
                )
            return segments
        if marks != len(turns):  # so a mark does not say which turn it is
            return self._by_turns(conversation, "".join(segment.text for segment in segments))
        places, wanted = iter(turns), set(self._wanted(conversation))
        return [Segment(text, trained and next(places) in wanted) for text, trained in segments]

    def _by_turns(self, conversation: Conversation, whole: str) -> list[Segment]:
        return segments_of_spans(whole, self._turns.spans(conversation, whole, self._wanted(conversation)))

    def _wanted(self, conversation: Conversation) -> list[int]:
        """Places of the turns to be trained."""
        trained = conversation.trained_turns()
        return trained[-1:] if self._train_on == "last_assistant" else trained

    def _twin_segments(self, conversation: Conversation) -> list[Segment]:
        """The bundled template's rendering; nothing where it refuses what the tokenizer's own shows."""
        assert self._twin is not None
        try:
            return split_segments(self._twin.pieces(conversation.messages, conversation.tools))
        except RowFault:
            return []

    def _check_shown(self, conversation: Conversation) -> None:
        """Refuse a row of which the template would leave a part out without a word.

        Raises:
            RowFault: naming the part.
        """
        hidden = sorted(parts_of(conversation) & self._hidden)
        if hidden:
            raise RowFault(
                f"the chat template does not show {hidden[0]!r}, which the row has; set data.chat_template to one that "
                f"does{self._way_to_show(hidden[0])} or remove it from the row"
            )

    def _way_to_show(self, part: str) -> str:
        """What else helps where the template does not show a part of a row."""
        if part not in MESSAGE_FIELDS:
            return " (chatml shows it)"
        shown = [field for field in REASONING_FIELDS if field not in self._hidden]
        if part in REASONING_FIELDS and shown:
            return f", rename it {shown[0]!r}, which it shows,"
        return ", write it into 'content',"

    def _check_said(self, conversation: Conversation, segments: list[Segment]) -> None:
        """Look for what trained turns say besides their content in the rendering, and count what is left out.

        Raises:
            RowFault: the last message's reasoning is not shown.
            EmptyAnswer: a turn without content trains nothing else either.
        """
        messages, left_out = conversation.messages, False
        whole = "".join(segment.text for segment in segments)
        end = len(whole)
        # From the last, as templates leave out what is earlier, and two turns may reason alike.
        for place in reversed(self._wanted(conversation)):
            message = messages[place]
            found = whole.rfind(reasoning_of(message), 0, end)
            if found < 0 and place + 1 == len(messages):
                raise RowFault(
                    "the chat template does not show the reasoning of the last answer; set data.chat_template to one "
                    "that does, or remove it from the row"
                )
            left_out |= found < 0
            end = found if found >= 0 else end
            if not message["content"].strip() and not message.get("tool_calls"):
                silent = [*messages[:place], {key: message[key] for key in ("role", "content")}, *messages[place + 1 :]]
                if _trained(self._segments(replace(conversation, messages=silent))) == _trained(segments):
                    raise EmptyAnswer(f"turn {place + 1} is empty: the chat template shows nothing of it")
        self.reasoning_left_out += left_out


def open_template(
    chat_template: str, directory: Path, special_tokens: Mapping[str, str], train_on: str, date: str
) -> Template:
    """Compile the template that `chat_template` names, and try it on test conversations.

    Args:
        chat_template: `tokenizer`, `chatml`, or a template's own text.
        directory: the tokenizer's.
        special_tokens: bos_token, eos_token, ... as text.
        train_on: data.train_on.
        date: data.template_date.

    Raises:
        UserError: there is no such template, it is broken, or the tokenizer lacks the tokens that it needs.
    """
    added = _added_tokens(directory)
    control = {token for token, special in added.items() if special or token in special_tokens.values()}
    if chat_template == "chatml":
        if missing := [token for token in CHATML_TOKENS if token not in added]:
            raise UserError(
                f"data.chat_template: chatml needs the control token {missing[0]}, which the tokenizer in {directory} "
                "lacks; use tokenizer, or the path of a template made for it"
            )
        control |= set(CHATML_TOKENS)
        source, name, said = read_bundled("chatml"), "data.chat_template: chatml", "the built-in ChatML template"
    elif chat_template == "tokenizer":
        source, file = read_template(directory, _read_config(directory))
        name, said = f"model.name: the chat template in {file}", "the tokenizer's own template"
    else:
        source, name, said = chat_template, "data.chat_template: the template", "the template of data.chat_template"
    try:
        with bounded_growth(PROBE_BYTES):
            own = CompiledTemplate(source, special_tokens, name, date)
            template = _tried(own, said, control, train_on)
            check_probe(template.render, name, special_tokens, control)
    except (MemoryError, RecursionError) as error:
        fault = "needs too much memory for" if isinstance(error, MemoryError) else "calls itself without end on"
        raise UserError(
            f"{name} {fault} a conversation of two messages; mend it, or name another in data.chat_template"
        ) from None
    return template


def _tried(own: CompiledTemplate, said: str, control: Set[str], train_on: str) -> Template:
    """The template with the way to find its trained text, from how it renders test conversations."""
    hidden = hidden_parts(own)
    check_turns(own, hidden, own.name, train_on)
    method, twin = "segments", None
    if train_on == "all":
        method, reason = "all", "data.train_on is all: every token of the rendering is trained"
    elif own.has_marks:
        method, reason = "marks", f"{said} has generation marks"
    elif found := find_twin(own, hidden):
        method, twin = "bundled", found
        reason = f"{said} has no generation marks, but renders test conversations as {found.name} does, which has them"
    else:
        reason = f"{said} has no generation marks, so each answer is what its turn adds to the text before it"
    return Template(own=own, twin=twin, control=control, hidden=hidden, train_on=train_on, method=method, reason=reason)


def _trained(segments: list[Segment]) -> list[str]:
    """The texts that are trained."""
    return [segment.text for segment in segments if segment.trained]


def _added_tokens(directory: Path) -> dict[str, bool]:
    """The tokens added to the tokenizer's vocabulary, and whether each is special.

    Raises:
        UserError: tokenizer.json is missing or broken.
    """
    path = directory / "tokenizer.json"
    try:
        added = orjson.loads(path.read_bytes()).get("added_tokens") or []
    except (OSError, orjson.JSONDecodeError) as error:
        raise UserError(f"model.name: {path} cannot be read ({error}); save the tokenizer again") from error
    return {token["content"]: bool(token.get("special")) for token in added}


def read_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, str]:
    """A tokenizer's chat template and the name of the file that holds it.

    Raises:
        UserError: it has none.
    """
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8"), str(file)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"model.name: the tokenizer in {directory} has no chat template; set data.chat_template to chatml or to "
            "the path of one, or use data.format prompt_completion or text"
        )
    return template, str(directory / "tokenizer_config.json")


def _read_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing where there is none."""
    path = directory / "tokenizer_config.json"
    return dict(orjson.loads(path.read_bytes())) if path.exists() else {}
