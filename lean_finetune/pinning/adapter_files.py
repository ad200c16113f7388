"""The files of a LoRA adapter, which strangers may have made: each is checked before anything uses it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lean_finetune.core.errors import UserError
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NotAnObject, read_object
from lean_finetune.pinning.hub import HUB_ID

LORA = ".lora_"
"""In the name of an adapter's tensor, after that of its layer; a trained copy of a layer has the layer's own names."""
AGAIN = "download or save it again"
BASE_ID = re.compile(rf"(?:{HUB_ID.pattern}|\w[\w.-]*)")
"""A hub id; old ones have no organisation."""
REVISION = re.compile(r"\w[\w./-]*")
"""A commit, branch or tag of the hub."""


def fault(path: Path, what: str, remedy: str = AGAIN) -> UserError:
    """The one form of all refusals."""
    return UserError(f"model.adapter: {path} {what}; {remedy}")


class AdapterConfig(BaseModel):
    """What is read of adapter_config.json here, in PEFT's names; PEFT reads the rest."""

    model_config = ConfigDict(strict=True, extra="ignore")

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM", "SEQ_CLS"] | None = None
    base_model_name_or_path: str = Field(min_length=1)
    revision: str | None = Field(default=None, pattern=rf"^{REVISION.pattern}$")
    r: int = Field(ge=1)
    lora_alpha: int | float = Field(allow_inf_nan=False)
    target_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, int | float] | None = None
    use_dora: bool | None = False
    use_rslora: bool | None = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    megatron_config: None = None

    @model_validator(mode="after")
    def _has_targets(self) -> "AdapterConfig":
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules: must name the adapted layers")
        return self


@dataclass(frozen=True, kw_only=True)
class AdapterTensor:
    """A tensor of an adapter's file."""

    dtype: str
    """In safetensors' names."""
    shape: tuple[int, ...]


def read_adapter(directory: Path) -> Mapping[str, Any]:
    """The content of adapter_config.json, checked with the header of its weights.

    Raises UserError if it is not a LoRA adapter in safetensors, or damaged.
    """
    path = directory / ADAPTER_CONFIG
    try:
        adapter = read_object(path)
    except NotAnObject as error:
        raise fault(path, str(error)) from None
    try:
        AdapterConfig.model_validate(adapter)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        got = f"; got {first['input']!r}"[:80] if name else ""
        message = f"{name}: {first['msg']}{got}".removeprefix(": Value error, ")
        raise fault(path, f"is not one of a LoRA adapter ({message})", "name another directory") from None
    if adapter.get("alora_invocation_tokens"):
        raise fault(
            path,
            "is that of an activated LoRA (alora_invocation_tokens), which changes only the tokens after these: always "
            "on, or merged, it is another model",
            "name another directory, or use it with peft",
        )
    _check_weights(directory, adapter)
    return adapter


def check_base_name(directory: Path, adapter: Mapping[str, Any]) -> None:
    """Raise UserError unless an adapter's base is a directory or a hub id."""
    name = adapter["base_model_name_or_path"]
    if not Path(name).is_dir() and (Path(name).is_absolute() or not BASE_ID.fullmatch(name)):
        raise fault(
            directory / ADAPTER_CONFIG,
            f"must have a directory or a hub id as base_model_name_or_path; got {name!r}, which does not exist",
            "put the base model back, or write its hub id there",
        )


def _check_weights(directory: Path, adapter: Mapping[str, Any]) -> None:
    """Raise UserError unless every adapted layer has all its tensors, of the rank of the config."""
    path = directory / ADAPTER_WEIGHTS
    tensors = adapter_tensors(directory)
    parts = ["A.weight", "B.weight", *(["magnitude_vector"] if adapter.get("use_dora") else [])]
    one_rank = not adapter.get("rank_pattern") and not adapter.get("target_parameters")
    for name, tensor in tensors.items():
        if not tensor.dtype.startswith(("F", "BF")):
            raise fault(path, f"has {name} of type {tensor.dtype}; adapters have floating-point numbers")
        layer, found, _ = name.partition(".lora_")
        if not found or ".lora_embedding_" in name:
            continue
        if missing := [part for part in parts if f"{layer}.lora_{part}" not in tensors]:
            raise fault(path, f"has no {layer}.lora_{missing[0]}")
        if one_rank and name.endswith(".lora_A.weight") and tensor.shape[0] != adapter["r"]:
            raise fault(path, f"has rank {tensor.shape[0]} in {name}, and {ADAPTER_CONFIG} has r={adapter['r']}")


def adapter_tensors(directory: Path) -> dict[str, AdapterTensor]:
    """The tensors of an adapter's file by name; its header is read. Raises UserError if it is damaged or has none."""
    from safetensors import SafetensorError, safe_open

    path = directory / ADAPTER_WEIGHTS
    refuse_missing(path)
    try:
        with safe_open(str(path), framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            tensors = {
                name: AdapterTensor(dtype=one.get_dtype(), shape=tuple(one.get_shape())) for name, one in slices.items()
            }
    except (OSError, ValueError, SafetensorError) as error:
        raise fault(path, f"is damaged ({error})") from None
    if not tensors:
        raise fault(path, "has no tensors")
    return tensors


def refuse_missing(path: Path) -> None:
    """Raise UserError unless a file of weights exists."""
    if not path.is_file():
        pickles = sorted(file.name for file in path.parent.glob("*.bin"))
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise fault(path, f"is missing{found}", "save the weights as safetensors")
