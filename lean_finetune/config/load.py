"""Load params.yaml, and change it by overrides as `dvc exp run -S` takes them."""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from lean_finetune.config.data_schema import SOURCE_FORMS, SOURCE_KEYS, Source
from lean_finetune.config.other_tools import our_names, why_ignored
from lean_finetune.config.rule import check_rules
from lean_finetune.config.rules import (
    ACTIVATION_RULES,
    SECTION_RULES,
    SHARDING_RULES,
    check_heldout_readers,
    check_sources,
)
from lean_finetune.config.schema import Params
from lean_finetune.config.train_rules import PREFERENCE_RULES, TRAIN_RULES
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import MOST_LEVELS, NotYaml, parse_yaml, read_yaml

PARAMS_FILE = Path("params.yaml")
COMMON_PARAMS = Path(__file__).parents[1] / "fit_params.yaml"
"""Parameters of a usual run."""
REMOVED_KEYS: Mapping[str, str] = {
    "run.oom_recovery": "a run that is out of memory ends with changes that fit, such as a smaller bucket.max_tokens",
}
"""Parameters of earlier versions, each with what to do instead."""


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and validate a params.yaml. Raises UserError if the file is missing, is not YAML, or has a wrong value."""
    ours = path.name == PARAMS_FILE.name
    missing = (
        "file is missing; run in a project's directory, or make one with `lean-finetune init`"
        if ours
        else "file does not exist; name another"
    )
    return parse_params(read_yaml(path, missing), path)


def parse_params(values: Any, path: Path = PARAMS_FILE) -> Params:
    """Validate the content of a params.yaml; `path` names it in errors.

    Raises UserError, naming the dotted key, the rule, the value and the remedy.
    """
    params = parse_values(values, path)
    check_sources(params.data)
    check_all_rules(params)
    check_heldout_readers(params)
    return params


def check_all_rules(params: Params) -> None:
    """Raise UserError for the first rule between parameters that they break."""
    check_rules(params, [*SECTION_RULES, *TRAIN_RULES, *PREFERENCE_RULES, *ACTIVATION_RULES, *SHARDING_RULES])


def parse_values(values: Any, path: Path = PARAMS_FILE) -> Params:
    """As `parse_params`, without the rules between parameters."""
    if not isinstance(values, Mapping):
        raise UserError(f"{path}: must be a mapping of sections; got {type(values).__name__}; change it")
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        raise UserError(_first_error(error)) from None


def _first_error(error: ValidationError) -> str:
    """The message for one of the errors: a misspelt key comes before the key that is missing because of it."""
    faults = error.errors()
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    keys = _keys(fault)
    dotted = shortened(".".join(keys))
    match fault["type"]:
        case "extra_forbidden":
            return _unknown(keys)
        case "missing":
            return f"{dotted}: parameter is missing; add it to the file, or run `lean-finetune init --upgrade`"
        case "model_type" | "model_attributes_type":
            rule = "must be a section with its own keys"
        case _:
            # One fault for each form that a value may have.
            rules = [other["msg"] for other in faults if _keys(other) == keys]
            rule = " or ".join(rule.removeprefix("Input should be ") for rule in rules)
            rule = f"must be {rule}" if rules[0].startswith("Input should be ") else rule[0].lower() + rule[1:]
    return f"{dotted}: {rule}; got {_short_json(fault['input'])}; change it"


def _keys(fault: Any) -> list[str]:
    """The keys to a wrong value, without what pydantic adds: forms of a value, and a marker for a dictionary's key."""
    forms = (*SOURCE_FORMS, "constrained-float", "constrained-int", "bool", "[key]")
    return [str(part) for part in fault["loc"] if part not in forms and not str(part).startswith("literal[")]


def _unknown(keys: list[str]) -> str:
    """The message for keys that lead to no parameter."""
    dotted = shortened(".".join(keys))
    if dotted in REMOVED_KEYS:
        instead = REMOVED_KEYS[dotted]
        return f"{dotted}: is no parameter any more: {instead}; remove it, or run `lean-finetune init --upgrade`"
    return f"{dotted}: unknown parameter; {_known_keys(keys)}"


def _known_keys(keys: list[str]) -> str:
    """Our name for another tool's key or why there is none; the key most like the last of `keys`; or its section's."""
    section: type[BaseModel] = Params
    for key in keys[:-1]:
        if not key.isdigit():
            annotation = Source if key in SOURCE_KEYS else section.model_fields[key].annotation
            section = cast(type[BaseModel], annotation)
    if ours := our_names(keys[-1]):
        return f"its name here is {' or '.join(ours)}"
    if (reason := why_ignored(keys[-1])) is not None:
        return f"it has no counterpart here: {reason}"
    similar = difflib.get_close_matches(keys[-1], section.model_fields, n=1)
    if similar:
        return f"did you mean {'.'.join([*keys[:-1], similar[0]])}?"
    return f"known: {', '.join(section.model_fields)}"


def refuse_unknown(dotted: str, params: Params) -> None:
    """Raise UserError, with the parameter that may be meant, if there is none of this name."""
    section: Any = params.model_dump()
    keys = dotted.split(".")
    for place, name in enumerate(keys, start=1):
        if not isinstance(section, Mapping):  # A value, which may be a mapping in another file.
            return
        if name not in section:
            raise UserError(_unknown(keys[:place]))
        section = section[name]


def _short_json(value: Any) -> str:
    """A value as JSON, shortened."""
    return shortened(json.dumps(value, default=str))


# Apply overrides in the form of `dvc exp run -S`.


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
