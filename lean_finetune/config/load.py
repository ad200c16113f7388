"""Load params.yaml, validate it against the schema and check the rules between parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lean_finetune.config.rule import check_rules
from lean_finetune.config.schema import Params
from lean_finetune.config.schema_errors import first_error
from lean_finetune.config.section_rules import SECTION_RULES, check_heldout_readers, check_sources
from lean_finetune.config.sharding_rules import SHARDING_RULES
from lean_finetune.config.train_schema import TRAIN_RULES
from lean_finetune.core.errors import UserError

PARAMS_FILE = Path("params.yaml")


def load_params(path: Path = PARAMS_FILE) -> Params:
    """Read and validate a params.yaml. Raises UserError if the file is missing, is not YAML, or has a wrong value."""
    # ruamel reads YAML 1.2 as DVC does: 1e-05 is a float, `no` is a string.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: file is missing; run from the repository's root") from None
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UserError(f"{path}:{line}: not YAML; {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: unreadable YAML ({type(error).__name__}: {error}); correct the file") from None
    return parse_params(values)


def parse_params(values: Any) -> Params:
    """Validate the content of a params.yaml.

    Raises UserError, naming the dotted key, the rule, the value and the remedy.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"params.yaml: must be a mapping of sections, got {type(values).__name__}")
    try:
        params = Params.model_validate(values)
    except ValidationError as error:
        raise UserError(first_error(error)) from None
    check_sources(params.data)
    check_rules(params, [*SECTION_RULES, *TRAIN_RULES, *SHARDING_RULES])
    check_heldout_readers(params)
    return params
