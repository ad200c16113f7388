"""Compile and render a chat template in a sandbox with limits of time and memory."""

import copy
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lean_finetune.core.errors import RowFault, UserError, one_line
from lean_finetune.data.chat.control_tokens import (
    NOT_OF_TEMPLATES,
    TRAINED_END,
    TRAINED_START,
    WRITES_MARKS,
    split_at_marks,
)
from lean_finetune.data.format.format_base import Conversation, Message
from lean_finetune.data.format.given_images import with_parts
from lean_finetune.data.read.worker_memory import limited_memory_growth

# Limits on what a chat template may use: memory, the time of a processor, the size of integers.
#
# A template is a program that a stranger wrote. Jinja's sandbox limits what it can reach, not how long it runs.

CONVERSATION_BYTES, CONVERSATION_SECONDS = 1 << 29, 20.0
"""Memory and time for one conversation: of a chat, of an evaluation, or all test conversations of a template."""
LARGEST_PRODUCT = 1 << 26
"""Characters or items that a template may make by one multiplication."""
LARGEST_INTEGER_BITS = 1 << 16
"""Bits of an integer that a template may compute: squaring doubles them, and one product cannot be interrupted."""
TICKS = 8
"""Signals during the time that a block may take. Its limit is exact to one of them."""


class TooMuchWork(Exception):
    """A template runs for longer than it may."""


LIMITS_MET = (MemoryError, RecursionError, TooMuchWork)
"""Errors of a template that meets a limit."""


def limit_met(error: BaseException) -> str:
    """What a template does that met a limit, as the end of `the template …`."""
    if isinstance(error, TooMuchWork):
        return "runs too long on"
    return "needs too much memory for" if isinstance(error, MemoryError) else "recurses without end on"


@contextmanager
def work_limits(size_bytes: int | None = None, seconds: float | None = None) -> Iterator[Callable[[], None]]:
    """Raise MemoryError or TooMuchWork in the block when it uses more memory, or more time of a processor.

    None means the limit of a conversation. Gives a function that starts the time anew. Signals and limits are those of
    a process, so they apply only in its main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: None
        return
    most_bytes = CONVERSATION_BYTES if size_bytes is None else size_bytes
    tick_seconds = (CONVERSATION_SECONDS if seconds is None else seconds) / TICKS
    ticks: int | None = 0

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal ticks
        if ticks is not None:
            ticks += 1
            # Again at each later tick: Jinja drops exceptions of some calls, and continues.
            if ticks > TICKS:
                raise TooMuchWork

    def restart() -> None:  # Without a system call, which would take longer than rendering a short row.
        nonlocal ticks
        ticks = 0

    unraisable_hook = sys.unraisablehook

    def drop_signals(unraisable: Any) -> None:
        """Drop a TooMuchWork that met a destructor, where Python only prints it: the next tick raises it again."""
        if not isinstance(unraisable.exc_value, TooMuchWork):
            unraisable_hook(unraisable)

    sys.unraisablehook = drop_signals
    handler = signal.signal(signal.SIGVTALRM, tick)
    outer = signal.setitimer(signal.ITIMER_VIRTUAL, tick_seconds, tick_seconds)
    try:
        with limited_memory_growth(most_bytes):
            yield restart
    finally:
        ticks = None
        signal.setitimer(signal.ITIMER_VIRTUAL, *outer)
        signal.signal(signal.SIGVTALRM, handler)
        sys.unraisablehook = unraisable_hook


def product_size(operator: str, left: Any, right: Any) -> float:
    """The size of a product or power as a share of what a template may make; 0 for products that are small anyway."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return bits / LARGEST_INTEGER_BITS
    for items, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(items, str | list | tuple) and isinstance(times, int):
            return len(items) * times / LARGEST_PRODUCT
    return 0


# Compiled chat templates, which render messages in a sandbox with a fixed date.

REFUSAL_CHARACTERS = 200
LARGEST_SOURCE = 1 << 20
"""Characters of a template. The largest published ones have 50,000."""
DEEPEST_NESTING = 100
"""Blocks inside each other, Python's limit for the code that Jinja makes of them."""
_BLOCKS = frozenset(("if", "for", "macro", "call", "filter", "block", "generation"))
_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: puts sentinel characters around the text to be trained.

    Sentinels stay in place through macros, captures and loops, where positions recorded while rendering would be wrong.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put the block's body between sentinels."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def sentinel(text: str) -> nodes.Node:
            return nodes.Output([nodes.TemplateData(text)]).set_lineno(line)

        return [sentinel(TRAINED_START), *body, sentinel(TRAINED_END)]


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with limited products and faster access to keys such as `message.role`.

    The sandbox itself first raises and catches an AttributeError for a key. Intercepted operators are not computed when
    Jinja compiles a template, so constant products are limited too.
    """

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The product or power. Raises MemoryError if it is too large."""
        if product_size(operator, left, right) > 1:
            raise MemoryError
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or the key of that name, as the sandbox returns it."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


class CompiledTemplate:
    """A chat template with the tokenizer's special tokens (bos_token, eos_token, …) as variables.

    `strftime_now` returns a fixed date, so that equal data gives equal tokens on any day.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str, date: str):
        """Compile `source`, which messages call `name`; `date` is today's for the template, YYYY-MM-DD.

        Raises UserError if it is not a template.
        """
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        # Their results differ from run to run.
        del environment.filters["random"], environment.globals["lipsum"]
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = datetime.fromisoformat(date).strftime
        if len(source) > LARGEST_SOURCE:
            raise UserError(f"{name} has {len(source)} characters; it may have {LARGEST_SOURCE}; shorten it")
        _check_text((source, *special_tokens.values()), name)
        try:
            # Before Jinja's parser runs into Python's recursion limit, where other packages' hooks print errors too.
            if _nesting(environment, source) > DEEPEST_NESTING:
                raise UserError(f"{name} nests more than {DEEPEST_NESTING} blocks; simplify it")
            with work_limits():  # Jinja computes constant expressions when it compiles them.
                tree = environment.parse(source)
                _check_text((node.value for node in tree.find_all(nodes.Const)), name)
                self._template = environment.from_string(source)
        except UserError:
            raise
        except Exception as error:  # Any error: a stranger's program. Python limits the nesting of blocks, for example.
            at = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            reason = f"it {limit_met(error)} compiling" if isinstance(error, LIMITS_MET) else str(error)
            raise UserError(
                f"{name} is broken ({at}{one_line(reason)}); correct it, or name another in data.chat_template"
            ) from error
        if "{{" not in source:
            raise UserError(f"{name} is no chat template: it writes no message; correct it, or name another one")
        # Each rendering copies the globals. Copying a dict is much faster than copying Jinja's chain of mappings.
        self._template.globals = dict(self._template.globals)
        self.source, self.name = source, name
        self.has_marks = any(data.data == TRAINED_START for data in tree.find_all(nodes.TemplateData))
        self._captures_marks = self.has_marks and _captures(tree)
        self._special_tokens, self._date = dict(special_tokens), date
        self._form: Callable[[list[Message]], list[Message]] | None = None
        self._tool_template: CompiledTemplate | None = None

    @property
    def tool_template(self) -> "CompiledTemplate":
        """The template of conversations with tools; itself unless the tokenizer has another for them."""
        return self if self._tool_template is None else self._tool_template

    def with_tool_template(self, template: "CompiledTemplate") -> "CompiledTemplate":
        """The same template, with another for conversations with tools."""
        both = copy.copy(self)
        both._tool_template = template
        return both

    def with_source(self, source: str, name: str) -> "CompiledTemplate":
        """Another template with the same special tokens and date."""
        return CompiledTemplate(source, self._special_tokens, name, self._date)

    def with_form(self, form: Callable[[list[Message]], list[Message]]) -> "CompiledTemplate":
        """The same template, which renders what `form` makes of messages (see `message_forms`)."""
        template = copy.copy(self)
        template._form = form
        return template

    def parts(
        self, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> list[str]:
        """The rendering as a list of texts. Generation marks are sentinels, each a text of the list.

        Raises RowFault if the template refuses the conversation, and one of LIMITS_MET at a limit of `work_limits`.
        """
        if tools is not None and self._tool_template is not None:
            return self._tool_template.parts(messages, tools, add_generation_prompt=add_generation_prompt)
        try:
            context = self._template.new_context(
                {
                    "messages": with_parts(messages if self._form is None else self._form(messages)),
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self._special_tokens,
                }
            )
            # Template.generate() would pass each text through one more generator.
            parts = list(self._template.root_render_func(context))
        except LIMITS_MET:
            raise
        except Exception as error:
            # A template is a program written by others: any error means that it cannot render this row.
            reason = f"{type(error).__name__}: {error}"[:REFUSAL_CHARACTERS]
            raise RowFault(
                f"the chat template refuses the row ({reason}); change the row to what it supports"
            ) from error
        return split_at_marks(parts) if self._captures_marks else parts

    def text(self, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False) -> str:
        """The rendering as one text, without sentinels. Raises RowFault if the template refuses the conversation."""
        template = self if tools is None else self.tool_template
        text = "".join(template.parts(messages, tools, add_generation_prompt=add_generation_prompt))
        return text.replace(TRAINED_START, "").replace(TRAINED_END, "") if template.has_marks else text

    def bounded_text(
        self, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False
    ) -> str:
        """As `text`, within limits on memory and time. Raises RowFault if the template refuses, or meets a limit."""
        try:
            with work_limits():
                return self.text(messages, tools, add_generation_prompt=add_generation_prompt)
        except LIMITS_MET as error:
            raise RowFault(
                f"the chat template {limit_met(error)} the conversation; correct it, or shorten that"
            ) from None


def rendering(
    template: CompiledTemplate,
    conversation: Conversation,
    messages: list[Message] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str | None:
    """The rendering of a conversation, or of other messages with its tools; None where the template refuses them."""
    given = conversation.messages if messages is None else messages
    try:
        return template.text(given, conversation.tools, add_generation_prompt=add_generation_prompt)
    except RowFault:
        return None


def _check_text(texts: Iterable[Any], name: str) -> None:
    """Refuse characters that a template and its special tokens must not write: our marks, and lone surrogates."""
    if any(isinstance(text, str) and NOT_OF_TEMPLATES.search(text) for text in texts):
        raise UserError(f"{name} {WRITES_MARKS}; remove them")


def _nesting(environment: _Environment, source: str) -> int:
    """The most blocks inside each other."""
    depth = deepest = 0
    opened = False
    for _, kind, word in environment.lex(source):
        if opened and kind == "name":
            depth += (word in _BLOCKS) - (word.removeprefix("end") in _BLOCKS and word.startswith("end"))
            deepest = max(deepest, depth)
        opened = kind == "block_begin" or (opened and kind == "whitespace")
    return deepest


def _captures(tree: nodes.Template) -> bool:
    """Whether some part is rendered into a text first, which can then have sentinels among other characters."""
    kinds = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block)
    captured = any(True for _ in tree.find_all(kinds))
    return captured or any(loop.recursive for loop in tree.find_all(nodes.For))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON as chat templates expect it: without ASCII or HTML escapes, unlike Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    """Called by templates to refuse a conversation."""
    raise TemplateError(message)
