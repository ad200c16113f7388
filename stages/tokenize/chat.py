"""The tokenizer's own chat template, rendered into trained and untrained text."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.errors import UserError
from stages.tokenize.guard import TRAINED_END, TRAINED_START
from stages.tokenize.rows import Conversation, RowFault

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a row's text that is trained as a whole or not at all."""

    text: str
    trained: bool


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: surrounds what the model has to learn with sentinel characters.

    Sentinels in the text survive macros, captures and loops, where positions noted while rendering would go wrong.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the block's body between the sentinels."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def sentinel(text: str) -> nodes.Node:
            return nodes.Output([nodes.TemplateData(text)]).set_lineno(line)

        return [sentinel(TRAINED_START), *body, sentinel(TRAINED_END)]


class ChatTemplate:
    """A compiled chat template with the tokenizer's special tokens (bos_token, eos_token, …) at hand.

    The current date is not offered (`strftime_now`): the same data must give the same tokens tomorrow. Templates that
    can do without it use a fixed date.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str):
        """Compile `source`, found in the file `name`.

        Raises:
            UserError: it is not a template, or it does not mark what the assistant says.
        """
        if not GENERATION_MARK.search(source):
            raise UserError(
                f"model.name: the chat template in {name} has no {{% generation %}} marks, so the assistant's tokens "
                "cannot be told from the rest; put {% generation %} … {% endgeneration %} around the assistant's text "
                "and its end-of-turn token in a local copy of the model"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise UserError(
                f"model.name: the chat template in {name} is broken (line {error.lineno}: {error.message}); mend it"
            ) from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: Conversation) -> list[Segment]:
        """The conversation as text segments in order; trained ones come from the template's generation blocks.

        Raises:
            RowFault: the template refuses the conversation, or trains nothing of it.
        """
        try:
            text = self._template.render(
                messages=conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=False,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            # A template is a program from elsewhere: any of these is its way to say that it cannot show this row.
            raise RowFault(
                f"the chat template refuses the row ({type(error).__name__}: {error}); change the row to what it knows"
            ) from error
        segments = _without_context(split_segments(text), conversation)
        if not any(segment.trained for segment in segments):
            raise RowFault("the chat template marks nothing of the row as the assistant's; mend its generation marks")
        return segments


def split_segments(text: str) -> list[Segment]:
    """Cut rendered text at the sentinels; trained stretches that touch become one.

    Raises:
        RowFault: generation blocks lie inside each other.
    """
    segments: list[Segment] = []
    for part in text.replace(TRAINED_END + TRAINED_START, "").split(TRAINED_START):
        inside, end, outside = part.partition(TRAINED_END)
        if (not segments and end) or TRAINED_END in outside:
            raise RowFault("the chat template puts a generation block inside another; mend its generation marks")
        segments += [Segment(text=inside, trained=bool(end)), Segment(text=outside, trained=False)]
    return [segment for segment in segments if segment.text]


def _without_context(segments: list[Segment], conversation: Conversation) -> list[Segment]:
    """The segments, those of turns that are context alone no longer trained.

    Raises:
        RowFault: the template's marks do not say which segment is which turn.
    """
    if not conversation.context:
        return segments
    turns = conversation.turns()
    if sum(segment.trained for segment in segments) != len(turns):
        raise RowFault(
            f"weight 0 cannot be followed: the chat template marks not each of the {len(turns)} assistant turns once; "
            "split the row into rows of one trained turn, or mend the template's generation marks"
        )
    places = iter(turns)
    return [
        replace(segment, trained=next(places) not in conversation.context) if segment.trained else segment
        for segment in segments
    ]


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
            f"model.name: the tokenizer in {directory} has no chat template; use data.format prompt_completion or "
            "text, or add chat_template.jinja to a local copy of the model"
        )
    return template, str(directory / "tokenizer_config.json")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as chat templates expect it: plain letters stay letters, and HTML is not escaped (Jinja's own would)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(message)
