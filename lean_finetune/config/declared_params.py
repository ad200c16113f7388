"""Read the parameters of a stage. Under DVC, a stage can read only the parameters that dvc.yaml declares for it."""

import json
import os
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from lean_finetune.config.load import load_params
from lean_finetune.config.schema import Params
from lean_finetune.core.errors import UserError

AnySection = TypeVar("AnySection")
READ_BY_RULES = attrgetter("data.max_length", "train.merge")
"""Parameters of other stages in rules that proposed overrides can break."""


class Declared:
    """A section that refuses undeclared reads, after which DVC would reuse a stale result."""

    def __init__(self, section: BaseModel, declared: Mapping[str, Any], stage: str, prefix: str, reads: set[str]):
        """Wrap `section`. `declared` lists the allowed keys below `prefix`; `reads` collects what is read."""
        self._section, self._declared, self._stage, self._prefix, self._reads = section, declared, stage, prefix, reads

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or hasattr(BaseModel, key):
            raise AttributeError(key)
        if key not in type(self._section).model_fields:  # A property or a method: what it reads must be declared.
            return getattr(type(self._section), key).__get__(self)
        dotted = f"{self._prefix}{key}"
        value = getattr(self._section, key)
        if dotted == "run":
            return value
        if key not in self._declared:
            raise UserError(
                f"{dotted}: stage {self._stage} reads it but dvc.yaml does not list it under params; "
                f"add it to stages.{self._stage}.params"
            )
        if isinstance(value, BaseModel):
            return Declared(value, self._declared[key], self._stage, f"{dotted}.", self._reads)
        self._reads.add(dotted)
        return value


def params_of_rules(params: Params) -> Params:
    """All parameters, past the guard of undeclared reads, to check overrides by the rules between parameters.

    Such a rule reads what a stage declares that proposes overrides, also the keys in `READ_BY_RULES`.
    """
    if not isinstance(params, Declared):
        return params
    READ_BY_RULES(params)
    return cast(Params, params._section)


def declared_part(section: AnySection) -> AnySection:
    """A section to pass on: a value with the parameters alone that the stage declares. All of these count as read."""
    if not isinstance(section, Declared):
        return section
    values = {key: declared_part(getattr(section, key)) for key in section._declared}
    return cast(AnySection, type(section._section).model_construct(**values))


def tracked_values(params: Params) -> dict[str, Any]:
    """All values that the stage may read, as nested dictionaries, without section `run`, which no stage tracks."""
    return {key: value for key, value in _plain(params).items() if key != "run"}


def dotted_values(params: Params) -> dict[str, Any]:
    """`tracked_values` by dotted name, in the order of params.yaml."""
    return {name: to_jsonable_python(value) for name, value in _leaves(params) if not name.startswith("run.")}


def _leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each parameter that may be read."""
    for key in section._declared if isinstance(section, Declared) else type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Declared | BaseModel):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """A section as a dictionary of its values, or of the declared ones; another value unchanged."""
    if isinstance(value, Declared):
        return {key: _plain(getattr(value, key)) for key in value._declared}
    return value.model_dump() if isinstance(value, BaseModel) else value


def read_params() -> Params:
    """The parameters of the running stage.

    Under DVC (`DVC_STAGE` is set) only the keys that dvc.yaml declares can be read. If `LEAN_FINETUNE_PARAM_READS`
    names a directory, the keys that the stage read are written there as `<stage>.json`, for the contract test. Raises
    UserError if params.yaml has a wrong value.
    """
    params = load_params()
    # In a subdirectory, DVC's name of the stage includes the file: ../dvc.yaml:train.
    stage = os.environ.get("DVC_STAGE", "").rpartition(":")[2]
    if not stage:
        return params
    import dvc.api

    reads: set[str] = set()
    if directory := os.environ.get("LEAN_FINETUNE_PARAM_READS"):
        import atexit

        record = Path(directory).resolve() / f"{stage}.json"
        atexit.register(lambda: record.write_text(json.dumps(sorted(reads))))
    return cast(Params, Declared(params, dvc.api.params_show(stages=stage), stage, "", reads))
