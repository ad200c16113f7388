"""Apply overrides in the form of `dvc exp run -S`."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

from lean_finetune.config.load import check_all_rules, parse_params, parse_values
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import MOST_LEVELS, NotYaml, parse_yaml


def with_flags(params: Params, flags: Iterable[str], *, check: bool = True) -> Params:
    """Parameters with overrides such as `train.lr=1e-4`: a dotted key, an equals sign and a YAML value.

    `check` is whether the rules between parameters are checked. Raises UserError if a flag has another form, or the
    result has a wrong value.
    """
    values = params.model_dump()
    for flag in flags:
        dotted, equals, value = flag.partition("=")
        if not equals or not dotted:
            raise UserError(f"{flag}: must be key=value, such as train.lora.rank=64; add the value")
        *sections, key = dotted.split(".")
        if len(sections) > MOST_LEVELS:
            raise UserError(f"{shortened(dotted)}: unknown parameter; see params.yaml")
        section = values
        for name in sections:
            if not isinstance(section.setdefault(name, {}), dict):
                raise UserError(f"{dotted}: {name} has no parameters below it; see params.yaml")
            section = section[name]
        section[key] = _yaml_value(dotted, value)
    return parse_params(values) if check else parse_values(values)


def keeps_rules(params: Params, flags: Iterable[str]) -> bool:
    """Whether the rules between parameters accept overrides whose names and types are right.

    Much faster than `with_flags`.
    """
    changed: Any = params
    for flag in flags:
        changed = _replaced(changed, *_keys_and_value(flag))
    try:
        check_all_rules(changed)
    except UserError:
        return False
    return True


def _replaced(section: BaseModel, keys: Sequence[str], value: Any) -> BaseModel:
    """A copy of a section with another value of the parameter that `keys` lead to."""
    key, *below = keys
    return section.model_copy(update={key: _replaced(getattr(section, key), below, value) if below else value})


@cache
def _keys_and_value(flag: str) -> tuple[Sequence[str], Any]:
    dotted, _, text = flag.partition("=")
    return dotted.split("."), _yaml_value(dotted, text)


def _yaml_value(dotted: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except NotYaml as error:
        raise UserError(f"{dotted}: must be a YAML value ({error}); got {shortened(text)!r}; change it") from None
