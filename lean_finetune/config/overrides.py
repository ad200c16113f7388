"""Apply overrides in the form of `dvc exp run -S`."""

from collections.abc import Iterable

from lean_finetune.config.load import parse_params
from lean_finetune.config.schema import Params


def with_flags(params: Params, flags: Iterable[str]) -> Params:
    """Parameters with overrides such as `train.lr=1e-4`: a dotted key, an equals sign and a YAML value.

    Raises:
        UserError: the result has a wrong value.
    """
    from ruamel.yaml import YAML

    values = params.model_dump()
    for flag in flags:
        dotted, _, value = flag.partition("=")
        *sections, key = dotted.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[key] = YAML(typ="safe").load(value)
    return parse_params(values)
