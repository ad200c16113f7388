"""Turn pydantic's validation errors into one line with the dotted key, the rule, the value and the remedy."""

import difflib
import json
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from lean_finetune.config.data_schema import SOURCE_FORMS, SOURCE_KEYS, Source
from lean_finetune.config.other_tools import our_names
from lean_finetune.config.schema import Params

LONGEST_VALUE = 80


def first_error(error: ValidationError) -> str:
    """The message for one of the errors: a misspelt key comes before the key that is missing because of it."""
    faults = error.errors()
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    # pydantic adds the form of data.source, and a marker for the key of a dictionary.
    keys = [str(part) for part in fault["loc"] if part not in (*SOURCE_FORMS, "[key]")]
    dotted = ".".join(keys)
    match fault["type"]:
        case "extra_forbidden":
            return f"{dotted}: unknown parameter; {_known_keys(keys)}"
        case "missing":
            return f"{dotted}: parameter is missing; add it to params.yaml, which must have every parameter"
        case "model_type" | "model_attributes_type":
            rule = "must be a section with its own keys"
        case _:
            rule = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{dotted}: {rule}; got {_short_json(fault['input'])}"


def _known_keys(keys: list[str]) -> str:
    """Our name for a key of another tool, the key most like the last of `keys`, or all keys of its section."""
    section: type[BaseModel] = Params
    for key in keys[:-1]:
        if not key.isdigit():
            annotation = Source if key in SOURCE_KEYS else section.model_fields[key].annotation
            section = cast(type[BaseModel], annotation)
    if ours := our_names(keys[-1]):
        return f"its name here is {' or '.join(ours)}"
    similar = difflib.get_close_matches(keys[-1], section.model_fields, n=1)
    if similar:
        return f"did you mean {'.'.join([*keys[:-1], similar[0]])}?"
    return f"known: {', '.join(section.model_fields)}"


def _short_json(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
