"""A rule between parameters: what breaks it, and the message."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from string import Formatter
from typing import Any

from lean_finetune.core.errors import UserError, shortened


@dataclass(frozen=True)
class Rule:
    """One row of a table of rules."""

    key: str
    """Dotted key that the error names."""
    broken: Callable[[Any], bool]
    """Whether the parameters, a `Params`, break the rule."""
    message: str | Callable[[Any], str]
    """The rule, the value and the remedy. `{train.method}` stands for that parameter's value."""


def needs(key: str, off: Any, other: str, *values: Any) -> Rule:
    """The rule that `key` must be `off` unless `other` has one of `values`: without that it has no effect."""
    value, found = attrgetter(key), attrgetter(other)
    fitting = f"{other}={' or '.join(map(_shown, values))}"

    def message(params: Any) -> str:
        got = f"{_shown(value(params))} with {other}={_shown(found(params))}"
        return f"has an effect only with {fitting}; got {got}; set it to {_shown(off)}, or use {fitting}"

    return Rule(key, lambda params: value(params) != off and found(params) not in values, message)


def _shown(value: Any) -> str:
    """A value as params.yaml has it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


class _ShortFormatter(Formatter):
    """Formats a message with shortened values."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """See the base class."""
        return shortened(super().format_field(value, format_spec))


def check_rules(params: Any, rules: Iterable[Rule]) -> None:
    """Raise UserError for the first rule that the parameters break."""
    for rule in rules:
        if rule.broken(params):
            message = rule.message if isinstance(rule.message, str) else rule.message(params)
            raise UserError(f"{rule.key}: {_ShortFormatter().format(message, **dict(params))}")
