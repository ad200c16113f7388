"""The sections of params.yaml, and the ranges and registries that their fields are checked against."""

from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from lean_finetune.config.adapter_starts import ADAPTER_STARTS
from lean_finetune.config.field_types import LoraInit, ObjectiveName, OptimizerName
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.core.errors import UserError
from lean_finetune.islands.objectives.registry import OBJECTIVES

MOST = 2**42
"""Of anything counted. Products with the sizes of a model stay below 2**63, the end of PyTorch's integers."""
MOST_THREADS = 2**16
MOST_IDS = 2**31
"""Token ids are below it."""


def _iso_date(value: Any) -> str:
    """A date as YYYY-MM-DD. YAML reads a date without quotes as a date object."""
    try:
        return (value if isinstance(value, date) else date.fromisoformat(value)).strftime("%Y-%m-%d")
    except (TypeError, ValueError):
        raise PydanticCustomError("date", "must be a date as YYYY-MM-DD") from None


def _token(value: Any) -> str | int:
    """A token's text, or its id."""
    if (isinstance(value, str) and value) or (type(value) is int and 0 <= value < MOST_IDS):
        return value
    raise PydanticCustomError("token", f"must be the text of a token, or its id from 0 to {MOST_IDS - 1}")


def _key_of(known: Mapping[str, Any]) -> AfterValidator:
    """Accept a key of a registry, which may gain entries after import."""

    def check(name: str) -> str:
        if name not in known:
            *others, last = map(repr, known)
            raise PydanticCustomError("choice", "must be {names}", {"names": f"{', '.join(others)} or {last}"})
        return name

    return AfterValidator(check)


Text = Annotated[str, Field(min_length=1)]
Token = Annotated[str | int, PlainValidator(_token)]
IsoDate = Annotated[str, BeforeValidator(_iso_date)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
LoraStart = Annotated[LoraInit, _key_of(ADAPTER_STARTS)]
ObjectiveKey = Annotated[ObjectiveName, _key_of(OBJECTIVES)]
Optimizer = Annotated[OptimizerName, _key_of(OPTIMIZERS)]


class Section(BaseModel):
    """A frozen, strict part of params.yaml without defaults. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def with_value(self, path: str, value: Any) -> Self:
        """The section with another value of one parameter, by its name below the section: `lora.rank`."""
        name, _, rest = path.partition(".")
        return self.model_copy(update={name: getattr(self, name).with_value(rest, value) if rest else value})

    if not TYPE_CHECKING:  # A type checker would accept any name.

        def __getattr__(self, name: str) -> Any:
            """Called for a parameter that a stage does not declare (see `declared_params.declared_part`)."""
            if name in type(self).model_fields:
                section = type(self).__name__.lower()
                raise UserError(
                    f"{section}.{name}: the stage reads it but dvc.yaml does not list it under params; add it there"
                )
            return super().__getattr__(name)
