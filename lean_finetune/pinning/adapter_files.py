"""The files of a LoRA adapter, which strangers may have made: each is checked before anything uses it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lean_finetune.core.errors import UserError, shortened
from lean_finetune.pinning.adapter_config import BASE_ID, CHANGED_BASES, AdaptedLayers, AdapterConfig
from lean_finetune.pinning.config_file import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NotAnObject, read_object, reason_of
from lean_finetune.pinning.name_patterns import PatternFault

ADAPTER = "default"
"""peft's name of the one adapter."""
PEFT_PREFIX = "base_model.model."
"""In the name of an adapter's tensor, before that of its layer."""
LORA = ".lora_"
"""In the name of an adapter's tensor, after that of its layer; a trained copy of a layer has the layer's own names."""
DELTA = ".token_adapter.trainable_tokens_delta"
"""In the name of the tensor with the trained rows of an embedding or head, after that of the layer."""
AGAIN = "download or save it again"
MERGE_FIRST = "merge it into its base with PEFT, and name the result"


def fault(path: Path, what: str, remedy: str = AGAIN) -> UserError:
    """The one form of all refusals."""
    return UserError(f"model.adapter: {path} {what}; {remedy}")


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
    start = str(adapter.get("init_lora_weights")).lower()
    if start.startswith(CHANGED_BASES):
        raise fault(path, f"has init_lora_weights={shortened(start)}, which changed its base", MERGE_FIRST)
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
    with pattern_faults(directory):
        _check_weights(directory, adapter)
    return adapter


@contextmanager
def pattern_faults(directory: Path) -> Iterator[None]:
    """Turn a PatternFault of an adapter's config into a `UserError`."""
    try:
        yield
    except PatternFault as error:
        raise fault(directory / ADAPTER_CONFIG, f"cannot be used ({error})", "name another directory") from None


def check_base_name(directory: Path, adapter: Mapping[str, Any]) -> None:
    """Raise UserError unless an adapter's base is a directory or a hub id."""
    name = adapter["base_model_name_or_path"]
    if not os.path.isdir(name) and (os.path.isabs(name) or not BASE_ID.fullmatch(name)):
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
    layers = AdaptedLayers(adapter)
    if adapter.get("trainable_token_indices") and not any(name.endswith(DELTA) for name in tensors):
        raise fault(path, f"has no rows of the tokens that {ADAPTER_CONFIG} names")
    for name, tensor in tensors.items():
        if not tensor.dtype.startswith(("F", "BF")):
            raise fault(path, f"has {name} of type {tensor.dtype}; adapters have floating-point numbers")
        layer, found, _ = name.partition(".lora_")
        if not found or ".lora_embedding_" in name:
            continue
        if missing := [part for part in parts if f"{layer}.lora_{part}" not in tensors]:
            raise fault(path, f"has no {layer}.lora_{missing[0]}")
        if name.endswith(".lora_A.weight") and not layers.has_experts(own := layer_name(name)):
            if tensor.shape[:1] != (rank := layers.rank(own),):
                raise fault(path, f"has shape {tensor.shape} in {name}, and {ADAPTER_CONFIG} says rank {rank}")


def layer_name(tensor: str) -> str:
    """The layer of an adapter's tensor."""
    return tensor.removeprefix(PEFT_PREFIX).partition(LORA)[0].removesuffix(".base_layer")


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
        raise fault(path, f"is damaged ({reason_of(path, error)})") from None
    if not tensors:
        raise fault(path, "has no tensors")
    return tensors


def refuse_missing(path: Path) -> None:
    """Raise UserError unless a file of weights exists."""
    if not path.is_file():
        pickles = sorted(file.name for file in path.parent.glob("*.bin"))
        found = f" (only {pickles[0]}, a pickle, which can run code)" if pickles else ""
        raise fault(path, f"is missing{found}", "save the weights as safetensors")
