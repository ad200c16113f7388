"""The end of trained turns, for templates that write none after an answer.

GLM-4.5 begins the next turn by the token that ends the one before, Apertus and Apriel close a turn only when another
follows, and some templates end no turn. Generation stops at the tokens of generation_config.json, so one of them must
be trained behind an answer.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.chat.control_tokens import any_of
from lean_finetune.data.chat.template_probes import ASK, CALLING, RESULT
from lean_finetune.data.chat.trained_segments import Segment
from lean_finetune.data.format.example import Conversation, Message

_ANSWER = {"role": "assistant", "content": "zqanswer"}


@dataclass(frozen=True, kw_only=True)
class TurnEnds:
    """Trains an end behind each answer."""

    stops: re.Pattern[str]
    """A token at which generation stops, at the start of a text, and the white space before it."""
    after_answer: str
    """Text to append behind a row's last answer."""
    after_calls: str
    """The same behind tool calls."""

    def apply(self, segments: Sequence[Segment], last: Message) -> list[Segment]:
        """The segments of a row, whose last message is `last`, with the ends of trained turns in the trained text.

        A stop token that follows an answer is moved into it. If the row ends with an answer, an end is appended.
        """
        ended: list[Segment] = []
        for text, trained in segments:
            if not trained and ended and ended[-1].trained and (stop := self.stops.match(text)):
                ended[-1] = Segment(ended[-1].text + stop[0], True)
                text = text[stop.end() :]
            ended.append(Segment(text, trained))
        while ended and not ended[-1].trained and not ended[-1].text.strip():
            ended.pop()
        end = self.after_calls if last.get("tool_calls") else self.after_answer
        if ended and ended[-1].trained and last["role"] == "assistant" and not ended[-1].text.endswith(end):
            ended[-1] = Segment(ended[-1].text + end, True)
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
    return TurnEnds(stops=pattern, after_answer=after_answer, after_calls=calls[0] if calls else after_answer)
