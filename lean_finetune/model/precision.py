"""Number formats of a run: the precision that `auto` means on a device, and the types of weights and arithmetic."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lean_finetune.config.declared_params import declared_part
from lean_finetune.config.field_types import AnyPrecision, Precision
from lean_finetune.config.schema import BaseWeights, Train
from lean_finetune.core.atomic_files import read_sealed
from lean_finetune.core.errors import UserError

if TYPE_CHECKING:
    from lean_finetune.config.schema import Params

BASE_WEIGHTS = "base_weights.json"
"""File beside an adapter: how training stored its base."""
PRECISION = "precision.json"
"""File of stage estimate: what train.precision means on hardware.gpu."""
DTYPES = {"bf16": torch.bfloat16, "pure_bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def base_weights_json(weights: BaseWeights) -> dict[str, Any]:
    """The content of BASE_WEIGHTS."""
    return {
        "method": weights.method,
        "precision": weights.precision,
        "quant_type": weights.quant.type,
        "double_quant": weights.quant.double,
    }


def base_weights_from(stored: Mapping[str, Any]) -> BaseWeights:
    """How training stored the base, by the content of BASE_WEIGHTS.

    Raises:
        ValueError: the content is not as `base_weights_json` wrote it.
    """
    quant = {"type": stored.get("quant_type"), "double": stored.get("double_quant")}
    found = BaseWeights.model_validate(
        {"method": stored.get("method"), "quant": quant, "precision": stored.get("precision")}
    )
    if found.precision == "auto":
        raise ValueError("precision must be that of the training")
    return found


def base_dtype(weights: BaseWeights) -> torch.dtype:
    """Type of the base weights: fp32 if method `full` trains in fp16, which cannot represent small updates."""
    return torch.float32 if weights.precision == "fp16" and not weights.adapted else DTYPES[weights.precision]


def adapter_dtype(weights: BaseWeights) -> torch.dtype:
    """Type of the adapters."""
    return torch.bfloat16 if weights.precision == "pure_bf16" else torch.float32


def autocast_dtype(weights: BaseWeights) -> torch.dtype | None:
    """Autocast type for matmuls of trained fp32 tensors; None if all tensors have one type."""
    if weights.precision == "fp16" or (weights.precision == "bf16" and weights.adapted):
        return DTYPES[weights.precision]
    return None


def autocast(weights: BaseWeights, device_type: str) -> Any:
    """Context of the forward pass."""
    dtype = autocast_dtype(weights)
    return torch.autocast(device_type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def choose_precision(
    choice: AnyPrecision, *, kind: Literal["cpu", "cuda"], native_bf16: bool, name: str
) -> tuple[Precision, str]:
    """The precision, and the reason.

    Args:
        choice: train.precision.
        kind: device type.
        native_bf16: whether the device computes in bf16.
        name: of the device, for the reason.

    Raises:
        UserError: the device does not compute in this type.
    """
    if choice != "auto":
        if choice in ("bf16", "pure_bf16") and not native_bf16:
            raise UserError(
                f"train.precision: bf16 needs compute capability 8.0 (Ampere) or later; got {choice} for {name}; set "
                "train.precision to fp16 (the loss is scaled, trained parameters are fp32)"
            )
        return choice, "as set"
    if kind == "cpu":
        return "fp32", f"{name} gains nothing from 16 bits"
    if native_bf16:
        return "bf16", f"{name} computes in bf16"
    return "fp16", f"{name} has no native bf16"


def precision_of(params: "Params", chosen: Path) -> Precision:
    """The precision of a run: train.precision, or for `auto` what stage estimate wrote into its file PRECISION.

    Raises:
        UserError: the file has no precision.
    """
    choice = params.train.precision
    if choice != "auto":
        return choice
    precision = read_sealed(chosen).get("precision")
    if precision not in DTYPES:
        raise UserError(f"{chosen}: must name the run's precision; got {precision!s:.40}; run `dvc repro -f estimate`")
    return precision


def resolved(params: "Params", precision: Precision) -> Train:
    """Section `train` with its precision on the device instead of `auto`.

    Under DVC it has only the parameters that the stage declares, and all of these count as read.
    """
    return declared_part(params.train).model_copy(update={"precision": precision})
