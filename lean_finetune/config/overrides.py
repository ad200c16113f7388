"""Apply overrides in the form of `dvc exp run -S`."""

from collections.abc import Iterable

from lean_finetune.config.load import parse_params, parse_values
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError


def with_flags(params: Params, flags: Iterable[str], *, check: bool = True) -> Params:
    """Parameters with overrides such as `train.lr=1e-4`: a dotted key, an equals sign and a YAML value.

    `check` is whether the rules between parameters are checked. Raises UserError if a flag has another form, or the
    result has a wrong value.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    values = params.model_dump()
    for flag in flags:
        dotted, equals, value = flag.partition("=")
        if not equals or not dotted:
            raise UserError(f"{flag}: must be key=value, such as train.lora.rank=64; add the value")
        *sections, key = dotted.split(".")
        section = values
        for name in sections:
            if not isinstance(section.setdefault(name, {}), dict):
                raise UserError(f"{dotted}: {name} has no parameters below it; see params.yaml")
            section = section[name]
        try:
            section[key] = YAML(typ="safe").load(value)
        except YAMLError:
            raise UserError(f"{dotted}: must be a YAML value; got {value!r}") from None
    return parse_params(values) if check else parse_values(values)
