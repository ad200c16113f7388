"""A rule between parameters: what breaks it, and the message; the values that turn parameters off."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from string import Formatter
from typing import Any

from lean_finetune.core.errors import UserError, shortened

SWITCHED_OFF: Mapping[str, Any] = {
    **dict.fromkeys(("train.context_parallel", "train.tensor_parallel", "train.pipeline_stages"), 1),
    **dict.fromkeys(("train.compress_activations", "train.offload_activations", "train.offload"), "none"),
    **{"train.sequence_tiles": None, "train.offload_to": "cpu", "train.fused_kernels": "none"},
    "train.grad_ckpt_policy": "full",
    "train.grad_ckpt_layers": None,
    **dict.fromkeys(("train.master_weights", "train.optimizer_in_backward"), False),
    **dict.fromkeys(("train.vision", "train.projector"), "frozen"),
}
"""Memory switches with the value that turns each off. What describes a run lists other values."""
OFF: Mapping[str, Any] = {
    **SWITCHED_OFF,
    **dict.fromkeys(("train.merge", "train.lora.rslora", "bucket.constant_shape"), False),
    **{"train.quant.type": "nf4", "train.quant.double": True, "train.router": "frozen", "train.shard_group_gpus": None},
    **{"train.lora.dropout": 0.0, "train.lora.experts": "none", "train.sharding": "none"},
    **dict.fromkeys(("train.lora.modules_to_save", "train.lora.trainable_tokens"), []),
}
"""The value of a parameter where it has no effect, or must have none: the one place of these values."""


@dataclass(frozen=True)
class Rule:
    """One row of a table of rules."""

    key: str
    """Dotted key that the error names."""
    broken: Callable[[Any], bool]
    """Whether the parameters, a `Params`, break the rule."""
    message: str | Callable[[Any], str]
    """The rule, the value and the remedy. `{train.method}` stands for that parameter's value."""


@dataclass(frozen=True)
class Needs(Rule):
    """The rule that a parameter is off unless `other` has one of `values`: without that it has no effect."""

    other: str
    values: tuple[Any, ...]


def needs(key: str, other: str, *values: Any) -> Needs:
    """The rule that `key` must be off unless `other` has one of `values`."""
    value, found, off = attrgetter(key), attrgetter(other), OFF[key]
    fitting = f"{other}={' or '.join(map(_shown, values))}"

    def message(params: Any) -> str:
        got = f"{_shown(value(params))} with {other}={_shown(found(params))}"
        return f"has an effect only with {fitting}; got {got}; set it to {_shown(off)}, or use {fitting}"

    return Needs(key, lambda params: value(params) != off and found(params) not in values, message, other, values)


def off_values(*names: str) -> dict[str, Any]:
    """The values that turn parameters of section train off, by their names in it."""
    return {name: OFF[f"train.{name}"] for name in names}


def turn_off(key: str) -> str:
    """The remedy that turns a parameter off, in words."""
    return "leave it blank" if OFF[key] is None else f"set it to {_shown(OFF[key])}"


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
