"""Parameters as a line of `dvc exp run -S` changes them."""

from collections.abc import Iterable

from lean_finetune.config.load import parse_params
from lean_finetune.config.schema import Params


def with_flags(params: Params, flags: Iterable[str]) -> Params:
    """Parameters with some changed, each as `dvc exp run -S` takes it: a dotted key, an equals sign, a YAML value.

    Raises:
        UserError: what comes out breaks the schema or a rule.
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
