"""The files of a tuned model's directory, which strangers may have made: each is checked before anything uses it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError

from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lean_finetune.model.files.safetensors_files import StoredTensor, stored_tensors
from lean_finetune.pinning.config_file import NotAnObject, read_object
from lean_finetune.pinning.hub import HUB_ID
from lean_finetune.pinning.model_source import shard_names

AGAIN = "download or save it again"
BASE_ID = re.compile(rf"(?:{HUB_ID.pattern}|\w[\w.-]*)")
"""A hub id; old ones have no organisation."""
REVISION = re.compile(r"\w[\w./-]*")
"""A commit, branch or tag of the hub."""
CONTENT_ADDRESS = re.compile(r"[0-9a-f]{30,64}")
"""Name of a file in the caches of the hub and of DVC, which may store a directory as links into them."""


@contextmanager
def named_by_option() -> Iterator[None]:
    """Let errors name --model where functions that read the model of params.yaml name model.name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"--model: {str(error).removeprefix('model.name: ').removeprefix('--model: ')}") from None


def fault(path: Path, what: str, remedy: str = AGAIN) -> UserError:
    """The one form of all refusals."""
    return UserError(f"--model: {path} {what}; {remedy}")


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if it has none."""
    try:
        return read_object(path)
    except NotAnObject as error:
        raise fault(path, str(error)) from None


class AdapterConfig(BaseModel):
    """What is read of adapter_config.json here, in PEFT's names; PEFT reads the rest."""

    model_config = ConfigDict(strict=True, extra="ignore")

    peft_type: Literal["LORA"] = "LORA"
    task_type: Literal["CAUSAL_LM"] | None = None
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
    megatron_config: None = None

    @model_validator(mode="after")
    def _has_targets(self) -> "AdapterConfig":
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules: must name the adapted layers")
        return self


def read_adapter(directory: Path) -> Mapping[str, Any]:
    """The content of adapter_config.json, checked with the header of its weights.

    Raises UserError if it is not a LoRA adapter in safetensors, or damaged.
    """
    path = directory / ADAPTER_CONFIG
    adapter = object_in(path)
    try:
        AdapterConfig.model_validate(adapter)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        got = f"; got {first['input']!r}"[:80] if name else ""
        message = f"{name}: {first['msg']}{got}".removeprefix(": Value error, ")
        raise fault(path, f"is not one of a LoRA adapter ({message})", "name another directory") from None
    _check_base_name(adapter["base_model_name_or_path"], path)
    _check_adapter_weights(directory, adapter)
    return adapter


def _check_adapter_weights(directory: Path, adapter: Mapping[str, Any]) -> None:
    """Raise UserError unless every adapted layer has all its tensors, of the rank of the config."""
    path = directory / ADAPTER_WEIGHTS
    tensors = _tensors(path)
    parts = ["A.weight", "B.weight", *(["magnitude_vector"] if adapter.get("use_dora") else [])]
    one_rank = not adapter.get("rank_pattern") and not adapter.get("target_parameters")
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise fault(path, f"has {name} of type {tensor.dtype}; adapters have floating-point numbers")
        layer, found, _ = name.partition(".lora_")
        if not found or ".lora_embedding_" in name:
            continue
        if missing := [part for part in parts if f"{layer}.lora_{part}" not in tensors]:
            raise fault(path, f"has no {layer}.lora_{missing[0]}")
        if one_rank and name.endswith(".lora_A.weight") and tensor.shape[0] != adapter["r"]:
            raise fault(path, f"has rank {tensor.shape[0]} in {name}, and {ADAPTER_CONFIG} has r={adapter['r']}")


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, of which the header is read. Raises UserError if it is damaged or has none."""
    if not path.is_file():
        pickles = sorted(file.name for file in path.parent.glob("*.bin"))
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise fault(path, f"is missing{found}", "save the weights as safetensors")
    try:
        tensors = stored_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise fault(path, f"is damaged ({error})") from None
    if not tensors:
        raise fault(path, "has no tensors")
    return tensors


def check_weights(directory: Path) -> None:
    """Check the headers of a model's weight files. Raises UserError if one is missing or damaged."""
    for name in shard_names(directory):
        _tensors(directory / name)


def _check_base_name(name: str, path: Path) -> None:
    """Raise UserError unless an adapter's base is a directory or a hub id."""
    if not Path(name).is_dir() and (Path(name).is_absolute() or not BASE_ID.fullmatch(name)):
        raise UserError(
            f"--model: {path}: base_model_name_or_path must be a directory or a hub id; got {name!r}, which does not "
            "exist; put the base model back, or write its hub id there"
        )


def refuse_foreign_link(path: Path) -> None:
    """Refuse a link to a file of another name: an export would publish that file of this machine.

    Caches of the hub and of DVC name files by their content.
    """
    if not path.is_symlink():
        return
    target = path.resolve()
    if target.name != path.name and not CONTENT_ADDRESS.fullmatch(target.name):
        raise fault(path, f"is a link to {target}, which an export would contain", "replace the link by its file")
