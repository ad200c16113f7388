"""Load params.yaml, validate it against the schema and check the rules between parameters."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from lean_finetune.config.data_schema import SOURCE_FORMS, SOURCE_KEYS, Source
from lean_finetune.config.other_tools import our_names, why_ignored
from lean_finetune.config.rule import check_rules
from lean_finetune.config.schema import Params
from lean_finetune.config.section_rules import ACTIVATION_RULES, SECTION_RULES, check_heldout_readers, check_sources
from lean_finetune.config.sharding_rules import SHARDING_RULES
from lean_finetune.config.train_schema import TRAIN_RULES
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.read_yaml import read_yaml

PARAMS_FILE = Path("params.yaml")
COMMON_PARAMS = Path(__file__).parents[1] / "fit_params.yaml"
"""Parameters of a usual run."""


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and validate a params.yaml. Raises UserError if the file is missing, is not YAML, or has a wrong value."""
    ours = path.name == PARAMS_FILE.name
    missing = "file is missing; run from the repository's root" if ours else "file does not exist; name another"
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
    check_rules(params, [*SECTION_RULES, *TRAIN_RULES, *ACTIVATION_RULES, *SHARDING_RULES])


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
    dotted = ".".join(keys)
    match fault["type"]:
        case "extra_forbidden":
            return f"{dotted}: unknown parameter; {_known_keys(keys)}"
        case "missing":
            return f"{dotted}: parameter is missing; add it to params.yaml, which must have every parameter"
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
    forms = (*SOURCE_FORMS, "constrained-float", "bool", "[key]")
    return [str(part) for part in fault["loc"] if part not in forms and not str(part).startswith("literal[")]


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


def _short_json(value: Any) -> str:
    """A value as JSON, shortened."""
    return shortened(json.dumps(value, default=str))
