"""The chat template of a run: from the tokenizer's files, a file of the user or this package."""

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.assistant_turns import (
    PLACEHOLDER,
    REASONING_FIELDS,
    TurnFinder,
    generation_prompt,
)
from lean_finetune.data.chat.compiled_template import LIMITS_MET, CompiledTemplate, limit_met, rendering, work_limits
from lean_finetune.data.chat.control_tokens import TextSegment, any_of, segments_of_spans, split_segments
from lean_finetune.data.chat.template_probes import (
    ASK,
    CALLING,
    MESSAGE_FIELDS,
    PROBES,
    RESULT,
    ThinkTags,
    answer_texts,
    basic_segments,
    check_ends,
    check_last_end,
    check_roles,
    ends_turn,
    omitted_parts,
    parts_of,
    reasoning_of,
    thoughts,
)
from lean_finetune.data.chat.tokenizer_files import compile_template, read_template
from lean_finetune.data.format.format_base import Conversation, EmptyAnswer, Message
from lean_finetune.pinning.template_files import TemplateText

DIRECTORY = Path(__file__).parent / "templates"
BUNDLED = {
    "chatml": "im_start",
    "qwen2.5": "im_start",
    "qwen3": "im_start",
    "llama-3": "start_header_id",
    "llama-3.1": "start_header_id",
    "mistral": "INST",
    "mistral-tools": "INST",
    "gemma": "start_of_turn",
    "zephyr": "<|assistant|>",
}
"""A text that every template of the family contains, so that others need not be compiled."""


def read_bundled(family: str) -> str:
    """The text of a bundled template."""
    return (DIRECTORY / f"{family}.jinja").read_text(encoding="utf-8")


def find_bundled(own: CompiledTemplate, omitted: Set[str]) -> CompiledTemplate | None:
    """The bundled template that renders every test conversation like `own`; None if there is none.

    Conversations that `own` refuses or does not show completely (`omitted`) are not compared: such rows are refused
    anyway. A template that refuses the basic conversation has no match, because too little would be compared.
    """
    if rendering(own, PROBES[0]) is None:
        return None
    probes = [(probe, rendering(own, probe)) for probe in PROBES if not parts_of(probe) & omitted]
    for family, needed in BUNDLED.items():
        if needed in own.source:
            bundled = own.with_source(read_bundled(family), f"the bundled {family} template")
            if all(text is None or text == rendering(bundled, probe) for probe, text in probes):
                return bundled
    return None


# The end of trained turns, for templates that write none after an answer.
#
# GLM-4.5 begins the next turn by the token that ends the one before, Apertus and Apriel close a turn only when another
# follows, and some templates end no turn. Generation stops at the tokens of generation_config.json, so one of them
# must be trained behind an answer.

_ANSWER = {"role": "assistant", "content": "zqanswer"}


@dataclass(frozen=True, kw_only=True)
class TurnEnds:
    """Trains an end behind each answer."""

    stops: re.Pattern[str]
    """A token at which generation stops, at the start of a text, and the white space before it."""
    header: str
    """The generation prompt. Between two answers in a row, it begins the second one and ends no turn."""
    after_answer: str
    """Text to append behind a row's last answer."""
    after_calls: str
    """The same behind tool calls."""

    def apply(self, segments: Sequence[TextSegment], last: Message) -> list[TextSegment]:
        """The segments of a row, whose last message is `last`, with the ends of trained turns in the trained text.

        A stop token that follows an answer is moved into it. If the row ends with an answer, an end is appended.
        """
        ended: list[TextSegment] = []
        for text, trained in segments:
            follows = not trained and ended and ended[-1].trained and text.strip() != self.header
            if follows and (stop := self.stops.match(text)):
                ended[-1] = TextSegment(ended[-1].text + stop[0], True)
                text = text[stop.end() :]
            ended.append(TextSegment(text, trained))
        while ended and not ended[-1].trained and not ended[-1].text.strip():
            ended.pop()
        end = self.after_calls if last.get("tool_calls") else self.after_answer
        if ended and ended[-1].trained and last["role"] == "assistant" and not ended[-1].text.endswith(end):
            ended[-1] = TextSegment(ended[-1].text + end, True)
        return [segment for segment in ended if segment.text]


def find_ends(template: CompiledTemplate, choice: str, stops: Collection[str], eos: str | None) -> TurnEnds | None:
    """The ends of turns for data.end_of_turn: `choice`, auto or eos; None if no token is known.

    `stops` are the tokens at which generation stops, the usual one first. For `auto` an end is what the template writes
    behind an answer when a question follows, if that is one of them, else the end-of-sequence token or the first one.
    """
    stops = list(dict.fromkeys(stops)) or ([eos] if eos else [])
    usual = eos if eos in stops or (eos and choice == "eos") else next(iter(stops), None)
    if usual is None:
        return None
    pattern = re.compile(rf"\s*(?:{any_of(stops)})")
    answer = calls = None
    if choice == "auto":
        shown = rendering(template, Conversation(messages=[ASK, _ANSWER, ASK], tools=None))
        answer = pattern.match((shown or "").rpartition(_ANSWER["content"])[2])
        called, result = (
            rendering(template, Conversation(messages=m, tools=None)) for m in ([ASK, CALLING], [ASK, CALLING, RESULT])
        )
        if called and result and result.startswith(called.rstrip()):
            calls = pattern.match(result, len(called.rstrip()))
    after_answer = answer[0] if answer else usual
    header = generation_prompt(template).strip()
    return TurnEnds(
        stops=pattern, header=header, after_answer=after_answer, after_calls=calls[0] if calls else after_answer
    )


# The chat template of a run: which one it is, and how the trained text of a conversation is found.

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
UNIQUE_CHARACTERS = 40
"""A text of so many characters is not in a rendering by chance. Shorter ones are found by rendering once more."""


class ChatTemplate:
    """A chat template, and the method that finds the assistant's text in its renderings.

    `method` is one of: marks (the template has generation marks), bundled (a bundled template with marks renders the
    same text, which is compared for each row), segments (see `TurnFinder`), all (every token is trained). `reason` is
    the reason for it.
    """

    def __init__(
        self,
        own: CompiledTemplate,
        title: str,
        control: Set[str],
        added: Set[str],
        eos: str | None,
        train_on: str,
    ):
        """Check the template, which reasons call `title`, on test conversations, and choose the method by them.

        `added` has all tokens added to the vocabulary, `control` those that may end a turn, as `eos` does.
        """
        self._own, self._train_on, self._bundled = own, train_on, None
        self._omitted = omitted_parts(own)
        check_roles(own, self._omitted, own.name, train_on)
        self._turns = TurnFinder(own, control, added, eos)
        self._tags = ThinkTags(own, self._omitted)
        self.source, self.method = own.source, "segments"
        self.reason = f"{title} has no generation marks, so each answer is what its turn adds to the text before it"
        if train_on == "all":
            self.method, self.reason = "all", "data.train_on is all: every token of the rendering is trained"
        elif own.has_marks:
            self.method, self.reason = "marks", f"{title} has generation marks"
        elif bundled := find_bundled(own, self._omitted):
            self.method, self._bundled = "bundled", bundled
            rendered = f"renders test conversations as {bundled.name} does, which has them"
            self.reason = f"{title} has no generation marks, but {rendered}"
        self._ends: TurnEnds | None = None
        self._needs_end: tuple[str, ...] = ()
        """Tokens of which the template writes one behind other answers; empty where none is needed."""
        self.end_reason = ""
        """How turns end, if data.end_of_turn changes what the template writes."""
        self.reasoning_left_out = 0
        """Rows so far with an earlier trained turn whose reasoning the template does not show."""
        self.with_tools = self
        """The template of conversations with tools, if the tokenizer has another for them."""

    def render(self, conversation: Conversation) -> list[TextSegment]:
        """The conversation as text segments; joined they are the template's rendering, and an end where it writes none.

        Its strings must be guarded: control tokens in them would be taken for the template's. Raises RowFault if the
        template refuses the conversation or omits a part of it, or a trained turn cannot be located. Raises EmptyAnswer
        if the template shows nothing of a trained turn except its end.
        """
        if conversation.tools is not None and self.with_tools is not self:
            left_out = self.with_tools.reasoning_left_out
            segments = self.with_tools.render(conversation)
            self.reasoning_left_out += self.with_tools.reasoning_left_out - left_out
            return segments
        if self._omitted:
            self._check_shown(conversation)
        # A list comprehension, and one search for both tags, since every row comes here.
        may_reason = any([len(message) > 2 or "think>" in message["content"] for message in conversation.messages])
        if may_reason:
            conversation = replace(conversation, messages=self._tags.moved(conversation))
        segments = self._segments(conversation)
        if may_reason:
            self._check_texts(conversation, segments)
            self._check_reasoning(conversation, segments)
        if self._ends is not None:
            return self._ends.apply(segments, conversation.messages[-1])
        ends_row = len(conversation.messages) - 1 in self._wanted(conversation)
        if self._needs_end and ends_row and not ends_turn(segments, self._needs_end):
            raise RowFault(
                "the chat template writes no end behind the row's last answer, though it ends others; change the row, "
                "or set data.end_of_turn to eos"
            )
        return segments

    def end_turns(
        self, choice: str, stops: Sequence[str], special_tokens: Mapping[str, str], control: Set[str]
    ) -> None:
        """Apply data.end_of_turn: `choice`, and refuse a template that trains no end, or begins with two BOS tokens.

        Raises UserError, naming the fault.
        """
        bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
        if (segments := basic_segments(self.render)) is None:
            return
        if choice == "eos" or (choice == "auto" and not ends_turn(segments, control)):
            self._ends = find_ends(self._own, choice, stops, eos)
        elif choice == "auto":
            self._needs_end = tuple(control)
        if self._ends is not None:
            self.end_reason = f"the row's last answer ends with {self._ends.after_answer.strip()!r}"
            segments = self._ends.apply(segments, {"role": "assistant", "content": ""})
        check_ends(segments, self._own.name, bos, None if choice == "none" else control | {*stops})

    def _segments(self, conversation: Conversation) -> list[TextSegment]:
        messages, tools = conversation.messages, conversation.tools
        if self.method == "marks":
            return self._by_marks(conversation, split_segments(self._own.parts(messages, tools)))
        full = self._own.text(messages, tools)
        if self.method == "all":
            return [TextSegment(full, True)]
        if self._bundled is not None:
            try:
                segments = split_segments(self._bundled.parts(messages, tools))
            except RowFault:
                segments = []
            if "".join(segment.text for segment in segments) == full:
                return self._by_marks(conversation, segments)
        return self._by_turns(conversation, full)

    def _by_marks(self, conversation: Conversation, segments: list[TextSegment]) -> list[TextSegment]:
        marks = sum(segment.trained for segment in segments)
        if not marks:
            raise RowFault(
                "the chat template marks nothing of the row as the assistant's; correct its generation marks"
            )
        turns = conversation.turns()
        if self._train_on == "assistant" and not conversation.context:
            # Marks of consecutive turns may have no text between them, and are then one.
            if marks < sum(turn - 1 not in turns for turn in turns):
                raise RowFault(
                    f"the chat template marks {marks} of the row's {len(turns)} assistant turns; correct its marks"
                )
            return segments
        if marks != len(turns):  # Then it is unknown which turn a mark belongs to.
            return self._by_turns(conversation, "".join(segment.text for segment in segments))
        remaining, wanted = iter(turns), set(self._wanted(conversation))
        return [TextSegment(text, trained and next(remaining) in wanted) for text, trained in segments]

    def _by_turns(self, conversation: Conversation, full: str) -> list[TextSegment]:
        return segments_of_spans(full, self._turns.spans(conversation, full, self._wanted(conversation)))

    def _wanted(self, conversation: Conversation) -> list[int]:
        """Indices of the turns to be trained."""
        trained = conversation.trained_turns()
        return trained[-1:] if self._train_on == "last_assistant" else trained

    def _check_shown(self, conversation: Conversation) -> None:
        """Refuse a row with a part that the template silently omits."""
        omitted = sorted(parts_of(conversation) & self._omitted)
        if not omitted:
            return
        remedy = ", write it into 'content',"
        shown = [field for field in REASONING_FIELDS if field not in self._omitted]
        if omitted[0] not in MESSAGE_FIELDS:
            remedy = " (chatml shows it)"
        elif omitted[0] in REASONING_FIELDS and shown:
            remedy = f", rename it {shown[0]!r}, which it shows,"
        raise RowFault(
            f"the chat template does not show {omitted[0]!r}, which the row has; set data.chat_template to one "
            f"that does{remedy} or remove it from the row"
        )

    def _check_texts(self, conversation: Conversation, segments: list[TextSegment]) -> None:
        """Refuse text beside calls or reasoning that the template shows in other rows, and not in this one."""
        messages = conversation.messages
        full = "".join(segment.text for segment in segments)
        for turn in conversation.turns():
            message = messages[turn]
            text, beside = message["content"].strip(), "calls" if "tool_calls" in message else "reasoning"
            if not text or "</think>" in text or not ("tool_calls" in message or reasoning_of(message)):
                continue
            if len(text) >= UNIQUE_CHARACTERS and text in full:
                continue
            changed = [*messages[:turn], {**message, "content": PLACEHOLDER}, *messages[turn + 1 :]]
            if rendering(self._own, conversation, changed) == full:
                raise RowFault(
                    f"the chat template does not show the text beside the {beside} of turn {turn + 1}, because of what "
                    "follows it; remove that text, or set data.chat_template to a template that shows it (chatml does)"
                )

    def _check_reasoning(self, conversation: Conversation, segments: list[TextSegment]) -> None:
        """Search the reasoning of trained turns in the rendering, and count the row if an earlier one is omitted."""
        messages, left_out = conversation.messages, False
        full = "".join(segment.text for segment in segments)
        end = len(full)
        # From the last turn on: templates omit earlier reasoning, and two turns may have the same.
        for turn in reversed(self._wanted(conversation)):
            message = messages[turn]
            for text in answer_texts(message["content"]) if "</think>" in message["content"] else ():
                if full.find(text, 0, end) < 0:
                    raise RowFault(
                        f"the chat template does not show the text beside the <think> block of turn {turn + 1}; put "
                        "the reasoning first, or set data.chat_template to a template that shows it"
                    )
            blocks = thoughts(message["content"])
            if turn + 1 == len(messages) and len(blocks) > 1 and not all(text in full for text in blocks):
                raise RowFault(
                    f"turn {turn + 1} has several <think> blocks, and the chat template does not show all of them; "
                    "join them, or remove the row"
                )
            found = full.rfind(reasoning_of(message), 0, end)
            if found < 0 and turn + 1 == len(messages):
                raise RowFault(
                    "the chat template does not show the reasoning of the last answer; set data.chat_template to one "
                    "that does, or remove it from the row"
                )
            left_out |= found < 0
            end = found if found >= 0 else end
            if not message["content"].strip() and not message.get("tool_calls"):
                bare = [*messages[:turn], {key: message[key] for key in ("role", "content")}, *messages[turn + 1 :]]
                if _trained(self._segments(replace(conversation, messages=bare))) == _trained(segments):
                    raise EmptyAnswer(f"turn {turn + 1} is empty: the chat template shows nothing of it")
        self.reasoning_left_out += left_out


def load_template(
    chat_template: str,
    directory: Path,
    special_tokens: Mapping[str, str],
    train_on: str,
    date: str,
    end_of_turn: str = "auto",
    stops: Sequence[str] = (),
) -> ChatTemplate:
    """Compile the template `tokenizer`, `chatml`, or that of a text, and check it on test conversations.

    `stops` are the tokens at which generation stops; empty: the end-of-sequence token.

    Raises UserError if there is no such template, it is broken, or the tokenizer lacks a token that it needs.
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
        written = TemplateText.of(read_bundled("chatml"))
        name, title = "data.chat_template: chatml", "the built-in ChatML template"
    elif chat_template == "tokenizer":
        written = read_template(directory)
        name, title = f"model.name: the chat template in {written.file}", "the tokenizer's own template"
    else:
        written = TemplateText.of(chat_template)
        name, title = "data.chat_template: the template", "the template of data.chat_template"

    def checked(own: CompiledTemplate) -> ChatTemplate:
        template = ChatTemplate(own, title, control, control | added.keys(), eos, train_on)
        if template.method == "segments":
            check_last_end(own, name, control, eos)
        template.end_turns(end_of_turn, stops, special_tokens, control)
        return template

    eos = special_tokens.get("eos_token")
    try:
        with work_limits():
            own = compile_template(written, special_tokens, name, date)
            template = checked(own)
            if own.tool_template is not own:
                template.with_tools = checked(own.tool_template)
    except LIMITS_MET as error:
        raise UserError(
            f"{name} {limit_met(error)} a conversation of two messages; correct it, or name another in "
            "data.chat_template"
        ) from None
    return template


def _trained(segments: list[TextSegment]) -> list[str]:
    """The trained texts."""
    return [segment.text for segment in segments if segment.trained]


def _added_tokens(directory: Path) -> dict[str, bool]:
    """The tokens added to the tokenizer's vocabulary, and whether each is special."""
    added = orjson.loads((directory / "tokenizer.json").read_bytes()).get("added_tokens") or []
    return {token["content"]: bool(token.get("special")) for token in added}
