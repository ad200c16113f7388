"""A rule of params.yaml that compares two or more values."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params


@dataclass(frozen=True)
class Rule:
    """One row of a table of rules."""

    key: str
    """Dotted key that the error names."""
    broken: Callable[["Params"], bool]
    """Whether the parameters break the rule."""
    message: str | Callable[["Params"], str]
    """The rule, the value and the remedy. `{train.method}` stands for that parameter's value."""


def check_rules(params: "Params", rules: Iterable[Rule]) -> None:
    """Refuse parameters that break a rule.

    Raises:
        UserError: for the first rule that is broken.
    """
    for rule in rules:
        if rule.broken(params):
            message = rule.message if isinstance(rule.message, str) else rule.message(params)
            raise UserError(f"{rule.key}: {message.format(**dict(params))}")
