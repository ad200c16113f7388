"""A compiled chat template: from messages to text, in a sandbox, on a fixed date."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import TRAINED_END, TRAINED_START
from lean_finetune.data.chat.trained_segments import set_apart
from lean_finetune.data.format.example import Message, RowFault

REFUSAL_CHARACTERS = 200
LARGEST_PRODUCT = 1 << 26
"""Characters, items or bits that one multiplication in a template can make."""
_DICT_ATTRIBUTES = frozenset(dir(dict))


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


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounded products, and quicker for `message.role`.

    Its own way to a key first raises and catches an AttributeError. Jinja works out constant products when it compiles
    a template, but for those that a sandbox intercepts.
    """

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The product or the power.

        Raises:
            MemoryError: it would be larger than any conversation needs.
        """
        if _product_size(operator, left, right) > LARGEST_PRODUCT:
            raise MemoryError
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or a key of the same name; the same result as the sandbox's own."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class CompiledTemplate:
    """A chat template with the tokenizer's special tokens (bos_token, eos_token, …) at hand.

    `strftime_now` writes a fixed date, as the same data must give the same tokens tomorrow.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str, date: str):
        """Compile `source`.

        Args:
            source: the template.
            special_tokens: bos_token, eos_token, ... as text.
            name: what it is and where it stands, for people.
            date: what it is given as today, YYYY-MM-DD.

        Raises:
            UserError: it is not a template.
        """
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = datetime.fromisoformat(date).strftime
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, SyntaxError, RecursionError) as error:
            # Python itself limits how deep blocks lie inside each other.
            at = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise UserError(
                f"{name} is broken ({at}{getattr(error, 'message', error)}); mend it, or name another in "
                "data.chat_template"
            ) from error
        # Each rendering copies the globals; from the chain of mappings that they come as, that takes longest of all.
        self._template.globals = dict(self._template.globals)
        self.source, self.name = source, name
        self.has_marks = any(data.data == TRAINED_START for data in tree.find_all(nodes.TemplateData))
        self._captures_marks = self.has_marks and _captures(tree)
        self._special_tokens, self._date = dict(special_tokens), date

    def like(self, source: str, name: str) -> "CompiledTemplate":
        """Another template with the same special tokens and date."""
        return CompiledTemplate(source, self._special_tokens, name, self._date)

    def pieces(self, messages: list[Message], tools: list[Any] | None, *, ask: bool = False) -> list[str]:
        """The rendering in pieces, with sentinels, each a piece, where the template has generation marks.

        With `ask`, followed by the header of the answer that is wanted next.

        Raises:
            RowFault: the template refuses the conversation.
            MemoryError: what it makes is too large.
            RecursionError: the template calls itself too often, or the conversation is nested too deep.
        """
        try:
            context = self._template.new_context(
                {
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": ask,
                    **self._special_tokens,
                }
            )
            # Its generate() hands each piece through a generator of its own.
            pieces = list(self._template.root_render_func(context))
        except (TemplateError, TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
            # A template is a program from elsewhere: any of these is its way to say that it cannot show this row.
            told = f"{type(error).__name__}: {error}"[:REFUSAL_CHARACTERS]
            raise RowFault(f"the chat template refuses the row ({told}); change the row to what it knows") from error
        return set_apart(pieces) if self._captures_marks else pieces

    def text(self, messages: list[Message], tools: list[Any] | None, *, ask: bool = False) -> str:
        """The rendering as one text, without sentinels.

        Raises:
            RowFault: the template refuses the conversation.
        """
        text = "".join(self.pieces(messages, tools, ask=ask))
        return text.replace(TRAINED_START, "").replace(TRAINED_END, "") if self.has_marks else text


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Items of a repeated text or list, or bits of a power; 0 of other products, which are small."""
    if operator == "**":
        return abs(left).bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(times, int):
            return len(items) * times
    return 0


def _captures(tree: nodes.Template) -> bool:
    """Whether a part of the template is rendered into a text, which may then hold sentinels among other characters."""
    kinds = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
    captured = any(True for _ in tree.find_all(kinds))
    return captured or any(loop.recursive for loop in tree.find_all(nodes.For))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as chat templates expect it: plain letters stay letters, and HTML is not escaped (Jinja's own would)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    """What templates call to refuse a conversation."""
    raise TemplateError(message)
